"""Copies of pieces of tensors between buffers and their boxes; no store, no messages.

A copy does not interpret elements: views of unsigned integers of the same size replace the types
on both sides, so that NaNs, signs of zeros and exotic floats stay bit by bit the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.items import TORCH_TYPES, LocalItem
from planish.checkpoint.plan.reads import Pieces

if TYPE_CHECKING:
    import torch
    from torch import Tensor

RAW: dict[int, np.dtype[Any]] = {
    size: np.dtype(name) for size, name in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"), (16, "c16"))
}
"""Bytes of an element -> numpy type that represents it."""

Array: TypeAlias = NDArray[Any]
Bytes: TypeAlias = NDArray[np.uint8]


Targets: TypeAlias = Sequence[Sequence[Any]]
"""[item][box]: a numpy array of a `RAW` type in the shape of the box, or a `TensorTarget`."""


class PieceList:
    """The rows of `Pieces` as plain Python values, because each row is copied on its own."""

    def __init__(self, pieces: Pieces) -> None:
        self.item, self.box = pieces.item.tolist(), pieces.box.tolist()
        self.source, self.strides = pieces.source.tolist(), pieces.strides.tolist()
        self.lengths, self.target = pieces.lengths.tolist(), pieces.target.tolist()
        self.itemsize = pieces.itemsize.tolist()

    def scatter(self, row: int, buffer: Bytes, base: int, targets: Targets) -> None:
        """Copy a piece to its target, from its request at byte `base` of `buffer`."""
        self._put(row, self._strided(row, buffer, base), targets)

    def pack(self, rows: range, buffer: Bytes, out: Bytes) -> None:
        """Copy pieces one after another into `out`; a `source` is a byte offset in `buffer`."""
        filled = 0
        for row in rows:
            packed, size = self._packed(row, out, filled)
            packed[...] = self._strided(row, buffer, 0)
            filled += size

    def unpack(self, rows: range, data: Bytes, targets: Targets) -> None:
        """Copy densely packed pieces to their targets."""
        base = 0
        for row in rows:
            packed, size = self._packed(row, data, base)
            self._put(row, packed, targets)
            base += size

    def _strided(self, row: int, buffer: Bytes, base: int) -> Array:
        """Return a piece as a view of the request that begins at byte `base` of `buffer`."""
        return np.ndarray(
            self.lengths[row],
            RAW[self.itemsize[row]],
            buffer=buffer,
            offset=base + self.source[row],
            strides=self.strides[row],
        )

    def _packed(self, row: int, buffer: Bytes, base: int) -> tuple[Array, int]:
        """Return a piece as a dense view from byte `base` of `buffer`, and its number of bytes."""
        size = math.prod(self.lengths[row]) * self.itemsize[row]
        dtype = RAW[self.itemsize[row]]
        return np.ndarray(self.lengths[row], dtype, buffer=buffer, offset=base), size

    def _put(self, row: int, value: Array, targets: Targets) -> None:
        """Copy the elements of a piece into the wanted box."""
        target = targets[self.item[row]][self.box[row]]
        dims = len(target.shape)
        start, extent = self.target[row], self.lengths[row]
        place = tuple(slice(start[d], start[d] + extent[d]) for d in range(dims))
        target[place] = value.reshape(tuple(extent[:dims]))


def numpy_targets(arrays: Sequence[Array], boxes: Sequence[Sequence[Box]]) -> Targets:
    """Return targets for one array per item, in the shape of its box or 1-D, box after box."""
    return [
        list(_parts(array.view(RAW[array.dtype.itemsize]), mine))
        for array, mine in zip(arrays, boxes, strict=True)
    ]


def tensor_targets(items: Sequence[LocalItem]) -> Targets:
    """Return the boxes of items as targets; `tensor.dtype` of an item is the stored type."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    targets: list[Sequence[Any]] = []
    for item in items:
        if not item.volume:
            targets.append([])
            continue
        assert item.data is not None
        data, stored = item.data.detach(), getattr(torch, TORCH_TYPES[item.tensor.dtype])
        has_stored_bytes = data.device.type == "cpu" and data.dtype == stored
        if has_stored_bytes and not data.is_conj() and not data.is_neg():
            size = data.element_size()
            raw = (data if size == 16 else data.view(integers[size])).numpy().view(RAW[size])
            targets.append(list(_parts(raw, item.boxes)))
        else:
            targets.append([TensorTarget(part, stored) for part in _parts(data, item.boxes)])
    return targets


def _parts(data: Any, boxes: Sequence[Box]) -> Iterator[Any]:
    """Yield each box as a view of the array or tensor that has all boxes of an item."""
    if len(boxes) == 1:
        yield data.reshape(boxes[0].lengths)
        return
    start = 0
    for box in boxes:
        yield data[start : start + box.volume].reshape(box.lengths)
        start += box.volume


class TensorTarget:
    """Target that is a tensor on a device, or of another type than the stored one."""

    def __init__(self, tensor: Tensor, stored: torch.dtype) -> None:
        self.tensor, self.stored = tensor, stored
        self.shape = tuple(tensor.shape)

    def __setitem__(self, place: tuple[slice, ...], value: Array) -> None:
        import torch

        raw = torch.from_numpy(np.array(value, order="C").reshape(-1).view(np.uint8))
        with torch.no_grad():
            self.tensor[place].copy_(raw.view(self.stored).view(value.shape))
