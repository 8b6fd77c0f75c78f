"""Plan of the reads of all ranks, so that a job reads each byte once.

Wanted bytes are widened to checksum blocks. Blocks that the same ranks need form runs; runs too
short for a request of their own are joined. Each request gets one reader among the ranks that need
it, worst fit by bytes. The other ranks get their pieces from the reader.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.1 (elimination of redundant reads). Blocks,
joined runs and the preference for a host are ours.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planish.checkpoint.format.geometry import (
    I64,
    Flags,
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
from planish.checkpoint.format.metafile import BLOCK, Metadata
from planish.checkpoint.plan.reads import (
    LocalReads,
    RankPart,
    ReadRequests,
    line_bases,
    spans,
)

REQUEST_BYTES = 16 << 20
REQUEST_SECONDS = 2e-3
"""Assumed fixed cost of a request."""
BYTES_PER_SECOND = 1e9
"""Assumed bandwidth of one request."""
SHORT_BYTES = 2 << 20
"""Size below which neighbouring runs of blocks for different ranks share a request."""


class RankSets:
    """Numbers of sets of ranks; equal sets have the same number."""

    def __init__(self) -> None:
        self.members: list[I64] = []
        self._numbers: dict[bytes, int] = {}
        self._unions: dict[tuple[int, ...], int] = {}

    def add_rows(self, ranks: I64, starts: I64) -> I64:
        """Return the numbers of the sets `ranks[starts[i] : starts[i + 1]]`, each ascending."""
        data, bounds = ranks.astype(np.int32).tobytes(), (4 * starts).tolist()
        return np.array([self._number(data[a:b]) for a, b in itertools.pairwise(bounds)], np.int64)

    def unions(self, numbers: I64, starts: I64) -> I64:
        """Return [k]: the unions of `numbers[starts[i] : starts[i + 1]]`."""
        held, bounds = numbers.tolist(), starts.tolist()
        return np.array([self._union(held[a:b]) for a, b in itertools.pairwise(bounds)], np.int64)

    def _number(self, ranks: bytes) -> int:
        number = self._numbers.setdefault(ranks, len(self.members))
        if number == len(self.members):
            self.members.append(np.frombuffer(ranks, np.int32).astype(np.int64))
        return number

    def _union(self, numbers: Sequence[int]) -> int:
        key = tuple(numbers)
        if key not in self._unions:
            joined = np.unique(np.concatenate([self.members[number] for number in key]))
            self._unions[key] = self._number(joined.astype(np.int32).tobytes())
        return self._unions[key]


@dataclass(frozen=True)
class SharedReads:
    """The reads of all ranks together."""

    ranks: int
    requests: ReadRequests
    """Requests of all ranks, disjoint, ascending by file and start."""
    reader: I64
    """[q], the rank that reads each."""
    number: I64
    """[q], number of the request among its reader's."""
    involved: tuple[I64, I64]
    """CSR pair of offsets [ranks + 1] and rows of `requests`, ascending within a rank: the requests
    that each rank reads or whose bytes it needs."""
    replication: float
    """Mean number of ranks that need a block: bytes that they would read alone, over bytes read."""

    def part(self, rank: int) -> RankPart:
        """Return the part of the plan from which one rank assembles its reads."""
        bounds, rows = self.involved
        mine = rows[bounds[rank] : bounds[rank + 1]]
        return RankPart(rank, self.requests.take(mine), self.reader[mine], self.number[mine])


def share_reads(
    metadata: Metadata,
    reads: Sequence[LocalReads],
    *,
    hosts: Sequence[int] | None = None,
) -> SharedReads:
    """Plan the reads of all ranks; for one rank alone this only joins and cuts ranges.

    `reads[r]` are the pieces of rank r, `hosts[r]` is its host; None: one host for all.
    """
    sets = RankSets()
    blocks = _blocks(metadata, reads, sets)
    requests, needs, replication = _requests(metadata, blocks, sets)
    reader = _readers(requests, needs, sets, host_numbers(hosts, len(reads)))
    order = order_by(reader)
    number = np.empty(len(reader), np.int64)
    number[order] = ranges(
        np.zeros(len(reads), np.int64), np.bincount(reader, minlength=len(reads))
    )
    members = [sets.members[union] for union in needs.union.tolist()]
    counts = np.array([len(one) for one in members], np.int64)
    rank = np.concatenate([np.zeros(0, np.int64), *members])
    order = order_by(rank)
    bounds = np.searchsorted(rank[order], np.arange(len(reads) + 1)).astype(np.int64)
    involved = bounds, np.repeat(np.arange(len(members)), counts)[order]
    return SharedReads(len(reads), requests, reader, number, involved, replication)


class _Blocks(NamedTuple):
    """Stretches of needed blocks, ascending, and the ranks that need them."""

    start: I64
    """[s], first byte on the number line of all files."""
    stop: I64
    """[s], one past the last byte there, a multiple of a block."""
    owner: I64
    """[p], row of `start`, ascending."""
    set: I64
    """[p], a set of ranks that need some of it."""


def _blocks(metadata: Metadata, reads: Sequence[LocalReads], sets: RankSets) -> _Blocks:
    """Return the stretches of needed blocks; all blocks of a stretch have the same ranks."""
    rank = np.repeat(np.arange(len(reads)), [len(one) for one in reads])
    width = max((one.offsets.shape[1] for one in reads), default=1)
    empty = np.zeros((0, width), np.int64)
    shard = np.concatenate([np.zeros(0, np.int64), *(one.shard for one in reads)])
    offsets = np.concatenate([empty, *(one.offsets for one in reads)])
    lengths = np.concatenate([empty, *(one.lengths for one in reads)])
    # Process a piece that several ranks want once, with the set of these ranks.
    order, new = _equal_pieces(metadata, shard, offsets, lengths)
    once = fresh(np.cumsum(new), rank[order])
    order, new = order[once], new[once]
    first = np.flatnonzero(new)
    wanted = sets.add_rows(rank[order], np.append(first, len(order)).astype(np.int64))
    kept = order[first]
    offsets, lengths = offsets[kept], lengths[kept]
    file, start, _, strides, itemsize = spans(metadata, shard[kept], offsets, lengths)
    piece, start, stop = _piece_ranges(start, lengths, strides, itemsize)
    base = line_bases(metadata)[file[piece]]
    low, high = (base + start) // BLOCK, -(-(base + stop) // BLOCK)
    numbers = wanted[piece]
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


def _piece_ranges(first: I64, lengths: I64, strides: I64, itemsize: I64) -> tuple[I64, I64, I64]:
    """Return the cheapest byte ranges for pieces: piece, first byte, one past the last.

    A piece with gaps is fetched as one range that includes them, or as several ranges without the
    gaps of its outer dimensions, whichever costs less. `first` [k] is its first byte; `strides`
    [k, n] and `itemsize` [k] are in bytes.
    """
    # inner[k, j]: bytes from the first to the last element of dimensions j and up;
    # outer[k, j]: number of such ranges.
    ones = np.ones((len(first), 1), np.int64)
    reach = np.concatenate([(lengths - 1) * strides, 0 * ones], axis=1)
    inner = np.cumsum(reach[:, ::-1], axis=1)[:, ::-1] + itemsize[:, None]
    outer = np.cumprod(np.concatenate([ones, lengths], axis=1), axis=1)
    seconds = outer * REQUEST_SECONDS + outer * inner / BYTES_PER_SECOND
    level = np.argmin(seconds, axis=1)
    rows = np.arange(len(first))
    counts, extent = outer[rows, level], inner[rows, level]
    piece = np.repeat(rows, counts)
    number = ranges(np.zeros(len(first), np.int64), counts)
    start = first[piece]
    for dim in range(lengths.shape[1] - 1, -1, -1):
        inside = level[piece] > dim
        step = np.where(inside, lengths[piece, dim], 1)
        start = start + (number % step) * strides[piece, dim]
        number = number // step
    return piece, start, start + extent[piece]


def _equal_pieces(metadata: Metadata, shard: I64, offsets: I64, lengths: I64) -> tuple[I64, Flags]:
    """Return an order with equal pieces together, and [k]: True if unlike the one before."""
    shards, width = metadata.shards, offsets.shape[1]
    inside = offsets - fit(shards.offsets, width, 0)[shard]
    strides = strides_of(fit(shards.lengths, width, 1))[shard]
    place = before(volumes(shards.lengths))[shard] + np.einsum("kn,kn->k", inside, strides)
    columns = lengths.T if width else np.zeros((1, len(shard)), np.int64)
    rows = order_by(*columns)
    form = np.empty(len(rows), np.int64)
    form[rows] = np.cumsum(fresh(*(column[rows] for column in columns))) - 1
    order = order_by(place, form)
    return order, fresh(place[order], form[order])


class _Needs(NamedTuple):
    """Bytes of each request that each set of ranks needs."""

    first: I64
    """[q + 1], request i has rows `first[i] : first[i + 1]`."""
    set: I64
    """[sum], a set of ranks."""
    nbytes: I64
    """[sum], bytes of the blocks that the set needs."""
    union: I64
    """[q], the set of all ranks that need some of the request."""


def _requests(
    metadata: Metadata, blocks: _Blocks, sets: RankSets
) -> tuple[ReadRequests, _Needs, float]:
    """Join stretches into runs and runs into requests; also return the replication of blocks."""
    base = line_bases(metadata)
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
    # Join neighbouring runs whose transfer takes no longer than the fixed cost of a request.
    short = (length < SHORT_BYTES)[run] if len(run) else touch
    joined = np.zeros(len(file), bool)
    joined[1:] = touch[1:] & short[1:] & short[:-1]
    first = np.flatnonzero(fresh(run) & ~joined)
    last = np.append(first, len(file))[1:] - 1
    line = file[first]
    sizes = np.array(metadata.files.sizes, np.int64)
    stop = np.minimum(blocks.stop[last] - base[line], sizes[line])
    requests = ReadRequests(*_cut_requests(line, blocks.start[first] - base[line], stop))
    return requests, _needs(requests, base, blocks, sets), replication


def _cut_requests(file: I64, start: I64, stop: I64) -> tuple[I64, I64, I64]:
    """Cut each range, from its start, into requests of at most 16 MiB."""
    counts = -(-(stop - start) // REQUEST_BYTES)
    source = np.repeat(np.arange(len(start)), counts)
    number = ranges(np.zeros(len(start), np.int64), counts)
    first = start[source] + number * REQUEST_BYTES
    return file[source], first, np.minimum(first + REQUEST_BYTES, stop[source])


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

    Worst fit, largest request first. Candidates have a load within `REQUEST_BYTES` of the lowest.
    Their order: the host that needs most, the rank that needs most, lowest load, lowest rank.
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
    """Return [len(members)]: number of bytes of the request that each member needs."""
    first, last = int(needs.first[request]), int(needs.first[request + 1])
    if last == first + 1:
        return np.full(len(members), needs.nbytes[first])
    result = np.zeros(len(members), np.int64)
    for row in range(first, last):
        ranks = sets.members[int(needs.set[row])]
        result[np.searchsorted(members, ranks)] += needs.nbytes[row]
    return result
