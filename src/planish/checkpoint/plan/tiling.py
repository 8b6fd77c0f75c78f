"""Whether the boxes of all tensors tile them, in a few sorts for all tensors together.

Three steps, each only for what the one before could not settle. Most shards are runs of their
tensor's row-major order: then it is enough that each begins where the one before ends. Shards cut
along several dimensions are runs again inside of the slab that their cuts leave them. Only what is
neither goes to the general check, which also words the faults.
"""

from __future__ import annotations

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import I64, volumes
from planish.checkpoint.format.tables import TensorTable
from planish.checkpoint.plan.cover import cover_faults
from planish.checkpoint.plan.ordering import Flags, before, fresh, order_by, strides_of


def refuse_gaps(tensors: TensorTable, owners: I64, offsets: I64, lengths: I64) -> None:
    """Check that boxes tile their tensors: no overlap, no hole.

    Args:
        tensors: All tensors; each must be tiled.
        owners: [k], row of the tensor of each box.
        offsets: [k, n], padded with 0; inside of the tensor.
        lengths: [k, n], padded with 1; at least 1.

    Raises:
        LayoutMismatch: with every tensor that is not tiled exactly, and the boxes at fault.
    """
    suspects = untiled(tensors.shapes, owners, offsets, lengths)
    if not len(suspects):
        return
    dense = np.full(len(tensors), -1, np.int64)
    dense[suspects] = np.arange(len(suspects))
    mine = np.flatnonzero(dense[owners] >= 0)
    faults = cover_faults(
        tensors.shapes[suspects],
        dense[owners[mine]],
        offsets[mine],
        lengths[mine],
        dims=tensors.dims[suspects],
    )
    if faults:
        told = [
            f"`{tensors.fqns[suspects[row]]}` ({tensors.roles[suspects[row]]} "
            f"{tensors.kinds[suspects[row]]}): {fault}"
            for row, fault in sorted(faults.items())
        ]
        raise LayoutMismatch(
            "every element of a tensor must lie in exactly one box (or in replicas of it), got\n  "
            + "\n  ".join(told)
            + "\na rank is missing, or the adapter's offsets are wrong"
        )


def untiled(shapes: I64, owners: I64, offsets: I64, lengths: I64) -> I64:
    """Return, ascending, the tensors that the two quick steps cannot show to be tiled."""
    sizes = volumes(shapes)
    held = np.zeros(len(shapes), np.int64)
    np.add.at(held, owners, volumes(lengths))
    suspect = held != sizes
    mine = np.flatnonzero(~suspect[owners])
    suspect[overlapping(shapes, owners[mine], offsets[mine], lengths[mine])] = True
    return np.flatnonzero(suspect).astype(np.int64)


def overlapping(shapes: I64, owners: I64, offsets: I64, lengths: I64) -> I64:
    """Return, ascending, the tensors that the quick steps cannot show to be free of overlaps."""
    start = before(volumes(shapes))[owners]
    start = start + np.einsum("kn,kn->k", offsets, strides_of(shapes)[owners])
    loose = _loose(start, volumes(lengths), owners) | ~_runs(shapes[owners], lengths)
    suspect = np.zeros(len(shapes), bool)
    suspect[owners[loose]] = True
    mine = np.flatnonzero(suspect[owners])
    if not len(mine):
        return mine
    return _open_slabs(shapes, owners[mine], offsets[mine], lengths[mine])


def _runs(shapes: I64, lengths: I64) -> Flags:
    """Return [k]: whether a box is one run of its tensor's row-major order."""
    result = np.ones(len(lengths), bool)
    begun = np.zeros(len(lengths), bool)
    for dim in range(lengths.shape[1]):
        result &= ~begun | (lengths[:, dim] == shapes[:, dim])
        begun |= lengths[:, dim] > 1
    return result


def _loose(start: I64, volume: I64, groups: I64) -> Flags:
    """Return [k]: whether a run meets another one of its group, in order of their starts."""
    order = np.argsort(start, kind="stable")
    ends = (start + volume)[order]
    meets = np.zeros(len(start), bool)
    meets[1:] = (start[order][1:] < ends[:-1]) & (groups[order][1:] == groups[order][:-1])
    result = np.empty(len(start), bool)
    result[order] = meets
    return result


def _open_slabs(shapes: I64, owners: I64, offsets: I64, lengths: I64) -> I64:
    """Return the tensors whose boxes are not disjoint runs of disjoint slabs.

    Along each dimension but the first, boxes that overlap belong to one slab, and slabs do not
    overlap. A tuple of slabs is a cell: a box of its own, in which boxes may be runs again.
    """
    low, size = offsets.copy(), shapes[owners]
    low[:, :1] = 0
    cell = owners
    for dim in range(1, offsets.shape[1]):
        low[:, dim], size[:, dim], slab = _slabs(
            owners, shapes[:, dim], offsets[:, dim], lengths[:, dim]
        )
        order = order_by(cell, slab)
        dense = np.empty(len(cell), np.int64)
        dense[order] = np.cumsum(fresh(cell[order], slab[order])) - 1
        cell = dense
    leaders = np.unique(cell, return_index=True)[1]
    base = before(volumes(size[leaders]))
    start = base[np.searchsorted(cell[leaders], cell)]
    start = start + np.einsum("kn,kn->k", offsets - low, strides_of(size))
    loose = _loose(start, volumes(lengths), cell) | ~_runs(size, lengths)
    return np.unique(owners[loose])


def _slabs(owners: I64, limits: I64, offsets: I64, lengths: I64) -> tuple[I64, I64, I64]:
    """Return [k] each: begin and extent of the slab of each box in one dimension, and its id."""
    base = before(limits)[owners]
    begin, reach = base + offsets, base + offsets + lengths
    order = np.argsort(begin, kind="stable")
    furthest = np.maximum.accumulate(reach[order])
    new = np.ones(len(order), bool)
    new[1:] = begin[order][1:] >= furthest[:-1]
    starts = np.flatnonzero(new)
    slab_low = begin[order][starts]
    slab_high = furthest[np.append(starts[1:], len(order)) - 1]
    slab = np.empty(len(order), np.int64)
    slab[order] = np.cumsum(new) - 1
    return slab_low[slab] - base, (slab_high - slab_low)[slab], slab
