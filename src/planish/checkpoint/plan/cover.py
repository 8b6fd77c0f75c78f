"""Checks that boxes tile tensors: inside, no overlap, no hole; all tensors of a plan at once.

Boxes are separated along one dimension after the other, for every tensor at the same time: grids
and cuts of flat ranges fall apart into single boxes after a few sorts. Only what no straight cut
separates is swept, with an active set. Never quadratic in the number of boxes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planish.checkpoint.format.geometry import I64, MAX_ELEMENTS, Box, volumes

_MAX_PASSES = 16
"""Boxes that fall apart one by one only, like a spiral, are better swept."""


def cover_fault(shape: Sequence[int], offsets: I64, lengths: I64) -> str:
    """Say why boxes do not tile a tensor; empty when they do.

    Args:
        shape: Of the tensor, n dimensions.
        offsets: [k, n], first index of each box.
        lengths: [k, n], extent of each box; at least 1 (empty boxes are dropped at creation).

    Returns:
        What is wrong, with the boxes: out of bounds, overlap or hole; "" when every element lies
        in exactly one box.

    Example:
        >>> cover_fault((3,), np.array([[0], [1]]), np.array([[2], [2]]))
        'the boxes [0:2] and [1:3] of shape (3,) overlap'
    """
    shapes = np.array([tuple(shape)], np.int64).reshape(1, len(shape))
    owners = np.zeros(len(offsets), np.int64)
    return cover_faults(shapes, owners, offsets, lengths).get(0, "")


def cover_faults(
    shapes: I64, owners: I64, offsets: I64, lengths: I64, *, dims: I64 | None = None
) -> dict[int, str]:
    """Say for which tensors the boxes do not tile; `cover_fault` for many tensors at once.

    Args:
        shapes: [t, n], padded with 1.
        owners: [k], which tensor each box belongs to.
        offsets: [k, n], padded with 0.
        lengths: [k, n], padded with 1.
        dims: [t], true number of dimensions of each tensor (n where left out), for the messages.

    Returns:
        Tensor index -> what is wrong; tensors that are tiled exactly are absent.
    """
    true = np.full(len(shapes), shapes.shape[1]) if dims is None else dims
    teller = _Teller(shapes, true)
    faults: dict[int, str] = {}
    sizes = np.multiply.reduce(shapes.astype(np.float64), axis=1)
    for tensor in np.flatnonzero(sizes >= MAX_ELEMENTS).tolist():
        faults[tensor] = f"shape {teller.shape(tensor)} must have less than 2**62 elements"
    limits = shapes[owners]
    outside = ((offsets < 0) | (lengths < 1) | (offsets > limits - lengths)).any(axis=1)
    for box in np.flatnonzero(outside):
        owner = int(owners[box])
        told = f"the box {teller.box(owner, offsets[box], lengths[box])}"
        faults.setdefault(owner, f"{told} is empty or outside of shape {teller.shape(owner)}")
    good = np.ones(len(shapes), bool)
    good[list(faults)] = False
    kept = np.flatnonzero(good[owners])
    owners, offsets, lengths = owners[kept], offsets[kept], lengths[kept]
    for first, second in _overlaps(owners, offsets, offsets + lengths):
        owner = int(owners[first])
        told = " and ".join(
            teller.box(owner, offsets[box], lengths[box]) for box in sorted((first, second))
        )
        faults.setdefault(owner, f"the boxes {told} of shape {teller.shape(owner)} overlap")
    good[list(faults)] = False
    faults.update(_holes(shapes, owners, offsets, lengths, good, teller))
    return faults


class _Teller:
    """Writes shapes and boxes without padding."""

    def __init__(self, shapes: I64, dims: I64) -> None:
        self._shapes, self._dims = shapes, dims

    def shape(self, tensor: int) -> str:
        return str(tuple(self._shapes[tensor, : self._dims[tensor]].tolist()))

    def box(self, tensor: int, offsets: I64, lengths: I64) -> str:
        sides = zip(offsets.tolist(), lengths.tolist(), strict=True)
        told = [f"{offset}:{offset + length}" for offset, length in sides]
        return f"[{', '.join(told[: self._dims[tensor]])}]"


def _holes(
    shapes: I64, owners: I64, offsets: I64, lengths: I64, good: np.ndarray, teller: _Teller
) -> dict[int, str]:
    """Return the tensors of `good` whose boxes, which do not overlap, leave elements out."""
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(len(shapes) + 1))
    totals = np.zeros(len(owners) + 1, np.uint64)
    np.cumsum(volumes(lengths)[order].astype(np.uint64), out=totals[1:])
    # Differences are right even where the running sum wraps around.
    held = totals[bounds[1:]] - totals[bounds[:-1]]
    wanted = np.where(good, volumes(shapes), 0).astype(np.uint64)
    faults = {}
    for tensor in np.flatnonzero(good & (held != wanted)).tolist():
        mine = order[bounds[tensor] : bounds[tensor + 1]]
        hole = _first_hole(shapes[tensor], offsets[mine], lengths[mine])
        told = teller.box(tensor, np.array(hole.offsets), np.array(hole.lengths))
        faults[tensor] = (
            f"no box holds {told} of shape {teller.shape(tensor)}: "
            f"{held[tensor]} of {wanted[tensor]} elements in {len(mine)} boxes"
        )
    return faults


def _first_hole(shape: I64, offsets: I64, lengths: I64) -> Box:
    """Return a box that no box meets, of boxes that do not overlap and do not fill `shape`."""
    found: list[tuple[int, int]] = []
    for dim in range(len(shape)):
        # Area that the boxes cover in each slab between two cuts of this dimension.
        starts, ends = offsets[:, dim], offsets[:, dim] + lengths[:, dim]
        cuts = np.unique(np.concatenate([starts, ends, [0, shape[dim]]]))
        area = volumes(lengths[:, dim + 1 :])
        change = np.zeros(len(cuts), np.int64)
        np.add.at(change, np.searchsorted(cuts, starts), area)
        np.add.at(change, np.searchsorted(cuts, ends), -area)
        full = int(np.multiply.reduce(shape[dim + 1 :], dtype=np.int64))
        slab = int(np.argmax(np.cumsum(change)[:-1] != full))
        low, high = int(cuts[slab]), int(cuts[slab + 1])
        found.append((low, high - low))
        inside = (starts <= low) & (ends >= high)
        offsets, lengths = offsets[inside], lengths[inside]
    return Box(tuple(low for low, _ in found), tuple(length for _, length in found))


def _overlaps(groups: I64, offsets: I64, ends: I64) -> list[tuple[int, int]]:
    """Return at most one pair of overlapping boxes of each group."""
    ids, groups = _crowded(np.arange(len(groups)), groups)
    for _ in range(_MAX_PASSES):
        has_split = False
        for dim in range(offsets.shape[1]):
            before = groups.max(initial=-1)
            groups = _separate(groups, offsets[ids, dim], ends[ids, dim])
            has_split |= bool(groups.max(initial=-1) > before)
            ids, groups = _crowded(ids, groups)
        if not has_split:
            break
    pairs = []
    order = np.argsort(groups, kind="stable")
    for members in np.split(ids[order], np.flatnonzero(np.diff(groups[order])) + 1):
        pair = _sweep(offsets[members], ends[members]) if len(members) > 1 else None
        if pair:
            pairs.append((int(members[pair[0]]), int(members[pair[1]])))
    return pairs


def _crowded(ids: I64, groups: I64) -> tuple[I64, I64]:
    """Drop the groups of a single box, which has nothing left to overlap; number the rest anew."""
    if not len(groups):
        return ids, groups
    is_crowded = np.bincount(groups) > 1
    kept = is_crowded[groups]
    numbers = np.cumsum(is_crowded) - 1
    return ids[kept], numbers[groups[kept]]


def _separate(groups: I64, starts: I64, ends: I64) -> I64:
    """Split groups at every plane of one dimension that no box of the group crosses."""
    if not len(groups):
        return groups
    span = int(ends.max()) + 1
    if span * (int(groups.max()) + 1) >= MAX_ELEMENTS:
        cuts, places = np.unique(np.concatenate([starts, ends]), return_inverse=True)
        starts, ends, span = places[: len(starts)], places[len(starts) :], len(cuts) + 1
    # One number line for all groups: places of group g lie in [g * span, (g + 1) * span).
    begin, reach = groups * span + starts, groups * span + ends
    order = np.argsort(begin, kind="stable")
    fresh = np.ones(len(order), bool)
    fresh[1:] = begin[order[1:]] >= np.maximum.accumulate(reach[order])[:-1]
    result = np.empty(len(order), np.int64)
    result[order] = np.cumsum(fresh) - 1
    return result


def _sweep(offsets: I64, ends: I64) -> tuple[int, int] | None:
    """Return the first overlapping pair along the most-cut dimension, None when there is none."""
    if not offsets.shape[1]:
        return (0, 1)
    dim = int(np.argmax([len(np.unique(column)) for column in offsets.T]))
    active = np.zeros(0, np.int64)
    for box in np.argsort(offsets[:, dim], kind="stable"):
        active = active[ends[active, dim] > offsets[box, dim]]
        lower = np.maximum(offsets[active], offsets[box])
        meets = (lower < np.minimum(ends[active], ends[box])).all(axis=1)
        if meets.any():
            return int(active[int(np.argmax(meets))]), int(box)
        active = np.append(active, box)
    return None
