"""Which stored shards meet which wanted boxes: one index for all tensors, all boxes at once.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (local load plan).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import I64, MAX_ELEMENTS
from planish.checkpoint.format.records import Metadata
from planish.checkpoint.plan.ordering import before, fresh, order_by, ranges

_CHUNK = 1 << 20
"""Candidate pairs that are held in memory at a time."""


def fit(sides: I64, width: int, fill: int) -> I64:
    """Return padded coordinates [k, n] with another number of dimensions, [k, width].

    Dimensions over `width` must be padding.
    """
    if sides.shape[1] >= width:
        return sides[:, :width]
    missing = width - sides.shape[1]
    return np.pad(sides, ((0, 0), (0, missing)), constant_values=fill)


class ShardIndex:
    """The stored shards of all tensors, sorted along the most-cut dimension of each tensor.

    Tensors lie one behind the other on one number line, so that one binary search serves the
    boxes of many tensors.
    """

    def __init__(self, metadata: Metadata) -> None:
        """Index the shards of `metadata`.

        Raises:
            LayoutMismatch: the tensors are too large for one number line.
        """
        shards, shapes = metadata.shards, metadata.tensors.shapes
        self.width = max(1, shapes.shape[1])
        offsets, lengths = fit(shards.offsets, self.width, 0), fit(shards.lengths, self.width, 1)
        shapes = fit(shapes, self.width, 1)
        if shapes.astype(np.float64).sum() >= MAX_ELEMENTS:
            raise LayoutMismatch("all shapes of a state together must stay below 2**62 indices")
        self._dim = _most_cut(shards.tensor, offsets, len(shapes))
        rows = np.arange(len(shapes))
        self._base = before(shapes[rows, self._dim] + 1)
        dims = self._dim[shards.tensor]
        rows = np.arange(len(offsets))
        start = self._base[shards.tensor] + offsets[rows, dims]
        self._ids = np.argsort(start, kind="stable").astype(np.int64)
        self._start = start[self._ids]
        self._reach = np.maximum.accumulate((start + lengths[rows, dims])[self._ids])
        self._low, self._high = offsets, offsets + lengths

    def meeting(self, tensor: I64, offsets: I64, lengths: I64) -> tuple[I64, I64, I64, I64]:
        """Return the pairs of boxes and shards that have an element in common.

        Args:
            tensor: [w], row of the tensor of each box.
            offsets: [w, width], first element; inside of the tensor.
            lengths: [w, width], extent, at least 1.

        Returns:
            [m] the box, [m] the shard, ascending by both; [m, width] first element and extent of
            what they have in common.
        """
        rows, dims = np.arange(len(tensor)), self._dim[tensor]
        low = self._base[tensor] + offsets[rows, dims]
        first = np.searchsorted(self._reach, low, side="right")
        last = np.searchsorted(self._start, low + lengths[rows, dims], side="left")
        counts = np.maximum(last - first, 0).astype(np.int64)
        ends, found = offsets + lengths, []
        for part in _chunks(counts):
            box = np.repeat(np.arange(part.start, part.stop), counts[part])
            shard = self._ids[ranges(first[part].astype(np.int64), counts[part])]
            lower = np.maximum(offsets[box], self._low[shard])
            extent = np.minimum(ends[box], self._high[shard]) - lower
            kept = np.flatnonzero((extent > 0).all(axis=1))
            found.append((box[kept], shard[kept], lower[kept], extent[kept]))
        box, shard, lower, extent = (np.concatenate(column) for column in zip(*found, strict=True))
        order = order_by(box, shard)
        return box[order], shard[order], lower[order], extent[order]


def _chunks(counts: I64) -> Iterator[slice]:
    """Yield slices of rows with about `_CHUNK` pairs each, at least one slice."""
    ends = np.cumsum(counts)
    first = 0
    while True:
        done = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, done + _CHUNK, side="right")))
        yield slice(first, min(last, len(counts)))
        first = last
        if first >= len(counts):
            return


def _most_cut(tensor: I64, offsets: I64, tensors: int) -> I64:
    """Return [tensors]: the dimension with the most different offsets."""
    cuts = np.zeros((offsets.shape[1], tensors), np.int64)
    for dim in range(offsets.shape[1]):
        order = order_by(tensor, offsets[:, dim])
        new = order[fresh(tensor[order], offsets[order, dim])]
        cuts[dim] = np.bincount(tensor[new], minlength=tensors)
    result: I64 = np.argmax(cuts, axis=0).astype(np.int64)
    return result
