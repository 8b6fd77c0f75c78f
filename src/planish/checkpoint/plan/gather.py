"""The items of all ranks in one table: names unified, disagreements found, replicas grouped.

Each element of the whole state has a place on one number line: tensors one behind the other in the
order of their names, each row-major. As items may not overlap, those that begin at one place must
be replicas; one sort of int64 finds them.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (global plan of a save).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import (
    I64,
    MAX_ELEMENTS,
    before,
    fit,
    fresh,
    ranges,
    run_sums,
    strides_of,
    volumes,
)
from planish.checkpoint.format.items import Columns, TensorTable
from planish.checkpoint.plan.coverage import box_text
from planish.checkpoint.ranks.messages import ranks_text


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

    def describe(self, row: int) -> str:
        """Name the boxes of an item and its rank for an error."""
        dims = int(self.tensors.dims[self.tensor[row]])
        rows = range(int(self.first[row]), int(self.first[row] + self.count[row]))
        boxes = ", ".join(box_text(self.offsets[b], self.lengths[b], dims) for b in rows)
        return f"{boxes} on rank {self.rank[row]}"


_TABLES = 64
"""Tables of tensors that are kept to be found again."""


class Replicas(NamedTuple):
    """Items grouped by what they hold, ascending by place."""

    order: I64
    """[i], rows of the items, group by group, ascending by rank inside."""
    starts: I64
    """[g + 1], group k is `order[starts[k] : starts[k + 1]]`."""


def decode_all(wires: Iterable[bytes]) -> Iterator[Columns]:
    """Decode the columns of one rank after the other; ranks with equal tensors share a table.

    Raises:
        PlanMismatch: the bytes are not columns of this version.
    """
    known: dict[bytes, TensorTable] = {}
    for wire in wires:
        if len(known) > _TABLES:
            known.clear()
        yield Columns.decode(wire, known)


def gather(columns: Iterable[Columns]) -> tuple[Gathered, int]:
    """Unify the columns of all ranks, rank r's at position r; each is looked at once.

    Returns:
        The items, and the number of ranks.

    Raises:
        LayoutMismatch: ranks disagree about the type or shape of a tensor, boxes lie outside of
            their tensors, or the state has 2**62 elements or more.
    """
    names = _Names()
    local, counts, offsets, lengths = [], [], [], []
    for own in columns:
        ids = names.add(own.tensors)
        local.append(ids[own.item_tensor] if len(own.item_tensor) else own.item_tensor)
        counts.append(np.diff(own.item_starts))
        offsets.append(own.offsets)
        lengths.append(own.lengths)
    tensors, place = names.table()
    items = np.array([len(part) for part in local], np.int64)
    count = _joined(counts)
    kept = count > 0
    gathered = Gathered(
        tensors,
        np.repeat(np.arange(len(items)), items)[kept],
        ranges(np.zeros(len(items), np.int64), items)[kept],
        place[_joined(local)][kept],
        before(count)[kept],
        count[kept],
        _stacked(offsets, tensors.max_dims, 0),
        _stacked(lengths, tensors.max_dims, 1),
    )
    _refuse_outside(gathered)
    return gathered, len(items)


def _joined(parts: Sequence[I64]) -> I64:
    return np.concatenate(parts).astype(np.int64, copy=False) if parts else np.zeros(0, np.int64)


def _stacked(parts: Sequence[I64], width: int, fill: int) -> I64:
    """Concatenate [b, n] arrays of different n into [sum b, width]."""
    full = [fit(part, width, fill) for part in parts]
    return np.concatenate(full) if full else np.zeros((0, width), np.int64)


class _Names:
    """Numbers all tensors of all ranks, and compares what the ranks say about each."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], int] = {}
        """Role, kind and name of a tensor to its number, in order of first appearance."""
        self._dtype: list[str] = []
        """Type of each of these tensors, as its first rank gives it."""
        self._codes: dict[str, int] = {}
        """Type to its number."""
        self._last: dict[int, tuple[TensorTable, I64, I64]] = {}
        """Tables seen last by their `id`, with the numbers of their tensors and types."""
        self._rows: list[I64] = []
        self._dtypes: list[I64] = []
        self._dims: list[I64] = []
        self._shapes: list[I64] = []

    def add(self, table: TensorTable) -> I64:
        """Return the number of each tensor of one rank, in order of first appearance."""
        if id(table) not in self._last:
            if len(self._last) > _TABLES:
                self._last.clear()
            keys, seen = table.ids, self._seen
            numbers = list(map(seen.get, keys))
            if None in numbers:
                for key, row in keys.items():
                    if key not in seen:
                        seen[key] = len(seen)
                        self._dtype.append(table.dtypes[row])
                numbers = list(map(seen.get, keys))
            for dtype in set(table.dtypes).difference(self._codes):
                self._codes[dtype] = len(self._codes)
            types = list(map(self._codes.__getitem__, table.dtypes))
            self._last[id(table)] = table, np.array(numbers, np.int64), np.array(types, np.int64)
        _, rows, codes = self._last[id(table)]
        self._rows.append(rows)
        self._dtypes.append(codes)
        self._dims.append(table.dims)
        self._shapes.append(table.shapes)
        return rows

    def table(self) -> tuple[TensorTable, I64]:
        """Return all tensors sorted by name, and the row of each number.

        Raises:
            LayoutMismatch: two ranks give one tensor different types or shapes.
        """
        width = max((shapes.shape[1] for shapes in self._shapes), default=0)
        ids, shapes = _joined(self._rows), _stacked(self._shapes, width, 1)
        dims, dtypes = _joined(self._dims), _joined(self._dtypes)
        first = np.unique(ids, return_index=True)[1]
        self._refuse_disagreement(ids, first, (dtypes, dims, shapes))
        names = list(self._seen)
        order = sorted(range(len(names)), key=names.__getitem__)
        place = np.empty(len(names), np.int64)
        place[order] = np.arange(len(names))
        table = TensorTable(
            tuple(names[old][0] for old in order),
            tuple(names[old][1] for old in order),
            tuple(names[old][2] for old in order),
            tuple(self._dtype[old] for old in order),
            dims[first[order]],
            shapes[first[order]],
        )
        return table, place

    def _refuse_disagreement(self, ids: I64, first: I64, columns: tuple[I64, I64, I64]) -> None:
        dtypes, dims, shapes = columns
        lead = first[ids]
        wrong = (dtypes != dtypes[lead]) | (dims != dims[lead])
        wrong |= (shapes != shapes[lead]).any(axis=1)
        if not wrong.any():
            return
        ranks = np.repeat(np.arange(len(self._rows)), [len(rows) for rows in self._rows])
        names, types = list(self._seen), list(self._codes)
        forms: dict[tuple[str, str, str], dict[str, list[int]]] = {}
        for row in np.flatnonzero(np.isin(ids, ids[wrong])).tolist():
            shape = tuple(shapes[row, : dims[row]].tolist())
            form = f"{types[dtypes[row]]} of shape {shape}"
            holders = forms.setdefault(names[ids[row]], {})
            holders.setdefault(form, []).append(int(ranks[row]))
        lines = [
            f"`{fqn}` ({role} {kind}): "
            + ", ".join(f"{form} on {ranks_text(ranks)}" for form, ranks in holders.items())
            for (role, kind, fqn), holders in sorted(forms.items())
        ]
        raise LayoutMismatch(
            "all ranks must give a tensor one type and one global shape, got\n  "
            + "\n  ".join(lines)
            + "\ngive the ranks one model and one precision"
        )


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
    lines = []
    for row in np.flatnonzero(outside):
        spec = tensors.spec(int(owners[row]))
        box = box_text(offsets[row], lengths[row], len(spec.shape))
        holder = gathered.rank[item_of[row]]
        lines.append(f"`{spec.fqn}` of shape {spec.shape}: {box} on rank {holder}")
    raise LayoutMismatch("boxes must lie inside of their tensors, got\n  " + "\n  ".join(lines))


def group_replicas(gathered: Gathered) -> Replicas:
    """Group the items that hold the same elements.

    Raises:
        LayoutMismatch: items that begin at one place have different boxes, or one rank has an
            item twice; all of them are listed.
    """
    # Where the first element of each item lies on the number line of the state.
    shapes, tensor = gathered.tensors.shapes, gathered.tensor
    offsets = gathered.offsets[gathered.first]
    place = before(volumes(shapes))[tensor]
    place = place + np.einsum("kn,kn->k", offsets, strides_of(shapes)[tensor])
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
    return Replicas(order, starts)


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
    lines: dict[str, None] = {}
    for position in np.flatnonzero(wrong | twice):
        row, leader = int(order[position]), int(leaders[position])
        name = gathered.tensors.fqns[gathered.tensor[row]]
        if wrong[position]:
            both = f"{gathered.describe(leader)} and {gathered.describe(row)}"
            lines[f"`{name}`: {both} overlap without being equal"] = None
        else:
            lines[f"`{name}`: {gathered.describe(row)} comes twice"] = None
    raise LayoutMismatch(
        "the boxes of two items must be equal (replicas) or have no element in common, got\n  "
        + "\n  ".join(lines)
    )
