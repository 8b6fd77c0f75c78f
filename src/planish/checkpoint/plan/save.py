"""From the columns of all ranks to the files of all ranks.

Pure and deterministic: no clock, no randomness, no order of arrival. A million items take seconds,
as every step is a few passes over arrays; only the choice of writers loops, over parts that several
ranks hold.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 (global plan) and 4.1 (deduplication).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

import numpy as np

from planish.checkpoint.format.geometry import I64, volumes
from planish.checkpoint.format.records import Columns
from planish.checkpoint.format.safetensors_file import quote_fqn
from planish.checkpoint.format.tables import TensorTable
from planish.checkpoint.plan.balance import Parts, choose_writers, cut_parts
from planish.checkpoint.plan.gather import Gathered, gather, group_replicas
from planish.checkpoint.plan.headers import Rows, header_sizes
from planish.checkpoint.plan.ordering import before, fresh, order_by, ranges, run_sums
from planish.checkpoint.plan.records import GlobalPlan
from planish.checkpoint.plan.tiling import refuse_gaps

SPLIT_BYTES = 64 << 20
"""Larger replicated items are shared by several ranks."""
FILE_BYTES = 4 << 30
"""A file takes no further entry once it has so many bytes."""
HEADER_BYTES = 16 << 20
"""Likewise, once its header has about so many."""
_ROW_BYTES = 160
"""About the text of an entry in a header, without the name of its tensor."""


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
    return GlobalPlan(
        ranks,
        tensors,
        _keys(tensors, tensor[files], file_rank, number),
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


def _keys(tensors: TensorTable, tensor: I64, rank: I64, number: I64) -> tuple[str, ...]:
    folders = [
        f"data/{quote(role, safe='', errors='surrogatepass')}.{kind}"
        for role, kind in zip(tensors.roles, tensors.kinds, strict=True)
    ]
    rows = zip(tensor.tolist(), rank.tolist(), number.tolist(), strict=True)
    return tuple(f"{folders[t]}/{r:05d}-{k}.safetensors" for t, r, k in rows)
