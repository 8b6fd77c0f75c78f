"""Whether boxes tile their tensors: no overlap, no hole.

Three steps for all tensors together, each only for what the one before could not settle. Most boxes
are runs of their tensor's row-major order: then it is enough that each begins where the one before
ends. Boxes cut along several dimensions are runs again inside of the slab that their cuts leave
them. What is neither goes to the general check, which also words the faults: it separates boxes
along one dimension after the other, so that grids and cuts of flat ranges fall apart into single
boxes after a few sorts, and sweeps what no straight cut separates. Never quadratic in the number of
boxes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import (
    I64,
    MAX_ELEMENTS,
    Box,
    Flags,
    before,
    fresh,
    order_by,
    strides_of,
    volumes,
)

_MAX_PASSES = 16
"""Boxes that fall apart one by one only, like a spiral, are better swept."""


def refuse_gaps(
    shapes: I64, owners: I64, sides: tuple[I64, I64], dims: I64, name: Callable[[int], str]
) -> None:
    """Refuse boxes that do not tile what they belong to; the first overlap and hole are named.

    Args:
        shapes: [t, n], padded with 1; each must be tiled.
        owners: [k], row of `shapes` of each box.
        sides: [k, n] offsets, padded with 0, and [k, n] lengths, padded with 1 and at least 1; all
            boxes lie inside.
        dims: [t], true number of dimensions.
        name: Of a row of `shapes`, for the error.
    """
    suspects = untiled(shapes, owners, *sides)
    if not len(suspects):
        return
    dense = np.full(len(shapes), -1, np.int64)
    dense[suspects] = np.arange(len(suspects))
    mine = np.flatnonzero(dense[owners] >= 0)
    offsets, lengths = sides
    faults = cover_faults(
        shapes[suspects], dense[owners[mine]], offsets[mine], lengths[mine], dims=dims[suspects]
    )
    shown: dict[str, str] = {}
    for row, fault in sorted(faults.items()):
        kind = "hole" if fault.startswith("no box") else "overlap"
        shown.setdefault(kind, f"{name(int(suspects[row]))}: {fault}")
    if shown:
        raise LayoutMismatch(
            "every element of a tensor must lie in exactly one box (or in replicas of it), got "
            f"{'; '.join(shown.values())}; a rank is missing, or the adapter's offsets are wrong"
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


def cover_faults(
    shapes: I64, owners: I64, offsets: I64, lengths: I64, *, dims: I64 | None = None
) -> dict[int, str]:
    """Say for which tensors boxes that lie inside of them do not tile; arguments as `refuse_gaps`.

    Returns:
        Tensor index -> an overlap, or else the first hole; tensors that are tiled are absent.

    Example:
        >>> boxes = np.array([[0], [1]]), np.array([[2], [2]])
        >>> cover_faults(np.array([[3]]), np.array([0, 0]), *boxes)
        {0: 'the boxes [0:2] and [1:3] of shape (3,) overlap'}
    """
    true = np.full(len(shapes), shapes.shape[1]) if dims is None else dims

    def shape(tensor: int) -> str:
        return str(tuple(shapes[tensor, : true[tensor]].tolist()))

    faults: dict[int, str] = {}
    for pair in _overlaps(owners, offsets, offsets + lengths):
        owner = int(owners[pair[0]])
        texts = [box_text(offsets[box], lengths[box], int(true[owner])) for box in sorted(pair)]
        faults[owner] = f"the boxes {' and '.join(texts)} of shape {shape(owner)} overlap"
    # Boxes that do not overlap leave elements out where they hold too few.
    held = np.zeros(len(shapes), np.int64)
    np.add.at(held, owners, volumes(lengths))
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(len(shapes) + 1))
    for tensor in np.flatnonzero(held != volumes(shapes)).tolist():
        if tensor not in faults:
            mine = order[bounds[tensor] : bounds[tensor + 1]]
            hole = _first_hole(shapes[tensor], offsets[mine], lengths[mine])
            where = box_text(np.array(hole.offsets), np.array(hole.lengths), int(true[tensor]))
            faults[tensor] = f"no box holds {where} of shape {shape(tensor)}"
    return faults


def box_text(offsets: I64, lengths: I64, dims: int) -> str:
    """Return a padded box without its padding, as slices."""
    sides = zip(offsets[:dims].tolist(), lengths[:dims].tolist(), strict=True)
    return f"[{', '.join(f'{offset}:{offset + length}' for offset, length in sides)}]"


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
            most = groups.max(initial=-1)
            groups = _separate(groups, offsets[ids, dim], ends[ids, dim])
            has_split |= bool(groups.max(initial=-1) > most)
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
    new = np.ones(len(order), bool)
    new[1:] = begin[order[1:]] >= np.maximum.accumulate(reach[order])[:-1]
    result = np.empty(len(order), np.int64)
    result[order] = np.cumsum(new) - 1
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
