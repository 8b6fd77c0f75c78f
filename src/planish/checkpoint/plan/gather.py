"""The items of all ranks in one table: names unified, disagreements found, replicas grouped.

Each element of the whole state has a place on one number line: tensors one behind the other in the
order of their names, each row-major. As items may not overlap, those that begin at one place must
be replicas; one sort of int64 finds them.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (global plan of a save).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planish.checkpoint.geometry import I64, MAX_ELEMENTS, Box, volumes
from planish.checkpoint.model import Columns
from planish.checkpoint.plan.ordering import before, fresh, ranges, run_sums, strides_of
from planish.checkpoint.tables import TensorTable
from planish.errors import LayoutMismatch


@dataclass(frozen=True)
class Gathered:
    """The items of all ranks that have elements, ascending by rank and item."""

    tensors: TensorTable
    """All tensors, ascending by role, kind and name."""
    rank: I64
    """[i], who holds the item."""
    item: I64
    """[i], its number there."""
    tensor: I64
    """[i], row of `tensors`."""
    first: I64
    """[i], its first row in `offsets`."""
    count: I64
    """[i], its boxes, at least one."""
    offsets: I64
    """[b, n], padded with 0."""
    lengths: I64
    """[b, n], padded with 1."""

    def told(self, row: int) -> str:
        """Name an item, its rank and its boxes for an error."""
        dims = int(self.tensors.dims[self.tensor[row]])
        rows = range(int(self.first[row]), int(self.first[row] + self.count[row]))
        boxes = ", ".join(told_box(self.offsets[b], self.lengths[b], dims) for b in rows)
        return f"{boxes} on rank {self.rank[row]}"


class Replicas(NamedTuple):
    """Items grouped by what they hold, ascending by place."""

    order: I64
    """[i], rows of the items, group by group, ascending by rank inside."""
    starts: I64
    """[g + 1], group k is `order[starts[k] : starts[k + 1]]`."""
    place: I64
    """[g], where the group begins on the number line, in elements."""


def told_box(offsets: I64, lengths: I64, dims: int) -> str:
    """Write a padded box without its padding, as slices."""
    box = Box(tuple(offsets[:dims].tolist()), tuple(lengths[:dims].tolist()))
    sides = zip(box.offsets, box.ends, strict=True)
    return f"[{', '.join(f'{low}:{high}' for low, high in sides)}]"


def gather(columns: Sequence[Columns]) -> Gathered:
    """Unify the columns of all ranks, rank r's at position r.

    Raises:
        LayoutMismatch: ranks disagree about the type or shape of a tensor, boxes lie outside of
            their tensors, or the state has 2**62 elements or more.
    """
    tensors, ids = _unify([one.tensors for one in columns])
    table_base = before(np.array([len(one.tensors) for one in columns], np.int64))
    items = np.array([len(one.item_tensor) for one in columns], np.int64)
    rank = np.repeat(np.arange(len(columns)), items)
    local = _joined([one.item_tensor for one in columns])
    tensor = ids[local + table_base[rank]] if len(local) else local
    # Rows of boxes in `offsets`: each rank's starts, moved behind the boxes of the ranks before.
    count = _joined([np.diff(one.item_starts) for one in columns])
    first = before(count)
    item = ranges(np.zeros(len(items), np.int64), items)
    kept = count > 0
    gathered = Gathered(
        tensors,
        rank[kept],
        item[kept],
        tensor[kept],
        first[kept],
        count[kept],
        _stacked([one.offsets for one in columns], tensors.max_dims, 0),
        _stacked([one.lengths for one in columns], tensors.max_dims, 1),
    )
    _refuse_outside(gathered)
    return gathered


def _joined(parts: Sequence[I64]) -> I64:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.zeros(0, np.int64)


def _stacked(parts: Sequence[I64], width: int, fill: int) -> I64:
    """Concatenate [b, n] arrays of different n into [sum b, width]."""
    full = [
        part
        if part.shape[1] == width
        else np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=fill)
        for part in parts
    ]
    return np.concatenate(full) if full else np.zeros((0, width), np.int64)


def _unify(tables: Sequence[TensorTable]) -> tuple[TensorTable, I64]:
    """Return one table of all tensors, sorted by name, and the rows of all tables' tensors in it.

    Raises:
        LayoutMismatch: two tables give one tensor different types or shapes.
    """
    seen: dict[tuple[str, str, str], int] = {}
    first: list[tuple[int, int]] = []
    rows = []
    for number, table in enumerate(tables):
        keys = table.ids
        fresh_keys = [key for key in keys if key not in seen] if seen else list(keys)
        for key in fresh_keys:
            seen[key] = len(first)
            first.append((number, keys[key]))
        rows.append(np.fromiter(map(seen.__getitem__, keys), np.int64, len(keys)))
    names = list(seen)
    order = sorted(range(len(names)), key=names.__getitem__)
    width = max((table.max_dims for table in tables), default=0)
    shapes = np.ones((len(names), width), np.int64)
    for row, old in enumerate(order):
        number, line = first[old]
        shapes[row, : tables[number].max_dims] = tables[number].shapes[line]
    sources = [first[old] for old in order]
    table = TensorTable(
        tuple(names[old][0] for old in order),
        tuple(names[old][1] for old in order),
        tuple(names[old][2] for old in order),
        tuple(tables[number].dtypes[line] for number, line in sources),
        np.array([tables[number].dims[line] for number, line in sources], np.int64),
        shapes,
    )
    place = np.empty(len(names), np.int64)
    place[order] = np.arange(len(names))
    ids = place[_joined(rows)] if rows else np.zeros(0, np.int64)
    _refuse_disagreement(table, tables, ids)
    return table, ids


def _refuse_disagreement(table: TensorTable, tables: Sequence[TensorTable], ids: I64) -> None:
    codes = {name: code for code, name in enumerate(dict.fromkeys(table.dtypes))}
    dtypes = np.concatenate(
        [
            np.fromiter((codes.get(name, -1) for name in one.dtypes), np.int64, len(one))
            for one in tables
        ]
        or [np.zeros(0, np.int64)]
    )
    mine = np.array([codes[name] for name in table.dtypes], np.int64)
    shapes = _stacked([one.shapes for one in tables], table.max_dims, 1)
    dims = _joined([one.dims for one in tables])
    wrong = (dtypes != mine[ids]) | (dims != table.dims[ids])
    wrong |= (shapes != table.shapes[ids]).any(axis=1)
    if not wrong.any():
        return
    ranks = np.repeat(np.arange(len(tables)), [len(one) for one in tables])
    local = ranges(np.zeros(len(tables), np.int64), np.array([len(one) for one in tables]))
    forms: dict[int, dict[str, list[int]]] = {}
    for row in np.flatnonzero(np.isin(ids, ids[wrong])):
        spec = tables[int(ranks[row])].spec(int(local[row]))
        form = f"{spec.dtype} of shape {spec.shape}"
        forms.setdefault(int(ids[row]), {}).setdefault(form, []).append(int(ranks[row]))
    told = [
        f"`{table.fqns[tensor]}` ({table.roles[tensor]} {table.kinds[tensor]}): "
        + ", ".join(f"{form} on {told_ranks(held)}" for form, held in forms[tensor].items())
        for tensor in sorted(forms)
    ]
    raise LayoutMismatch(
        "all ranks must give a tensor one type and one global shape, got\n  "
        + "\n  ".join(told)
        + "\ngive the ranks one model and one precision"
    )


def told_ranks(ranks: Sequence[int]) -> str:
    """Name ranks for an error: the first few, and how many there are."""
    shown = ", ".join(map(str, ranks[:8]))
    more = f", ... ({len(ranks)} in all)" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def _refuse_outside(gathered: Gathered) -> None:
    """Refuse boxes outside of their tensors, and states too large for one number line."""
    tensors = gathered.tensors
    sizes = np.multiply.reduce(tensors.shapes.astype(np.float64), axis=1)
    if sizes.sum() >= MAX_ELEMENTS:
        largest = int(np.argmax(sizes))
        raise LayoutMismatch(
            "a state must have less than 2**62 elements; the largest tensor is "
            f"`{tensors.fqns[largest]}` of shape {tensors.spec(largest).shape}"
        )
    owners = np.repeat(gathered.tensor, gathered.count)
    rows = ranges(gathered.first, gathered.count)
    offsets, lengths = gathered.offsets[rows], gathered.lengths[rows]
    limits = tensors.shapes[owners]
    outside = ((offsets < 0) | (lengths < 1) | (offsets > limits - lengths)).any(axis=1)
    if not outside.any():
        return
    item_of = np.repeat(np.arange(len(gathered.rank)), gathered.count)
    told = []
    for row in np.flatnonzero(outside):
        spec = tensors.spec(int(owners[row]))
        box = told_box(offsets[row], lengths[row], len(spec.shape))
        holder = gathered.rank[item_of[row]]
        told.append(f"`{spec.fqn}` of shape {spec.shape}: {box} on rank {holder}")
    raise LayoutMismatch("boxes must lie inside of their tensors, got\n  " + "\n  ".join(told))


def places(gathered: Gathered, tensor: I64, offsets: I64) -> I64:
    """Return [k]: where the first element of each box lies on the number line of the state."""
    sizes = volumes(gathered.tensors.shapes)
    strides = strides_of(gathered.tensors.shapes)
    place: I64 = before(sizes)[tensor] + np.einsum("kn,kn->k", offsets, strides[tensor])
    return place


def group_replicas(gathered: Gathered) -> Replicas:
    """Group the items that hold the same elements.

    Raises:
        LayoutMismatch: items that begin at one place have different boxes, or one rank has an
            item twice; all of them are listed.
    """
    place = places(gathered, gathered.tensor, gathered.offsets[gathered.first])
    order = np.argsort(place, kind="stable").astype(np.int64)
    place = place[order]
    new = fresh(place)
    starts = np.append(np.flatnonzero(new), len(order)).astype(np.int64)
    leader = order[starts[:-1]][np.cumsum(new) - 1] if len(order) else order
    wrong = _unlike(gathered, order, leader)
    twice = ~new
    twice[1:] &= gathered.rank[order][1:] == gathered.rank[order][:-1]
    if wrong.any() or twice.any():
        _refuse_groups(gathered, order, leader, (wrong, twice))
    return Replicas(order, starts, place[starts[:-1]])


def _unlike(gathered: Gathered, rows: I64, leaders: I64) -> np.ndarray:
    """Return [k]: whether an item's boxes differ from those of the leader of its group."""
    first, lead = gathered.first[rows], gathered.first[leaders]
    wrong = gathered.count[rows] != gathered.count[leaders]
    wrong |= (gathered.lengths[first] != gathered.lengths[lead]).any(axis=1)
    several = np.flatnonzero(~wrong & (gathered.count[rows] > 1) & (rows != leaders))
    counts = gathered.count[rows[several]]
    mine, theirs = ranges(first[several], counts), ranges(lead[several], counts)
    differ = (gathered.offsets[mine] != gathered.offsets[theirs]).any(axis=1)
    differ |= (gathered.lengths[mine] != gathered.lengths[theirs]).any(axis=1)
    wrong[several] |= run_sums(differ.astype(np.int64), before(counts)) > 0
    return np.asarray(wrong)


def _refuse_groups(
    gathered: Gathered, order: I64, leaders: I64, faults: tuple[np.ndarray, np.ndarray]
) -> None:
    wrong, twice = faults
    told: dict[str, None] = {}
    for position in np.flatnonzero(wrong | twice):
        row, leader = int(order[position]), int(leaders[position])
        name = gathered.tensors.fqns[gathered.tensor[row]]
        if wrong[position]:
            both = f"{gathered.told(leader)} and {gathered.told(row)}"
            told[f"`{name}`: {both} overlap without being equal"] = None
        else:
            told[f"`{name}`: {gathered.told(row)} comes twice"] = None
    raise LayoutMismatch(
        "the boxes of two items must be equal (replicas) or have no element in common, got\n  "
        + "\n  ".join(told)
    )
