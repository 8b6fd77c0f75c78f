"""Record of the experts of each token in the running rows, parallel to the KV cache.

A hook reads the arguments of the experts module in each layer, which contain the router's choice.
The forward pass does not change.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


class RoutingCells:
    """Choices of experts by row and absolute position, for all layers with experts."""

    def __init__(
        self, model: Any, rows: int, dtype: str, is_own: Callable[[], bool] = lambda: True
    ) -> None:
        """Attach hooks to a causal language model of transformers until `close`.

        `dtype` is an integer type for the id of every expert. If several batches take turns on one
        model, `is_own` returns whether the current forward pass is over these rows.
        """
        experts = [m for name, m in model.named_modules() if name.endswith(".mlp.experts")]
        self._rows, self._width, self._is_own = rows, 0, is_own
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._heard: dict[int, Tensor] = {}
        self._handles = [
            module.register_forward_pre_hook(partial(self.hear, layer))
            for layer, module in enumerate(experts)
        ]
        self._cells: Tensor | None = None

    def hear(self, layer: int, _: Any, given: tuple[Tensor, ...]) -> None:
        """Hook on the experts of a layer: the second argument is the router's choice [tokens,
        k].
        """
        if self._is_own():
            self._heard[layer] = given[1]

    def _choices(self) -> Tensor:
        """Return [tokens, layers, experts per token] of the last forward pass."""
        heard = [self._heard[layer] for layer in range(len(self._handles))]
        choices = torch.stack(heard, dim=1).to(self._dtype)
        if self._cells is None:
            shape = (self._rows, self._width, *choices.shape[1:])
            self._cells = torch.full(shape, -1, dtype=self._dtype, device=choices.device)
        return choices

    def release(self) -> None:
        """Free the storage of the rows."""
        self._width, self._cells = 0, None

    def widen(self, width: int) -> None:
        """Widen every row to `width` tokens and keep its content."""
        old, self._width = self._cells, width
        if old is not None:
            self._cells = old.new_full((self._rows, width, *old.shape[2:]), -1)
            self._cells[:, : old.shape[1]] = old

    def fill(self, rows: Tensor, owner: Tensor) -> None:
        """Record the forward pass over the first columns of whole rows; arguments as in the
        cache.
        """
        choices = self._choices()
        assert self._cells is not None
        choices = choices.view(int(owner.max()) + 1, -1, *choices.shape[1:])
        self._cells[rows, : choices.shape[1]] = choices[owner]

    def append(self, cells: Tensor) -> None:
        """Record the forward pass over one token of each row; `cells` [n] int64 as in the cache."""
        choices = self._choices()
        assert self._cells is not None
        self._cells.flatten(0, 1).index_copy_(0, cells, choices)

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copy the first `longest` columns of rows `source` to rows `target` (disjoint)."""
        if self._cells is not None:
            self._cells[target, :longest] = self._cells[source, :longest]

    def read(self, row: int, length: int) -> np.ndarray:
        """Return a copy [length, layers, experts per token] of the first tokens of a row."""
        assert self._cells is not None
        return self._cells[row, :length].to("cpu", copy=True).numpy()

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()
