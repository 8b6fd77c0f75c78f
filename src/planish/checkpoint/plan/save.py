"""Plan of a save: from the columns of all ranks to the files of all ranks.

The plan is a pure function of its arguments. A million items take seconds, because every step is a
few passes over arrays; only the choice of writers loops, over replicated parts. Each element of the
state has a place on one number line, on which tensors follow each other by name, each row-major.
Items may not overlap, so items that begin at one place must be replicas.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 (global plan) and 4.1 (balanced deduplication
by worst fit). The tie break by host and the cuts along the first dimension over 1 are ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

import numpy as np

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import (
    I64,
    before,
    fit,
    fresh,
    host_numbers,
    order_by,
    ranges,
    run_sums,
    strides_of,
    volumes,
)
from planish.checkpoint.format.items import Columns, TensorSpec, TensorTable, quoted_name
from planish.checkpoint.format.safetensors_file import quote_fqn
from planish.checkpoint.plan.coverage import box_text, refuse_gaps
from planish.checkpoint.plan.files import GlobalPlan, Rows, header_sizes

SPLIT_BYTES = 64 << 20
"""Size of replicated items above which several ranks write parts of them."""
FILE_BYTES = 4 << 30
"""Bytes of entries after which a rank begins a new file."""
HEADER_BYTES = 16 << 20
"""Approximate bytes of header after which a rank begins a new file."""
_ROW_BYTES = 160
"""Approximate bytes of an entry in a header, without the name of its tensor."""
_TABLES = 64
"""Number of tables of tensors in a cache."""
_FEW = 24
"""Number of candidates up to which plain Python is faster than numpy."""


def plan_save(
    columns: Iterable[Columns],
    *,
    split_bytes: int = SPLIT_BYTES,
    hosts: Sequence[int] | None = None,
) -> GlobalPlan:
    """Return which rank writes which bytes at which place; equal arguments give equal plans.

    Args:
        columns: columns of all ranks, in rank order; an iterator may decode them one by one.
        split_bytes: replicated items with more bytes are cut.
        hosts: [ranks], number of the host of each rank; None: one host for all.

    Raises:
        LayoutMismatch: ranks give one tensor different types or shapes, boxes overlap without being
            equal, or elements belong to no rank; the error names the first offender.
    """
    gathered, ranks = gather(columns)
    replicas = group_replicas(gathered)
    parts = cut_parts(gathered, replicas, split_bytes)
    tensor = gathered.tensor[replicas.order[replicas.starts[:-1]]][parts.group]
    tensors, owners = gathered.tensors, np.repeat(tensor, parts.count)
    refuse_gaps(
        tensors.shapes, owners, (parts.offsets, parts.lengths), tensors.dims, tensors.quoted
    )
    kinds = _dense(gathered.tensors.kinds)[tensor]
    where = host_numbers(hosts, ranks)
    writers = choose_writers(gathered, replicas, parts, kinds, where)
    return _lay_out(gathered, parts, writers, ranks)


@dataclass(frozen=True)
class Gathered:
    """The items of all ranks that have elements, ascending by rank and item: I items, B boxes."""

    tensors: TensorTable
    rank: I64
    """[I], the rank of the item."""
    item: I64
    """[I], the number of the item on that rank."""
    tensor: I64
    """[I], the row of `tensors`."""
    first: I64
    """[I], the first row of the item's boxes in `offsets` and `lengths`."""
    count: I64
    """[I], the number of its boxes, at least one."""
    offsets: I64
    """[B, dims], the lower corner of each box, padded with 0."""
    lengths: I64
    """[B, dims], the sides of each box, padded with 1."""

    def describe(self, row: int) -> str:
        """Name an item, its boxes and its rank for an error."""
        tensor = int(self.tensor[row])
        rows = range(int(self.first[row]), int(self.first[row] + self.count[row]))
        dims = int(self.tensors.dims[tensor])
        boxes = ", ".join(box_text(self.offsets[b], self.lengths[b], dims) for b in rows)
        return f"{self.tensors.quoted(tensor)} {boxes} on rank {self.rank[row]}"


class Replicas(NamedTuple):
    """Items in groups of replicas, ascending by place."""

    order: I64
    """[i], rows of the items, group by group, ascending by rank within a group."""
    starts: I64
    """[g + 1], group k is `order[starts[k] : starts[k + 1]]`."""


def decode_all(wires: Iterable[bytes]) -> Iterator[Columns]:
    """Decode the columns of one rank after the other; ranks with equal tensors share a table."""
    known: dict[bytes, TensorTable] = {}
    for wire in wires:
        if len(known) > _TABLES:
            known.clear()
        yield Columns.decode(wire, known)


def gather(columns: Iterable[Columns]) -> tuple[Gathered, int]:
    """Unify the columns of all ranks; return them and the number of ranks."""
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
    """Numbers all tensors of all ranks by name, type and shape, in order of first appearance."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str, str, tuple[int, ...]], int] = {}
        self._last: dict[int, tuple[TensorTable, I64]] = {}
        """Cache: `id` of a table -> the table and the numbers of its tensors."""
        self._rows: list[I64] = []

    def add(self, table: TensorTable) -> I64:
        """Return the number of each tensor of one rank."""
        if id(table) not in self._last:
            if len(self._last) > _TABLES:
                self._last.clear()
            sides = zip(table.shapes.tolist(), table.dims.tolist(), strict=True)
            shapes = [tuple(shape[:dims]) for shape, dims in sides]
            specs = zip(table.roles, table.kinds, table.fqns, table.dtypes, shapes, strict=True)
            numbers = [self._seen.setdefault(spec, len(self._seen)) for spec in specs]
            self._last[id(table)] = table, np.array(numbers, np.int64)
        self._rows.append(self._last[id(table)][1])
        return self._rows[-1]

    def table(self) -> tuple[TensorTable, I64]:
        """Return all tensors sorted by name, and the row of each number."""
        specs = sorted(self._seen)
        for pair in itertools.pairwise(specs):
            if pair[0][:3] == pair[1][:3]:
                number = [self._seen[spec] for spec in pair]
                ranks = [next(r for r, rows in enumerate(self._rows) if n in rows) for n in number]
                texts = [
                    f"{dtype} of shape {shape} on rank {rank}"
                    for rank, (*_, dtype, shape) in sorted(zip(ranks, pair, strict=True))
                ]
                raise LayoutMismatch(
                    f"all ranks must give {quoted_name(*pair[0][:3])} one type and one global "
                    f"shape, got {' and '.join(texts)}; give the ranks one model and one precision"
                )
        place = np.empty(len(specs), np.int64)
        place[[self._seen[spec] for spec in specs]] = np.arange(len(specs))
        return TensorTable.from_specs([TensorSpec(*spec) for spec in specs])[0], place


def _refuse_outside(gathered: Gathered) -> None:
    """Refuse boxes outside of their tensors."""
    tensors = gathered.tensors
    owners = np.repeat(gathered.tensor, gathered.count)
    rows = ranges(gathered.first, gathered.count)
    offsets, lengths = gathered.offsets[rows], gathered.lengths[rows]
    limits = tensors.shapes[owners]
    outside = ((offsets < 0) | (lengths < 1) | (offsets > limits - lengths)).any(axis=1)
    if outside.any():
        box = int(np.argmax(outside))
        item = int(np.repeat(np.arange(len(gathered.rank)), gathered.count)[box])
        raise LayoutMismatch(
            f"boxes must lie inside of their tensors, got {gathered.describe(item)} of shape "
            f"{tensors.spec(int(owners[box])).shape}"
        )


def group_replicas(gathered: Gathered) -> Replicas:
    """Group the items that hold the same elements."""
    # Compute the place of each item's first element on the number line of the state.
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
        row = int(np.argmax(wrong | twice))
        pair = f"{gathered.describe(int(leader[row]))} and {gathered.describe(int(order[row]))}"
        raise LayoutMismatch(
            "the boxes of two items must be equal on two ranks (replicas) or have no element in "
            f"common, got {pair}"
        )
    return Replicas(order, starts)


def _unlike(gathered: Gathered, rows: I64, leaders: I64) -> np.ndarray:
    """Return [k]: True if an item's boxes differ from those of the first item of its group."""
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


def _dense(names: Sequence[object]) -> I64:
    """Return the number of each name; distinct names count up in order of first appearance."""
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((codes[name] for name in names), np.int64, len(names))


@dataclass(frozen=True)
class Parts:
    """Parts, each written by one rank: whole items, and cuts of large replicated ones.

    [p] each: the group in `Replicas`, bytes `start` to `stop` of the row-major item, first row and
    count of the boxes; [b, n] sides of the boxes, padded with 0 and 1.
    """

    group: I64
    start: I64
    stop: I64
    first: I64
    count: I64
    offsets: I64
    lengths: I64


def cut_parts(gathered: Gathered, replicas: Replicas, split_bytes: int) -> Parts:
    """Return the parts of all groups, in the order of the groups; cuts in the order of bytes.

    A group of several ranks with more than `split_bytes` is cut into its boxes. Each box is cut
    along its first dimension longer than 1 into nearly equal parts of about `split_bytes`, or of
    one index if an index has more bytes.
    """
    leader = replicas.order[replicas.starts[:-1]]
    counts = gathered.count[leader]
    rows = ranges(gathered.first[leader], counts)
    offsets, lengths = gathered.offsets[rows], gathered.lengths[rows]
    group = np.repeat(np.arange(len(leader)), counts)
    width = gathered.tensors.item_bytes[gathered.tensor[leader]]
    box_bytes = volumes(lengths) * width[group]
    first = before(counts)
    total = run_sums(box_bytes, first)
    cut = (np.diff(replicas.starts) > 1) & (total > split_bytes)
    if not cut.any():
        zero = np.zeros(len(leader), np.int64)
        return Parts(np.arange(len(leader)), zero, total, first, counts, offsets, lengths)
    # Each box has a row: a box of an uncut group stays whole, others get their number of cuts.
    pieces = np.where(cut[group], -(-box_bytes // split_bytes), 1)
    longest = np.argmax(lengths > 1, axis=1) if lengths.shape[1] else np.zeros(len(lengths), int)
    extent = np.ones_like(pieces)
    if lengths.shape[1]:
        extent = np.take_along_axis(lengths, longest[:, None], 1)[:, 0]
    pieces = np.minimum(pieces, extent)
    source = np.repeat(np.arange(len(pieces)), pieces)
    number = ranges(np.zeros(len(pieces), np.int64), pieces)
    low = extent[source] * number // pieces[source]
    high = extent[source] * (number + 1) // pieces[source]
    offsets, lengths = offsets[source], lengths[source]
    if lengths.shape[1]:
        rows = np.arange(len(source))
        offsets[rows, longest[source]] += low
        lengths[rows, longest[source]] = high - low
    # All boxes of an uncut group are one part; every cut is a part.
    nbytes = volumes(lengths) * width[group[source]]
    begins = cut[group[source]].copy()
    begins[np.searchsorted(group[source], np.flatnonzero(~cut))] = True
    part_first = np.flatnonzero(begins).astype(np.int64)
    part_group = group[source][part_first]
    part_bytes = run_sums(nbytes, part_first)
    base = before(part_bytes)
    group_base = base[np.searchsorted(part_group, part_group)]
    start = base - group_base
    part_count = np.diff(np.append(part_first, len(source)))
    return Parts(part_group, start, start + part_bytes, part_first, part_count, offsets, lengths)


def choose_writers(
    gathered: Gathered, replicas: Replicas, parts: Parts, kinds: I64, hosts: I64
) -> I64:
    """Return [p]: the row in `gathered` of the item whose rank writes each part.

    Worst fit, with separate loads for each of `kinds` [p]. The largest part comes first, ties by
    place. It goes to the candidate with the fewest bytes so far, ties by the bytes of its host (of
    all kinds), then by rank. A rank starts with the bytes that no other rank has.
    """
    nbytes = parts.stop - parts.start
    low, high = replicas.starts[parts.group], replicas.starts[parts.group + 1]
    chosen = replicas.order[low]
    ranks = gathered.rank[replicas.order]
    host_load = np.zeros(int(hosts.max(initial=-1)) + 1, np.int64)
    single = high - low == 1
    np.add.at(host_load, hosts[ranks[low[single]]], nbytes[single])
    for kind in np.unique(kinds).tolist():
        load = np.zeros(len(hosts), np.int64)
        mine = np.flatnonzero(single & (kinds == kind))
        np.add.at(load, ranks[low[mine]], nbytes[mine])
        shared = np.flatnonzero(~single & (kinds == kind))
        shared = shared[np.argsort(-nbytes[shared], kind="stable")]
        picks = _worst_fit(
            (low[shared], high[shared], nbytes[shared]), ranks, load, (hosts, host_load)
        )
        chosen[shared] = replicas.order[picks]
    return chosen


def _worst_fit(parts: tuple[I64, I64, I64], ranks: I64, load: I64, host: tuple[I64, I64]) -> I64:
    """Return [p]: the position in `ranks` of each part's writer; add its bytes to the loads."""
    hosts, host_load = host
    quick, host_of, host_quick = load.tolist(), hosts.tolist(), host_load.tolist()
    picks = np.empty(len(parts[0]), np.int64)
    rows = zip(*(column.tolist() for column in parts), strict=True)
    for number, (low, high, nbytes) in enumerate(rows):
        candidates = ranks[low:high]
        if high - low > _FEW:
            loads = load[candidates]
            ties = np.flatnonzero(loads == loads.min())
            position = int(ties[np.argmin(host_load[hosts[candidates[ties]]])])
            rank = int(candidates[position])
        else:
            holders = candidates.tolist()
            rank = min(holders, key=lambda rank: (quick[rank], host_quick[host_of[rank]]))
            position = holders.index(rank)
        picks[number] = low + position
        quick[rank] += nbytes
        host_quick[host_of[rank]] += nbytes
        load[rank], host_load[host_of[rank]] = quick[rank], host_quick[host_of[rank]]
    return picks


def _lay_out(gathered: Gathered, parts: Parts, writers: I64, ranks: int) -> GlobalPlan:
    """Put the parts into files by rank, role and kind; in a file, wide elements come first."""
    tensors = gathered.tensors
    folders = _dense(list(zip(tensors.roles, tensors.kinds, strict=True)))
    rank, item, tensor = gathered.rank[writers], gathered.item[writers], gathered.tensor[writers]
    narrow = 16 // tensors.item_bytes[tensor]
    order = order_by(rank, folders[tensor], narrow, item)
    rank, item, tensor = rank[order], item[order], tensor[order]
    start, stop = parts.start[order], parts.stop[order]
    # A stream is the parts of one rank and folder; it is cut into files at FILE_BYTES.
    nbytes = stop - start
    streams = fresh(rank, folders[tensor])
    stream = np.cumsum(streams) - 1
    behind = before(nbytes)
    names = [quote_fqn(name) for name in tensors.fqns]
    text = before(
        parts.count[order] * np.array([_ROW_BYTES + len(n) for n in names], np.int64)[tensor]
    )
    full = (behind - behind[streams][stream]) // FILE_BYTES
    long = (text - text[streams][stream]) // HEADER_BYTES
    files = np.flatnonzero(fresh(stream, full, long)).astype(np.int64)
    number = np.arange(len(files)) - np.flatnonzero(fresh(stream[files]))[stream[files]]
    rows, box_first = _boxes(tensors, parts, order, tensor, files)
    sizes = header_sizes(names, tensors.dtypes, rows, box_first)
    file_rank = rank[files]
    keys = []
    for row, r, k in zip(tensor[files].tolist(), file_rank.tolist(), number.tolist(), strict=True):
        role = quote(tensors.roles[row], safe="", errors="surrogatepass")
        keys.append(f"data/{role}.{tensors.kinds[row]}/{r:05d}-{k}.safetensors")
    return GlobalPlan(
        ranks,
        tensors,
        tuple(keys),
        sizes + run_sums(nbytes, files),
        sizes,
        np.searchsorted(file_rank, np.arange(ranks + 1)).astype(np.int64),
        np.append(files, len(order)).astype(np.int64),
        item,
        start,
        stop,
        np.append(box_first, len(rows.tensor)).astype(np.int64),
        rows,
    )


def _boxes(
    tensors: TensorTable, parts: Parts, order: I64, tensor: I64, files: I64
) -> tuple[Rows, I64]:
    """Return the boxes of all parts in the order of the files, and each file's first row."""
    counts = parts.count[order]
    source = ranges(parts.first[order], counts)
    tensor = np.repeat(tensor, counts)
    lengths = parts.lengths[source]
    nbytes = volumes(lengths) * tensors.item_bytes[tensor]
    first = before(counts)[files]
    behind = before(nbytes)
    boxes_of = np.diff(np.append(first, len(source)))
    start = behind - np.repeat(behind[first], boxes_of)
    rows = Rows(tensor, tensors.dims[tensor], parts.offsets[source], lengths, start, start + nbytes)
    return rows, first
