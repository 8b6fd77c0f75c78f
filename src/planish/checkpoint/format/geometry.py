"""Geometry of boxes inside tensors: shifts, cuts, intersections; and array functions for planning.

The module needs no torch and knows neither ranks nor files. If boxes with different numbers of
dimensions share one array, missing dimensions are padded with offset 0 and length 1.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (shards as boxes).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Sides = tuple[int, ...]
"""Shape, offsets or lengths: one number for each dimension."""
I64 = NDArray[np.int64]
"""Counts, ids and coordinates."""
Flags = NDArray[np.bool_]
"""One truth value for each row."""
MAX_ELEMENTS = 1 << 62
"""Upper bound of the elements of a tensor, so that sums of volumes fit into int64."""


class Box(NamedTuple):
    """A half-open box in the coordinates of a tensor; without dimensions: the scalar's element."""

    offsets: Sides
    lengths: Sides

    @property
    def ends(self) -> Sides:
        """The first coordinates after the box."""
        return tuple(map(int.__add__, self.offsets, self.lengths))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.lengths)


def box_of(offsets: I64, lengths: I64, dims: int) -> Box:
    """Return padded sides [n] as a box of `dims` dimensions."""
    return Box(tuple(offsets[:dims].tolist()), tuple(lengths[:dims].tolist()))


def whole(shape: Sequence[int]) -> Box:
    """Return the box that covers a tensor of `shape`."""
    return Box((0,) * len(shape), tuple(shape))


def shift(box: Box, offsets: Sequence[int]) -> Box:
    """Return `box` moved by `offsets`: from the coordinates of a shard to those of its tensor."""
    return Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), box.lengths)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    low = tuple(map(max, a.offsets, b.offsets))
    high = tuple(map(min, a.ends, b.ends))
    lengths = tuple(h - o for o, h in zip(low, high, strict=True))
    return Box(low, lengths) if all(length > 0 for length in lengths) else None


def flat_boxes(lengths: Sequence[int], start: int, stop: int) -> list[Box]:
    """Cut the row-major range `[start, stop)` of a box of `lengths` into boxes relative to it.

    The boxes are consecutive: one after the other they are exactly the range, so a flat slice is
    stored without gather or copy. There are at most `2 n - 1` boxes for n > 0 dimensions.

    Example:
        >>> flat_boxes((3, 2), 0, 3)
        [Box(offsets=(0, 0), lengths=(1, 2)), Box(offsets=(1, 0), lengths=(1, 1))]

    Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (decomposition of irregular shards).
    """
    shape = tuple(lengths)
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
        return _under(first, flat_boxes(shape[1:], head, tail))
    boxes = []
    if head:
        boxes += _under(first, flat_boxes(shape[1:], head, inner))
        first += 1
    if last > first:
        boxes.append(Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])))
    if tail:
        boxes += _under(last, flat_boxes(shape[1:], 0, tail))
    return boxes


def _under(index: int, boxes: list[Box]) -> list[Box]:
    """Return boxes of a sub-tensor as boxes at `index` of an added leading dimension."""
    return [Box((index, *box.offsets), (1, *box.lengths)) for box in boxes]


def volumes(lengths: I64) -> I64:
    """Return [k]: number of elements of each box of `lengths` [k, n]; 1 for n = 0."""
    result: I64 = np.multiply.reduce(lengths, axis=1, dtype=np.int64)
    return result


def order_by(*columns: I64) -> I64:
    """Return the stable order of rows by non-negative columns; the first column is the major key.

    Columns that fit together into one int64 are packed, which sorts several times faster.
    """
    spans = [int(column.max(initial=0)) + 1 for column in columns]
    if math.prod(spans) >= MAX_ELEMENTS:
        return np.lexsort(columns[::-1]).astype(np.int64)
    key = columns[0]
    for column, span in zip(columns[1:], spans[1:], strict=True):
        key = key * span + column
    return np.argsort(key, kind="stable").astype(np.int64)


def ranges(starts: I64, counts: I64) -> I64:
    """Return `start, start + 1, ...` for each start, one after the other."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    result: I64 = np.repeat(starts - (ends - counts), counts)
    result += np.arange(total)
    return result


def fresh(*columns: I64) -> Flags:
    """Return [k]: True if a row differs from the one before in any column; row 0 is True."""
    result = np.ones(len(columns[0]), bool)
    if len(result):
        result[1:] = False
        for column in columns:
            result[1:] |= column[1:] != column[:-1]
    return result


def run_sums(values: I64, starts: I64) -> I64:
    """Return the exact sum of `values` from each start to the next; [] for no starts."""
    if not len(starts):
        return np.zeros(0, np.int64)
    return np.add.reduceat(values, starts).astype(np.int64)


def cut(values: Any, counts: I64) -> list[Any]:
    """Return consecutive parts of a sequence or array; `counts` [k] are their lengths."""
    bounds = [0, *np.cumsum(counts).tolist()]
    return [values[low:high] for low, high in itertools.pairwise(bounds)]


def host_numbers(hosts: Sequence[int] | None, ranks: int) -> I64:
    """Return [ranks]: the host of each rank, counted from 0; None is one host for all."""
    if hosts is None:
        return np.zeros(ranks, np.int64)
    return np.unique(np.asarray(hosts), return_inverse=True)[1].astype(np.int64)


def before(counts: I64) -> I64:
    """Return [k]: the sum of the counts before each row (exclusive cumulative sum)."""
    return np.cumsum(counts) - counts


def strides_of(lengths: I64) -> I64:
    """Return [k, n]: row-major strides, in elements, of boxes of `lengths` [k, n]."""
    strides = np.ones_like(lengths)
    for dim in range(lengths.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * lengths[:, dim + 1]
    return strides


def fit(sides: I64, width: int, fill: int) -> I64:
    """Return padded coordinates [k, n] as [k, width]; dimensions over `width` must be padding."""
    if sides.shape[1] >= width:
        return sides[:, :width]
    missing = width - sides.shape[1]
    return np.pad(sides, ((0, 0), (0, missing)), constant_values=fill)
