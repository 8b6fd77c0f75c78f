"""A static key-value cache: one row per running request, written in place.

Each row has its own positions, so requests of different lengths share a batch without padding on
the left. Attention reads only the columns up to the longest living row. There is no paging, and
requests do not share prefixes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROW_STEP = 64
"""The width of rows is a multiple of this number of tokens."""


@dataclass
class _Layer:
    keys: Tensor
    """[rows, kv heads, width, key size]"""
    values: Tensor
    """[rows, kv heads, width, value size]"""
    heads: Tensor
    """[kv heads]: offset of each head in the flat [rows * kv heads * width] view."""


class KeyValueCache:
    """Keys and values of all layers, by row and absolute position.

    Layers take their sizes from the first write. Unwritten cells are zero or contain an
    earlier request; the attention bias hides both, and both are finite.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self.rows = rows
        self.width = 0
        self._device = device
        self._layers: dict[int, _Layer] = {}

    def reserve(self, width: int) -> bool:
        """Widen every row to at least `width` tokens; return whether the storage moved."""
        if width <= self.width:
            return False
        self.width = -(-max(width, 2 * self.width if self._layers else 0) // ROW_STEP) * ROW_STEP
        for index, old in list(self._layers.items()):
            new = self._new_layer(old.keys.shape[1], old.keys, old.values)
            new.keys[:, :, : old.keys.shape[2]] = old.keys
            new.values[:, :, : old.values.shape[2]] = old.values
            self._layers[index] = new
        return True

    def _new_layer(self, heads: int, keys: Tensor, values: Tensor) -> _Layer:
        shape = (self.rows, heads, self.width)
        return _Layer(
            torch.zeros((*shape, keys.shape[-1]), dtype=keys.dtype, device=self._device),
            torch.zeros((*shape, values.shape[-1]), dtype=values.dtype, device=self._device),
            torch.arange(heads, device=self._device) * self.width,
        )

    def _layer(self, index: int, keys: Tensor, values: Tensor) -> _Layer:
        if index not in self._layers:
            self._layers[index] = self._new_layer(keys.shape[1], keys, values)
        return self._layers[index]

    def append(
        self, index: int, keys: Tensor, values: Tensor, cells: Tensor, longest: int
    ) -> tuple[Tensor, Tensor]:
        """Write one token of a layer into each of the first n rows; return views for attention.

        Keys and values are [n, kv heads, 1, size], cells [n] int64 are `row * width + position`.
        The views are [n, kv heads, longest, size].
        """
        layer = self._layer(index, keys, values)
        num, heads = keys.shape[:2]
        if heads > 1:
            # row * heads * width + head * width + position
            row = cells // self.width
            cells = (cells + row * ((heads - 1) * self.width))[:, None] + layer.heads
            cells = cells.reshape(-1)
        for storage, new in ((layer.keys, keys), (layer.values, values)):
            size = storage.shape[-1]
            storage.view(-1, size).index_copy_(0, cells, new.reshape(-1, size))
        return layer.keys[:num, :, :longest], layer.values[:num, :, :longest]

    def fill(self, index: int, keys: Tensor, values: Tensor, rows: Tensor, owner: Tensor) -> None:
        """Write the first columns of whole rows [k] of a layer.

        Row i gets the keys and values with number `owner[i]` ([k] int64) of `keys` and `values` [m,
        kv heads, length, size].
        """
        layer = self._layer(index, keys, values)
        length = keys.shape[2]
        layer.keys[rows, :, :length] = keys[owner]
        layer.values[rows, :, :length] = values[owner]

    def move(self, source: Tensor, target: Tensor, longest: int) -> None:
        """Copy the first `longest` columns of rows `source` to rows `target` (disjoint)."""
        for layer in self._layers.values():
            for storage in (layer.keys, layer.values):
                storage[target, :, :longest] = storage[source, :, :longest]

    def clear(self, row: int) -> None:
        """Zero one row, since a NaN in it would survive a product with weight zero."""
        for layer in self._layers.values():
            layer.keys[row] = 0
            layer.values[row] = 0

    def release(self) -> None:
        """Free the storage; the rows are as before the first write."""
        self.width, self._layers = 0, {}

    def num_bytes(self) -> int:
        """Return the size of the storage in bytes."""
        return sum(x.keys.nbytes + x.values.nbytes for x in self._layers.values())
