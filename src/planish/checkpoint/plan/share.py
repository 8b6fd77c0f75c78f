"""Who reads which bytes for whom, so that a job reads each byte once.

What all ranks want is widened to checksum blocks. Blocks that the same ranks need form runs; runs
too short for a request of their own are joined; each request gets one reader among those who need
it, worst fit by bytes. Others get their pieces from the reader.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (elimination of redundant reads). Blocks,
joined runs and the preference for a host are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planish.checkpoint.format.geometry import I64, fresh, order_by, ranges, run_sums
from planish.checkpoint.format.metafile import BLOCK, Metadata
from planish.checkpoint.plan.coalesce import REQUEST_BYTES, coalesce, line_bases, piece_ranges
from planish.checkpoint.plan.reads import (
    LocalReads,
    RankPart,
    RankReads,
    ReadRequests,
    assemble,
    canonical,
    spans,
)

SHORT_BYTES = 2 << 20
"""Runs of blocks for different ranks, below this size, share requests."""


class RankSets:
    """Numbers for sets of ranks; equal sets have one number. Repeated ranks count.

    Example:
        >>> sets = RankSets()
        >>> sets.add_rows(np.array([0, 2, 1, 0, 2]), np.array([0, 2, 3, 5])).tolist()
        [0, 1, 0]
        >>> sets.union([0, 1]), sets.members[2].tolist()
        (2, [0, 1, 2])
    """

    def __init__(self) -> None:
        self.members: list[I64] = []
        self._numbers: dict[bytes, int] = {}
        self._unions: dict[tuple[int, ...], int] = {}

    def add(self, ranks: I64) -> int:
        """Return the number of a set, given ascending."""
        return self._number(ranks.astype(np.int32).tobytes())

    def add_rows(self, ranks: I64, starts: I64) -> I64:
        """Return the numbers of the sets `ranks[starts[i] : starts[i + 1]]`, each ascending."""
        data = memoryview(ranks.astype(np.int32).tobytes())
        bounds = (4 * starts).tolist()
        result = np.empty(len(starts) - 1, np.int64)
        for row in range(len(starts) - 1):
            result[row] = self._number(bytes(data[bounds[row] : bounds[row + 1]]))
        return result

    def _number(self, key: bytes) -> int:
        number = self._numbers.setdefault(key, len(self.members))
        if number == len(self.members):
            self.members.append(np.frombuffer(key, np.int32).astype(np.int64))
        return number

    def union(self, numbers: Sequence[int]) -> int:
        """Return the number of the union of sets, without repeated ranks."""
        key = tuple(numbers)
        if key not in self._unions:
            joined = np.unique(np.concatenate([self.members[number] for number in key]))
            self._unions[key] = self.add(joined)
        return self._unions[key]

    def unions(self, numbers: I64, starts: I64) -> I64:
        """Return [k]: the unions of `numbers[starts[i] : starts[i + 1]]`."""
        held, bounds = numbers.tolist(), starts.tolist()
        rows = range(len(bounds) - 1)
        return np.array([self.union(held[bounds[i] : bounds[i + 1]]) for i in rows], np.int64)


@dataclass(frozen=True)
class SharedReads:
    """The reads of all ranks together."""

    ranks: int
    requests: ReadRequests
    """Of all ranks, ascending by file and start, disjoint."""
    reader: I64
    """[q], who reads it."""
    number: I64
    """[q], which of the reader's requests it is."""
    wanted: Wanted
    involved: tuple[I64, I64]
    """[ranks + 1] and [sum]: the requests that each rank reads or needs bytes of, ascending."""
    piece_of: tuple[I64, I64]
    """[q + 1] and [sum]: the pieces that may have elements in each request, ascending."""
    replication: float
    """How many ranks need a block on average: what all would read on their own, over this."""

    def part(self, rank: int) -> RankPart:
        """Return what one rank must know to assemble its reads."""
        bounds, rows = self.involved
        mine = rows[bounds[rank] : bounds[rank + 1]]
        reads = np.flatnonzero(self.reader[mine] == rank)
        first, pieces = self.piece_of
        counts = first[mine[reads] + 1] - first[mine[reads]]
        row = np.repeat(reads, counts)
        piece = pieces[ranges(first[mine[reads]], counts)]
        alone = self.wanted.sets.add(np.array([rank]))
        others = self.wanted.set[piece] != alone
        return RankPart(
            rank,
            self.requests.take(mine),
            self.reader[mine],
            self.number[mine],
            row[others],
            *self.wanted.rows(piece[others]),
        )

    def rank(self, metadata: Metadata, rank: int, mine: LocalReads) -> RankReads:
        """Return what one rank executes; `mine` are its own reads, as given to `share_reads`."""
        return assemble(metadata, self.part(rank), mine)


@dataclass(frozen=True)
class Wanted:
    """Different pieces that ranks want, in the order in which messages hold them."""

    shard: I64
    """[u], row of the stored shard."""
    offsets: I64
    """[u, d], first element, in the coordinates of the tensor."""
    lengths: I64
    set: I64
    """[u], who wants it, a number of `sets`; a rank that wants it twice is there twice."""
    sets: RankSets

    def rows(self, pieces: I64) -> tuple[I64, I64, I64, I64, I64]:
        """Return shard, offsets, lengths of pieces, and [k + 1], [sum] who wants each."""
        members = [self.sets.members[number] for number in self.set[pieces].tolist()]
        counts = np.array([len(ranks) for ranks in members], np.int64)
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        joined = np.concatenate(members) if members else np.zeros(0, np.int64)
        columns = self.shard[pieces], self.offsets[pieces], self.lengths[pieces]
        return (*columns, bounds, joined)


def share_reads(
    metadata: Metadata,
    reads: Sequence[LocalReads],
    *,
    hosts: Sequence[int] | None = None,
) -> SharedReads:
    """Plan the reads of all ranks; for one rank alone this only joins and cuts ranges.

    `reads` are those of rank r at position r, `hosts` the hosts of the ranks (None: one for all).
    """
    where = np.zeros(len(reads), np.int64)
    if hosts is not None:
        where = np.unique(np.asarray(hosts), return_inverse=True)[1].astype(np.int64)
    wanted = _gather(metadata, reads)
    blocks = _blocks(metadata, wanted)
    requests, needs, replication = _requests(metadata, blocks, wanted.sets)
    reader = _readers(requests, needs, wanted.sets, where)
    order = order_by(reader)
    number = np.empty(len(reader), np.int64)
    number[order] = ranges(
        np.zeros(len(reads), np.int64), np.bincount(reader, minlength=len(reads))
    )
    return SharedReads(
        len(reads),
        requests,
        reader,
        number,
        wanted,
        _involved(needs, wanted.sets, len(reads)),
        _piece_of(metadata, wanted, requests),
        replication,
    )


def _gather(metadata: Metadata, reads: Sequence[LocalReads]) -> Wanted:
    """Return the different pieces of all ranks."""
    rank = np.repeat(np.arange(len(reads)), [len(one) for one in reads])
    width = max((one.offsets.shape[1] for one in reads), default=1)
    empty = np.zeros((0, width), np.int64)
    shard = np.concatenate([np.zeros(0, np.int64), *(one.shard for one in reads)])
    offsets = np.concatenate([empty, *(one.offsets for one in reads)])
    lengths = np.concatenate([empty, *(one.lengths for one in reads)])
    order, new = canonical(metadata, shard, offsets, lengths)
    first = np.flatnonzero(new)
    sets = RankSets()
    members = sets.add_rows(rank[order], np.append(first, len(order)).astype(np.int64))
    kept = order[first]
    return Wanted(shard[kept], offsets[kept], lengths[kept], members, sets)


class _Blocks(NamedTuple):
    """Needed stretches of blocks, ascending, and who needs them."""

    start: I64
    """[s], first byte on the number line of all files."""
    stop: I64
    """[s], one past the last byte there, a multiple of a block."""
    owner: I64
    """[p], row of `start`, ascending."""
    set: I64
    """[p], a set of ranks that need some of it."""


def _blocks(metadata: Metadata, wanted: Wanted) -> _Blocks:
    """Return the blocks that are needed, cut wherever other ranks begin to need them."""
    file, first, _, strides, itemsize = spans(metadata, wanted.shard, wanted.offsets, None)
    piece, start, stop = piece_ranges(first, wanted.lengths, strides, itemsize)
    base = line_bases(np.array(metadata.files.sizes, np.int64))[file[piece]]
    low, high = (base + start) // BLOCK, -(-(base + stop) // BLOCK)
    numbers = wanted.set[piece]
    order = order_by(low, high, numbers)
    kept = order[fresh(low[order], high[order], numbers[order])]
    low, high, numbers = low[kept], high[kept], numbers[kept]
    cuts = np.unique(np.concatenate([low, high]))
    begin, end = np.searchsorted(cuts, low), np.searchsorted(cuts, high)
    counts = (end - begin).astype(np.int64)
    stretch, numbers = ranges(begin.astype(np.int64), counts), np.repeat(numbers, counts)
    order = order_by(stretch, numbers)
    kept = order[fresh(stretch[order], numbers[order])]
    stretch, numbers = stretch[kept], numbers[kept]
    new = fresh(stretch)
    rows = stretch[new]
    if not len(rows):
        return _Blocks(rows, rows, rows, rows)
    return _Blocks(cuts[rows] * BLOCK, cuts[rows + 1] * BLOCK, np.cumsum(new) - 1, numbers)


class _Needs(NamedTuple):
    """Who needs how much of each request."""

    first: I64
    """[q + 1], rows of each request."""
    set: I64
    """[sum], a set of ranks."""
    nbytes: I64
    """[sum], bytes of the blocks that the set needs."""
    union: I64
    """[q], the set of all that need some of the request."""


def _requests(
    metadata: Metadata, blocks: _Blocks, sets: RankSets
) -> tuple[ReadRequests, _Needs, float]:
    """Join stretches into runs and runs into requests; also return how often blocks are needed."""
    sizes = np.array(metadata.files.sizes, np.int64)
    base = line_bases(sizes)
    first = np.append(np.flatnonzero(fresh(blocks.owner)), len(blocks.owner)).astype(np.int64)
    union = sets.unions(blocks.set, first)
    length = blocks.stop - blocks.start
    ranks = np.array([len(members) for members in sets.members], np.int64)[union]
    replication = float((ranks * length).sum() / length.sum()) if len(length) else 1.0
    file = np.searchsorted(base, blocks.start, side="right").astype(np.int64) - 1
    touch = np.zeros(len(file), bool)
    touch[1:] = (blocks.start[1:] == blocks.stop[:-1]) & (file[1:] == file[:-1])
    run = np.cumsum(fresh(union) | ~touch) - 1
    length = run_sums(blocks.stop - blocks.start, np.flatnonzero(fresh(run)))
    # A run so short that its transfer takes less than a request is joined to such neighbours.
    short = (length < SHORT_BYTES)[run] if len(run) else touch
    joined = np.zeros(len(file), bool)
    joined[1:] = touch[1:] & short[1:] & short[:-1]
    group = np.cumsum(fresh(run) & ~joined) - 1
    # Requests may read over gaps, but only between groups that the same ranks need.
    mixed = run_sums((fresh(run) & joined).astype(np.int64), np.flatnonzero(fresh(group))) > 0
    label = np.where(mixed[group] if len(group) else touch, len(sets.members) + group, union)
    line = np.cumsum(fresh(file, label)) - 1
    line_file = file[fresh(line)]
    line, start, stop = coalesce(
        line, blocks.start - base[file], blocks.stop - base[file], sizes[line_file]
    )
    requests = ReadRequests(line_file[line], start, stop)
    return requests, _needs(requests, base, blocks, sets), replication


def _needs(requests: ReadRequests, base: I64, blocks: _Blocks, sets: RankSets) -> _Needs:
    begin, met = requests.meeting(base, blocks.start, blocks.stop)
    counts = met[blocks.owner]
    request = ranges(begin[blocks.owner], counts)
    owner, numbers = np.repeat(blocks.owner, counts), np.repeat(blocks.set, counts)
    origin = base[requests.file]
    held = np.minimum((origin + requests.stop)[request], blocks.stop[owner])
    held -= np.maximum((origin + requests.start)[request], blocks.start[owner])
    order = order_by(request, numbers)
    new = fresh(request[order], numbers[order])
    rows = np.flatnonzero(new)
    request, numbers = request[order][rows], numbers[order][rows]
    first = np.searchsorted(request, np.arange(len(requests) + 1)).astype(np.int64)
    return _Needs(first, numbers, run_sums(held[order], rows), sets.unions(numbers, first))


def _readers(requests: ReadRequests, needs: _Needs, sets: RankSets, hosts: I64) -> I64:
    """Return [q]: one reader for each request among the ranks that need it.

    Worst fit, largest request first: of the candidates within one request of the lowest load, one
    on the host that needs most of it, then who needs most, then the lowest load, the lowest rank.
    """
    nbytes = requests.stop - requests.start
    load = np.zeros(len(hosts), np.int64)
    reader = np.array([sets.members[number][0] for number in needs.union.tolist()], np.int64)
    sizes = np.array([len(members) for members in sets.members], np.int64)
    single = sizes[needs.union] == 1
    np.add.at(load, reader[single], nbytes[single])
    shared = np.flatnonzero(~single)
    for request in shared[np.argsort(-nbytes[shared], kind="stable")].tolist():
        members = sets.members[int(needs.union[request])]
        loads = load[members]
        near = np.flatnonzero(loads <= loads.min() + REQUEST_BYTES)
        need = _need_of(needs, request, members, sets)
        place = np.bincount(hosts[members], need)[hosts[members[near]]]
        best = near[np.lexsort((loads[near], -need[near], -place))[0]]
        reader[request] = members[best]
        load[members[best]] += nbytes[request]
    return reader


def _need_of(needs: _Needs, request: int, members: I64, sets: RankSets) -> I64:
    """Return [len(members)]: bytes of the request that each of them needs."""
    first, last = int(needs.first[request]), int(needs.first[request + 1])
    if last == first + 1:
        return np.full(len(members), needs.nbytes[first])
    result = np.zeros(len(members), np.int64)
    for row in range(first, last):
        ranks = np.unique(sets.members[int(needs.set[row])])
        result[np.searchsorted(members, ranks)] += needs.nbytes[row]
    return result


def _involved(needs: _Needs, sets: RankSets, ranks: int) -> tuple[I64, I64]:
    """Return, rank by rank, the requests of which each rank needs bytes."""
    members = [sets.members[number] for number in needs.union.tolist()]
    counts = np.array([len(one) for one in members], np.int64)
    rank = np.concatenate([np.zeros(0, np.int64), *members])
    request = np.repeat(np.arange(len(members)), counts)
    order = order_by(rank)
    bounds = np.searchsorted(rank[order], np.arange(ranks + 1)).astype(np.int64)
    return bounds, request[order]


def _piece_of(metadata: Metadata, wanted: Wanted, requests: ReadRequests) -> tuple[I64, I64]:
    """Return, request by request, the pieces between whose first and last byte it lies."""
    file, first, last, _, _ = spans(metadata, wanted.shard, wanted.offsets, wanted.lengths)
    base = line_bases(np.array(metadata.files.sizes, np.int64))
    begin, counts = requests.meeting(base, base[file] + first, base[file] + last)
    request, piece = ranges(begin, counts), np.repeat(np.arange(len(file)), counts)
    order = order_by(request, piece)
    bounds = np.searchsorted(request[order], np.arange(len(requests) + 1)).astype(np.int64)
    return bounds, piece[order]
