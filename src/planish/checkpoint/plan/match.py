"""Match of the boxes that one rank wants with the stored shards.

One index over the shards of all tensors serves all wanted boxes at once.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (local load plan of one rank).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import (
    I64,
    MAX_ELEMENTS,
    before,
    fit,
    fresh,
    order_by,
    ranges,
)
from planish.checkpoint.format.items import Columns, LocalItem
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.plan.coverage import box_text, refuse_gaps
from planish.checkpoint.plan.reads import LocalReads

_CHUNK = 1 << 20
"""Number of candidate pairs in memory at a time."""


class ShardIndex:
    """The stored shards, sorted for each tensor along the dimension with most distinct offsets.

    Tensors follow each other on one number line, so one binary search serves all.
    """

    def __init__(self, metadata: Metadata) -> None:
        """Index the shards of `metadata`."""
        shards, shapes = metadata.shards, metadata.tensors.shapes
        self.width = max(1, shapes.shape[1])
        offsets, lengths = fit(shards.offsets, self.width, 0), fit(shards.lengths, self.width, 1)
        shapes = fit(shapes, self.width, 1)
        if shapes.astype(np.float64).sum() >= MAX_ELEMENTS:
            raise LayoutMismatch("all shapes of a state together must stay below 2**62 indices")
        # Choose for each tensor the dimension with the most distinct offsets.
        cuts = np.zeros((self.width, len(shapes)), np.int64)
        for dim in range(self.width):
            order = order_by(shards.tensor, offsets[:, dim])
            new = order[fresh(shards.tensor[order], offsets[order, dim])]
            cuts[dim] = np.bincount(shards.tensor[new], minlength=len(shapes))
        self._dim: I64 = np.argmax(cuts, axis=0).astype(np.int64)
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
        """Return the pairs of a box and a shard that overlap.

        Args:
            tensor: [w], row of the tensor of each box.
            offsets: [w, width], first element; inside of the tensor.
            lengths: [w, width], extent, at least 1.

        Returns:
            [m] the box, [m] the shard, ascending by both; [m, width] first element and extent of
            their intersection.
        """
        rows, dims = np.arange(len(tensor)), self._dim[tensor]
        low = self._base[tensor] + offsets[rows, dims]
        first = np.searchsorted(self._reach, low, side="right")
        last = np.searchsorted(self._start, low + lengths[rows, dims], side="left")
        counts = np.maximum(last - first, 0).astype(np.int64)
        ends, meetings = offsets + lengths, []
        for part in _chunks(counts):
            box = np.repeat(np.arange(part.start, part.stop), counts[part])
            shard = self._ids[ranges(first[part].astype(np.int64), counts[part])]
            lower = np.maximum(offsets[box], self._low[shard])
            extent = np.minimum(ends[box], self._high[shard]) - lower
            kept = np.flatnonzero((extent > 0).all(axis=1))
            meetings.append((box[kept], shard[kept], lower[kept], extent[kept]))
        box, shard, lower, extent = (
            np.concatenate(column) for column in zip(*meetings, strict=True)
        )
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


def match(
    metadata: Metadata, items: Columns | Sequence[LocalItem], *, index: ShardIndex | None = None
) -> LocalReads:
    """Return the stored pieces of every wanted box, without regard to types.

    The checkpoint must have the tensors of `items`, in equal shapes; calls may share an `index`.

    Returns:
        One row for each overlap of a wanted box and a stored shard, ascending by item, box and
        shard; together they tile the wanted boxes.

    Raises:
        LayoutMismatch: wanted elements lie outside of their tensor, are not stored, or are stored
            twice; the error names the first.
    """
    wanted = items if isinstance(items, Columns) else Columns.from_items(items)
    rows = np.array([metadata.tensor_ids[name] for name in wanted.tensors.ids], np.int64)
    index = ShardIndex(metadata) if index is None else index
    owner = wanted.box_tensor
    tensor = rows[owner]
    offsets = fit(wanted.offsets, index.width, 0)
    lengths = fit(wanted.lengths, index.width, 1)
    dims = wanted.tensors.dims[owner]

    def name(box: int) -> str:
        where = box_text(offsets[box], lengths[box], int(dims[box]))
        return f"{wanted.tensors.quoted(int(owner[box]))} {where}, counted from its corner"

    limits = fit(metadata.tensors.shapes, index.width, 1)[tensor]
    outside = ((offsets < 0) | (offsets > limits - lengths)).any(axis=1)
    if outside.any():
        where = name(int(np.argmax(outside))).partition(", counted")[0]
        raise LayoutMismatch(f"wanted boxes must lie inside of their tensors, got {where}")
    box, shard, lower, extent = index.meeting(tensor, offsets, lengths)
    refuse_gaps(lengths, box, (lower - offsets[box], extent), dims, name)
    number = ranges(np.zeros(len(wanted.item_tensor), np.int64), np.diff(wanted.item_starts))
    return LocalReads(wanted.box_item[box], number[box], shard, lower, extent, offsets[box])
