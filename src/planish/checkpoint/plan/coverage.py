"""Check that boxes tile their tensors: no overlap, no hole.

Straight cuts along one dimension after the other separate the boxes of all tensors together. Grids
and cuts of flat ranges become single boxes after a few sorts; a sweep compares groups of boxes
that no straight cut separates. Boxes without overlap leave no hole if they have together as many
elements as their tensor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import I64, MAX_ELEMENTS, Box, volumes

_MAX_PASSES = 16
"""Most passes of cuts; a sweep is faster for boxes that cuts separate one by one, like a spiral."""


def refuse_gaps(
    shapes: I64, owners: I64, sides: tuple[I64, I64], dims: I64, name: Callable[[int], str]
) -> None:
    """Refuse boxes that do not tile their tensors; the error names the first overlap and hole.

    Arguments are as for `cover_faults`; `name(row)` names a row of `shapes` in the error.
    """
    shown: dict[bool, str] = {}
    for row, fault in sorted(cover_faults(shapes, owners, *sides, dims).items()):
        shown.setdefault(fault.startswith("no box"), f"{name(row)}: {fault}")
    if shown:
        raise LayoutMismatch(
            "every element of a tensor must lie in exactly one box (or in replicas of it), got "
            f"{'; '.join(shown.values())}; a rank is missing, or the adapter's offsets are wrong"
        )


def cover_faults(shapes: I64, owners: I64, offsets: I64, lengths: I64, dims: I64) -> dict[int, str]:
    """Return the tensors that their boxes do not tile; each box must lie inside its tensor.

    Args:
        shapes: [t, n], padded with 1; each must be tiled.
        owners: [k], row of `shapes` of each box.
        offsets: [k, n], padded with 0.
        lengths: [k, n], at least 1; padded with 1.
        dims: [t], true number of dimensions.

    Returns:
        Row of `shapes` -> text of an overlap, or else of the first hole; tiled tensors are absent.
    """

    def shape(tensor: int) -> str:
        return str(tuple(shapes[tensor, : dims[tensor]].tolist()))

    faults: dict[int, str] = {}
    for pair in _overlaps(owners, offsets, offsets + lengths):
        owner = int(owners[pair[0]])
        texts = [box_text(offsets[box], lengths[box], int(dims[owner])) for box in sorted(pair)]
        faults[owner] = f"the boxes {' and '.join(texts)} of shape {shape(owner)} overlap"
    # Boxes without overlap leave a hole if they have fewer elements than the tensor.
    held = np.zeros(len(shapes), np.int64)
    np.add.at(held, owners, volumes(lengths))
    order = np.argsort(owners, kind="stable")
    bounds = np.searchsorted(owners[order], np.arange(len(shapes) + 1))
    for tensor in np.flatnonzero(held != volumes(shapes)).tolist():
        if tensor not in faults:
            mine = order[bounds[tensor] : bounds[tensor + 1]]
            hole = _first_hole(shapes[tensor], offsets[mine], lengths[mine])
            where = box_text(np.array(hole.offsets), np.array(hole.lengths), int(dims[tensor]))
            faults[tensor] = f"no box holds {where} of shape {shape(tensor)}"
    return faults


def box_text(offsets: I64, lengths: I64, dims: int) -> str:
    """Return a box as text, in slices without the padding."""
    sides = zip(offsets[:dims].tolist(), lengths[:dims].tolist(), strict=True)
    return f"[{', '.join(f'{offset}:{offset + length}' for offset, length in sides)}]"


def _first_hole(shape: I64, offsets: I64, lengths: I64) -> Box:
    """Return the first empty box of `shape`, given boxes that neither overlap nor fill it."""
    found: list[tuple[int, int]] = []
    for dim in range(len(shape)):
        # Compute the area that boxes cover in each slab between two cuts of this dimension.
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
    """Drop groups of a single box, which can not overlap; number the other groups anew."""
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
    """Return the first overlapping pair along the dimension with most offsets, None without one."""
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
