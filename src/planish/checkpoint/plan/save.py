"""From the columns of all ranks to the files of all ranks.

Pure and deterministic: no clock, no randomness, no order of arrival. A million items take seconds,
as every step is a few passes over arrays; only the choice of writers loops, over parts that several
ranks hold.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 (global plan) and 4.1 (balanced deduplication
by worst fit). That hosts break ties and that cuts follow the first dimension over 1 is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import numpy as np

from planish.checkpoint.format.geometry import (
    I64,
    before,
    fresh,
    order_by,
    ranges,
    run_sums,
    volumes,
)
from planish.checkpoint.format.items import Columns, TensorTable
from planish.checkpoint.format.safetensors_file import quote_fqn
from planish.checkpoint.plan.coverage import refuse_gaps
from planish.checkpoint.plan.files import GlobalPlan, Rows, header_sizes
from planish.checkpoint.plan.gather import Gathered, Replicas, gather, group_replicas

SPLIT_BYTES = 64 << 20
"""Larger replicated items are shared by several ranks."""
FILE_BYTES = 4 << 30
"""A file takes no further entry once it has so many bytes."""
HEADER_BYTES = 16 << 20
"""Likewise, once its header has about so many."""
_ROW_BYTES = 160
"""About the text of an entry in a header, without the name of its tensor."""
_FEW = 24
"""Up to so many candidates plain Python is faster than numpy."""


def plan_save(
    columns: Iterable[Columns],
    *,
    split_bytes: int = SPLIT_BYTES,
    hosts: Sequence[int] | None = None,
    lap: Callable[[str], None] = lambda step: None,
) -> GlobalPlan:
    """Decide which rank writes what, and where every byte goes.

    Args:
        columns: Of all ranks, rank r's at position r; each is looked at once, so that they may
            be decoded one after the other.
        split_bytes: Replicated items with more bytes are cut.
        hosts: [ranks], number of the host of each rank; None: one host for all.
        lap: Called after each step with its name: gather, dedup, validate, balance, offsets.

    Returns:
        The plan; equal arguments give plans that are equal byte by byte.

    Raises:
        LayoutMismatch: ranks disagree about a tensor, boxes overlap without being equal, or
            elements belong to no rank; all offenders are listed.
        ValueError: `split_bytes` is not positive, or `hosts` has another length than `columns`.
    """
    if split_bytes < 1:
        raise ValueError(f"split_bytes must be at least 1, got {split_bytes}")
    gathered, ranks = gather(columns)
    if hosts is not None and len(hosts) != ranks:
        raise ValueError(f"hosts must name {ranks} hosts, one a rank, got {len(hosts)}")
    lap("gather")
    replicas = group_replicas(gathered)
    parts = cut_parts(gathered, replicas, split_bytes)
    lap("dedup")
    tensor = gathered.tensor[replicas.order[replicas.starts[:-1]]][parts.group]
    refuse_gaps(gathered.tensors, np.repeat(tensor, parts.count), parts.offsets, parts.lengths)
    lap("validate")
    where = np.zeros(ranks, np.int64)
    if hosts is not None:
        where = np.unique(np.asarray(hosts), return_inverse=True)[1].astype(np.int64)
    kinds = _dense(gathered.tensors.kinds)[tensor]
    writers = choose_writers(gathered, replicas, parts, kinds, where)
    lap("balance")
    plan = _lay_out(gathered, parts, writers, ranks)
    lap("offsets")
    return plan


def _dense(names: Sequence[object]) -> I64:
    """Return the number of each name among the different names, in order of first appearance."""
    codes = {name: code for code, name in enumerate(dict.fromkeys(names))}
    return np.fromiter((codes[name] for name in names), np.int64, len(names))


@dataclass(frozen=True)
class Parts:
    """What is to be written once: whole items, and cuts of large replicated ones."""

    group: I64
    """[p], row of the replicas."""
    start: I64
    """[p], first byte in the item's row-major bytes."""
    stop: I64
    """[p], one past the last byte there."""
    first: I64
    """[p], first row in `offsets`."""
    count: I64
    """[p], boxes."""
    offsets: I64
    """[b, n], padded with 0."""
    lengths: I64
    """[b, n], padded with 1."""


def cut_parts(gathered: Gathered, replicas: Replicas, split_bytes: int) -> Parts:
    """Return the parts of all groups, in the order of the groups; cuts in the order of bytes.

    A group of several ranks with more than `split_bytes` is cut: first into its boxes, then each
    box along its first dimension longer than 1 into nearly equal parts of at most `split_bytes`
    (one index where a single index has more).
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
    # One row for each box; boxes of whole groups count as one part, others as their cuts.
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
    # Boxes of one whole group stay one part; every cut is a part.
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

    Worst fit within each kind: largest part first, ties by place; the candidate with the fewest
    bytes so far, ties by the bytes of its host (all kinds), then the lowest rank. A rank starts
    with the bytes that only it holds.

    Args:
        gathered: All items.
        replicas: Their groups.
        parts: What is to be written.
        kinds: [p], kind of each part; loads of different kinds do not mix.
        hosts: [ranks], host of each rank.
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
    """Return the position in `ranks` that each part goes to; changes the loads in place."""
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
    """Put the parts into files: by rank, role and kind; wide elements first, then by item."""
    tensors = gathered.tensors
    folders = _dense(list(zip(tensors.roles, tensors.kinds, strict=True)))
    rank, item, tensor = gathered.rank[writers], gathered.item[writers], gathered.tensor[writers]
    narrow = 16 // tensors.item_bytes[tensor]
    order = order_by(rank, folders[tensor], narrow, item)
    rank, item, tensor = rank[order], item[order], tensor[order]
    start, stop = parts.start[order], parts.stop[order]
    # Files: streams of one rank and folder, begun anew each time FILE_BYTES are full.
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
    named = zip(tensor[files].tolist(), file_rank.tolist(), number.tolist(), strict=True)
    return GlobalPlan(
        ranks,
        tensors,
        tuple(f"{_folder_of(tensors, t)}/{r:05d}-{k}.safetensors" for t, r, k in named),
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
    """Return the boxes of all parts in the order of the files, and the first of each file."""
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


def _folder_of(tensors: TensorTable, row: int) -> str:
    """Return the folder of the files of one tensor's role and kind."""
    return f"data/{quote(tensors.roles[row], safe='', errors='surrogatepass')}.{tensors.kinds[row]}"
