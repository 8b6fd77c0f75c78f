"""Record of the tensors of a policy that vLLM's loaders have read.

A loader drops a tensor whose name its model does not know, often without a message, such as the
bias of a projection in a family without biases. The loader then reads no elements of that tensor.
This module detects that for every family, kernel and device.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator
from copy import copy
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

_taken: WeakKeyDictionary[nn.Module, frozenset[str]] = WeakKeyDictionary()
"""Model to the names of the tensors that its loader read last in this process."""


class Readings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the names of tensors that any operation except a view reads in the block.

    Source: vLLM 0.32, `model_loader/reload/meta.py`, counts in the same way what loaders copy.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()
        self._places: list[tuple[int, int, str]] = []
        """Address, end and name of tensors that were given to a loader."""

    def give(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors by name to a loader."""
        for name, tensor in tensors:
            begin = tensor.data_ptr()
            end = begin + tensor.nbytes
            # A tensor that overlaps earlier tensors reuses their memory, so the earlier ones are
            # gone.
            index = max(0, bisect_right(self._places, (begin,)) - 1)
            while index < len(self._places) and self._places[index][0] < end:
                if self._places[index][1] > begin:
                    del self._places[index]
                else:
                    index += 1
            insort(self._places, (begin, end, name))
            yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not func.is_view:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and leaf.numel():
                    self._see(leaf.data_ptr())
        return func(*args, **(kwargs or {}))

    def _see(self, address: int) -> None:
        index = bisect_right(self._places, (address + 1,)) - 1
        if index >= 0 and address < self._places[index][1]:
            self.names.add(self._places[index][2])


def load(model: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Load tensors into a model of vLLM, and record which of them the model reads."""
    with Readings() as readings:
        model.load_weights(readings.give(tensors))
    _taken[model] = frozenset(readings.names)


class SeenLoader(DefaultModelLoader):  # type: ignore[misc]  # vllm is untyped here
    """vLLM's own loader, with a record of the tensors that the model reads."""

    def __init__(self, load_config: Any) -> None:
        config = copy(load_config)
        config.load_format = "auto"
        super().__init__(config)
        self._readings = Readings()

    def get_all_weights(self, *args: Any, **options: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the policy."""
        yield from self._readings.give(super().get_all_weights(*args, **options))

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load the policy's tensors, and record which of them the model reads."""
        with self._readings:
            super().load_weights(model, model_config)
        _taken[model] = frozenset(self._readings.names)


class TellsTaken:
    """Extension of vLLM's worker class."""

    def planish_taken(self: Any) -> list[str]:
        """Return the names of the tensors that the model of this rank read last."""
        return sorted(_taken.get(self.get_model(), ()))
