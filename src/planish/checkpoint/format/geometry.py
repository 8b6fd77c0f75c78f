"""Boxes inside tensors: moved, cut and intersected.

Deliberately without torch, and without a word about ranks or files. Where boxes of tensors with
different numbers of dimensions share one array, missing dimensions are padded with offset 0 and
length 1: volumes and intersections stay right.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (shards as boxes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

I64 = NDArray[np.int64]
"""Counts, ids and coordinates."""
MAX_ELEMENTS = 1 << 62
"""A tensor of more elements is refused, so that sums of volumes fit into int64."""


class Box(NamedTuple):
    """A half-open box in the coordinates of a tensor; no dimensions: a scalar's one element.

    Example:
        >>> Box((1, 0), (2, 3)).ends, Box((1, 0), (2, 3)).volume, Box((), ()).volume
        ((3, 3), 6, 1)
    """

    offsets: tuple[int, ...]
    """First index in each dimension."""
    lengths: tuple[int, ...]
    """Extent in each dimension."""

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dimension."""
        return tuple(map(int.__add__, self.offsets, self.lengths))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Return `box` moved by `offsets`: from the coordinates of a shard to those of its tensor."""
    return Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), box.lengths)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the elements in both boxes, None when there are none.

    Example:
        >>> intersect(Box((0, 0), (2, 2)), Box((1, 0), (2, 1)))
        Box(offsets=(1, 0), lengths=(1, 1))
    """
    low = tuple(map(max, a.offsets, b.offsets))
    high = tuple(map(min, a.ends, b.ends))
    lengths = tuple(h - o for o, h in zip(low, high, strict=True))
    return Box(low, lengths) if all(length > 0 for length in lengths) else None


def flat_boxes(lengths: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major range `[start, stop)` of a box of `lengths` into boxes.

    The boxes are consecutive: written one after the other they are exactly the range, so a flat
    slice is stored without gather or copy. At most `2 n - 1` of them for n > 0 dimensions.

    Args:
        lengths: Extent of the box in each dimension.
        start: First element of the range, row-major.
        stop: One past the last element, row-major.

    Returns:
        Boxes relative to the box, in increasing row-major order; none for an empty range.

    Raises:
        ValueError: the range does not lie in the box.

    Example:
        >>> flat_boxes((3, 2), 0, 3)
        [Box(offsets=(0, 0), lengths=(1, 2)), Box(offsets=(1, 0), lengths=(1, 1))]

    Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (decomposition of irregular shards).
    """
    shape = tuple(lengths)
    if not 0 <= start <= stop <= math.prod(shape):
        raise ValueError(
            f"a row-major range must lie in [0, {math.prod(shape)}], got [{start}, {stop}) of a "
            f"box of {shape}; the flat shard and its tensor do not belong together"
        )
    return _cut(shape, start, stop)


def _cut(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    if start >= stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:
        return _under(first, _cut(shape[1:], head, tail))
    boxes = []
    if head:
        boxes += _under(first, _cut(shape[1:], head, inner))
        first += 1
    if last > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += _under(last, _cut(shape[1:], 0, tail))
    return boxes


def _under(index: int, boxes: list[Box]) -> list[Box]:
    """Put boxes of a sub-tensor under index `index` of one more leading dimension."""
    return [Box((index, *box.offsets), (1, *box.lengths)) for box in boxes]


def volumes(lengths: I64) -> I64:
    """Return [k]: elements of each box of `lengths` [k, n]; 1 for n = 0."""
    result: I64 = np.multiply.reduce(lengths, axis=1, dtype=np.int64)
    return result
