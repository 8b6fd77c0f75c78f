"""Which of the ranks that hold a replica writes it: worst fit, large replicas cut first.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (balanced deduplication by worst fit). That
hosts break ties, and that cuts follow the first dimension longer than 1, is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planish.checkpoint.format.geometry import I64, volumes
from planish.checkpoint.plan.gather import Gathered, Replicas
from planish.checkpoint.plan.ordering import before, ranges, run_sums

_FEW = 24
"""Up to so many candidates plain Python is faster than numpy."""


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
            held = candidates.tolist()
            rank = min(held, key=lambda one: (quick[one], host_quick[host_of[one]]))
            position = held.index(rank)
        picks[number] = low + position
        quick[rank] += nbytes
        host_quick[host_of[rank]] += nbytes
        load[rank], host_load[host_of[rank]] = quick[rank], host_quick[host_of[rank]]
    return picks
