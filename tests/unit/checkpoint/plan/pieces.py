"""How many bytes the ranks of a load want, each counted once."""

from __future__ import annotations

import numpy as np

from planish.checkpoint.format.geometry import I64, fit, volumes
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.plan.coverage import overlapping
from planish.checkpoint.plan.share import Wanted

_CELLS = 1 << 22
"""Cells of the grid that counts the union of overlapping pieces of one shard."""


def unique_bytes(metadata: Metadata, wanted: Wanted) -> int:
    """Return the bytes of tensors that lie in at least one of the pieces, each counted once."""
    shard, offsets, lengths = wanted.shard, wanted.offsets, wanted.lengths
    shards = metadata.shards
    itemsize = metadata.tensors.item_bytes[shards.tensor]
    width = offsets.shape[1]
    shapes = fit(shards.lengths, width, 1)
    inside = offsets - fit(shards.offsets, width, 0)[shard]
    held = np.zeros(shards.num_shards, np.int64)
    np.add.at(held, shard, volumes(lengths))
    size = volumes(shapes)
    full = np.zeros(shards.num_shards, bool)
    full[shard[(lengths == shapes[shard]).all(axis=1)]] = True
    held[full] = size[full]
    rest = np.flatnonzero(~full[shard])
    for row in overlapping(shapes, shard[rest], inside[rest], lengths[rest]).tolist():
        mine = rest[shard[rest] == row]
        held[row] = min(_union(inside[mine], lengths[mine]), int(size[row]))
    return int((held * itemsize).sum())


def _union(offsets: I64, lengths: I64) -> int:
    """Return the elements in the union of boxes; their sum where the grid would be too large."""
    cuts, cells = [], 1
    for dim in range(offsets.shape[1]):
        sides = np.concatenate([offsets[:, dim], offsets[:, dim] + lengths[:, dim]])
        cuts.append(np.unique(sides))
        cells *= len(cuts[-1]) - 1
    if cells > _CELLS:
        return int(volumes(lengths).sum())
    grid = np.zeros([len(cut) - 1 for cut in cuts], bool)
    for low, length in zip(offsets, lengths, strict=True):
        spans = zip(cuts, low, low + length, strict=True)
        grid[tuple(slice(*np.searchsorted(c, (a, b)).tolist()) for c, a, b in spans)] = True
    area = np.ones((), np.int64)
    for cut in cuts:
        area = np.multiply.outer(area, np.diff(cut))
    return int(area[grid].sum())
