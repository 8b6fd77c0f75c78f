"""What one rank reads, copies, sends and receives in a load, and how it works that out.

A rank knows its own pieces; the coordinator sends it a `RankPart`: its requests, and who else needs
their pieces. Reader and receiver cut pieces at the bounds of requests by the same rule and order
them alike, so a message needs no description: both sides know its bytes.

All coordinates are padded to the same number of dimensions with offset 0 and length 1. The order of
rows matters: the pieces of one message lie in it one after the other, in the order of their rows.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (load workflow) and 4.1 (redundant reads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.geometry import (
    I64,
    Box,
    Flags,
    before,
    fit,
    flat_boxes,
    fresh,
    intersect,
    order_by,
    ranges,
    run_sums,
    strides_of,
    volumes,
)
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.wire import pack_columns, unpack_columns
from planish.checkpoint.plan.coalesce import line_bases


@dataclass(frozen=True)
class LocalReads:
    """What one rank wants: one row for each wanted box and stored shard that share elements."""

    item: I64
    """[m], which of the rank's items."""
    box: I64
    """[m], which box of that item."""
    shard: I64
    """[m], row of the stored shard in the metadata."""
    offsets: I64
    """[m, d], first element of the piece, in the coordinates of the tensor."""
    lengths: I64
    corner: I64
    """[m, d], first element of the wanted box, in the coordinates of the tensor."""

    def __len__(self) -> int:
        return len(self.item)


@dataclass(frozen=True)
class ReadRequests:
    """Byte ranges to read, each at most 16 MiB, bounded by CRC blocks or the end of the file."""

    file: I64
    """[q], row of the file in the metadata."""
    start: I64
    """[q], first byte in the file."""
    stop: I64
    """[q], one past the last byte in the file."""

    def __len__(self) -> int:
        return len(self.file)

    def take(self, rows: I64) -> ReadRequests:
        """Return some of the requests, in the order of `rows`."""
        return ReadRequests(self.file[rows], self.start[rows], self.stop[rows])

    def meeting(self, base: I64, first: I64, last: I64) -> tuple[I64, I64]:
        """Return [k] the first request that each byte range meets, and how many it meets.

        Ranges `[first, last)` lie on the number line on which file f begins at `base[f]`.
        """
        low, high = base[self.file] + self.start, base[self.file] + self.stop
        begin = np.searchsorted(high, first, side="right").astype(np.int64)
        end = np.searchsorted(low, last, side="left").astype(np.int64)
        return begin, np.maximum(end - begin, 0)


@dataclass(frozen=True)
class Pieces:
    """Regular parts of tensors inside the bytes of one request each.

    As a source: element `i` of a piece lies at byte `source + sum(i * strides)` of the request.
    As a destination: at `target + i` of box `box` of item `item`. As a message: densely packed,
    row-major, pieces of one message in the order of their rows.
    """

    request: I64
    """[p], for sources: which of the rank's own requests; for receipts: which message."""
    item: I64
    """[p], the receiver's item; -1 where the receiver is another rank."""
    box: I64
    """[p], box of that item; -1 where the receiver is another rank."""
    source: I64
    """[p], byte of the first element, counted from the start of the request; -1 for receipts."""
    strides: I64
    """[p, d], bytes from one element to the next in the request; 0 for receipts."""
    lengths: I64
    target: I64
    """[p, d], first element, counted from the corner of the wanted box; 0 for sends."""
    itemsize: I64
    """[p], bytes of an element."""

    def __len__(self) -> int:
        return len(self.request)


@dataclass(frozen=True)
class Messages:
    """Packed pieces that go from one rank to another: one message for a request and a receiver.

    Both sides number the messages of a pair of ranks alike: in the order of the reader's requests.
    """

    peer: I64
    """[s], the other rank."""
    request: I64
    """[s], which of the reader's requests (numbered within the reader)."""
    first: I64
    """[s], first row of the message in the pieces beside it."""
    count: I64
    nbytes: I64
    """[s], bytes of the packed message."""

    def __len__(self) -> int:
        return len(self.peer)


@dataclass(frozen=True)
class RankReads:
    """What one rank executes: read its requests, copy, send to peers, receive from peers."""

    requests: ReadRequests
    copies: Pieces
    """From the rank's own requests into its own items, ascending by request."""
    sends: Messages
    """Ascending by request, then by receiver; `peer` is the receiver."""
    send_pieces: Pieces
    """Rows of `sends`: `item`, `box` and `target` mean nothing here."""
    receives: Messages
    """Ascending by reader's request, then by reader; `peer` is the reader."""
    receive_pieces: Pieces
    """Rows of `receives`: `source` and `strides` mean nothing; `request` is the message."""


@dataclass(frozen=True)
class RankPart:
    """What a rank must know of a shared plan: its requests, and who else needs their pieces."""

    rank: int
    requests: ReadRequests
    """[q], those it reads or needs bytes of, ascending by file and start."""
    reader: I64
    """[q], who reads each."""
    number: I64
    """[q], which of the reader's requests it is."""
    request: I64
    """[k], a request that the rank reads, ascending."""
    shard: I64
    """[k], a piece in it that others want too."""
    offsets: I64
    """[k, d], first element, in the coordinates of the tensor."""
    lengths: I64
    bounds: I64
    """[k + 1], who wants it: rows of `members`."""
    members: I64
    """[sum], ascending ranks; a rank that wants a piece twice is there twice."""

    def encode(self) -> bytes:
        """Return the part as bytes."""
        rest = {name: value for name, value in vars(self).items() if isinstance(value, np.ndarray)}
        columns = {name: value.reshape(-1) for name, value in (vars(self.requests) | rest).items()}
        return pack_columns({"rank": self.rank, "width": self.offsets.shape[1]}, columns)

    @classmethod
    def decode(cls, data: bytes) -> RankPart:
        """Undo `encode`."""
        head, columns = unpack_columns(data)
        requests = ReadRequests(*(columns.pop(name) for name in ("file", "start", "stop")))
        for name in ("offsets", "lengths"):
            columns[name] = columns[name].reshape(-1, head["width"])
        return cls(head["rank"], requests, **columns)


def canonical(metadata: Metadata, shard: I64, offsets: I64, lengths: I64) -> tuple[I64, Flags]:
    """Return the order of pieces inside messages, and which differ from the one before.

    By shard, by place of the first element in it, then by extent; equal pieces keep their order.
    """
    shards = metadata.shards
    width = offsets.shape[1]
    inside = offsets - fit(shards.offsets, width, 0)[shard]
    strides = strides_of(fit(shards.lengths, width, 1))[shard]
    place = before(volumes(shards.lengths))[shard] + np.einsum("kn,kn->k", inside, strides)
    columns = lengths.T if lengths.shape[1] else np.zeros((1, len(shard)), np.int64)
    rows = order_by(*columns)
    form = np.empty(len(rows), np.int64)
    form[rows] = np.cumsum(fresh(*(column[rows] for column in columns))) - 1
    order = order_by(place, form)
    return order, fresh(place[order], form[order])


def spans(
    metadata: Metadata, shard: I64, offsets: I64, lengths: I64 | None
) -> tuple[I64, I64, I64, I64, I64]:
    """Return where pieces lie in their files.

    Returns:
        [k] the file, first byte, one past the last byte (0 without `lengths`); [k, d] bytes from
        one element to the next; [k] bytes of an element.
    """
    shards = metadata.shards
    width = offsets.shape[1]
    itemsize = metadata.tensors.item_bytes[shards.tensor[shard]]
    strides = strides_of(fit(shards.lengths, width, 1))[shard] * itemsize[:, None]
    inside = offsets - fit(shards.offsets, width, 0)[shard]
    first = shards.start[shard] + np.einsum("kn,kn->k", inside, strides)
    last = np.zeros_like(first)
    if lengths is not None:
        last = first + np.einsum("kn,kn->k", lengths - 1, strides) + itemsize
    return shards.file[shard], first, last, strides, itemsize


class _Cuts(NamedTuple):
    """Parts of pieces that lie in one request each.

    [c] row of what was cut, byte of the first element in the request, [c, d] bytes from one element
    to the next, first element counted from that of the piece, extent, [c] bytes of an element.
    """

    pair: I64
    source: I64
    strides: I64
    inside: I64
    lengths: I64
    itemsize: I64


def _cut(
    metadata: Metadata, requests: ReadRequests, rows: I64, pieces: tuple[I64, I64, I64]
) -> _Cuts:
    """Cut pieces (shard, offsets, lengths), one of the requests `rows` for each, at its bounds."""
    shard, offsets, lengths = pieces
    _, first, last, strides, itemsize = spans(metadata, shard, offsets, lengths)
    start, stop = requests.start[rows], requests.stop[rows]
    begin = metadata.shards.start[shard]
    across = np.flatnonzero(((start - begin) % itemsize != 0) & (first < start))
    if len(across):
        row = int(shard[across[0]])
        key = metadata.files.keys[int(metadata.shards.file[row])]
        raise CheckpointCorrupt(
            f"a shard must begin at a multiple of its element's size, got byte "
            f"{metadata.shards.start[row]} of `{key}`; the file was not written by a planned save",
            file=key,
        )
    inner = (first >= start) & (last <= stop)
    pair = [np.flatnonzero(inner)]
    inside = [np.zeros((len(pair[0]), offsets.shape[1]), np.int64)]
    extent = [lengths[inner]]
    whole = fit(metadata.shards.lengths, offsets.shape[1], 1)
    corner = fit(metadata.shards.offsets, offsets.shape[1], 0)
    for row in np.flatnonzero(~inner).tolist():
        size = int(itemsize[row])
        low = max(0, int(start[row] - begin[row])) // size
        high = int(stop[row] - begin[row]) // size
        region = Box(
            tuple((offsets[row] - corner[shard[row]]).tolist()), tuple(lengths[row].tolist())
        )
        boxes = _between(tuple(whole[shard[row]].tolist()), region, low, high)
        if boxes:
            pair.append(np.full(len(boxes), row))
            inside.append(np.array([box.offsets for box in boxes], np.int64))
            extent.append(np.array([box.lengths for box in boxes], np.int64))
    pairs, insides = np.concatenate(pair).astype(np.int64), np.concatenate(inside)
    order = np.argsort(pairs, kind="stable")
    pairs, insides, extents = pairs[order], insides[order], np.concatenate(extent)[order]
    source = (first - start)[pairs] + np.einsum("kn,kn->k", insides, strides[pairs])
    return _Cuts(pairs, source, strides[pairs], insides, extents, itemsize[pairs])


def _between(shape: tuple[int, ...], region: Box, low: int, high: int) -> list[Box]:
    """Return the boxes of `region` whose elements are number `low` to `high` of a box of `shape`.

    They are counted from the corner of the region, in increasing row-major order.
    """
    total = int(np.multiply.reduce(np.array(shape, np.int64)))
    result = []
    for box in flat_boxes(shape, min(low, total), min(high, total)):
        part = intersect(box, region)
        if part is not None:
            offsets = tuple(map(int.__sub__, part.offsets, region.offsets))
            result.append(Box(offsets, part.lengths))
    return result


def assemble(metadata: Metadata, part: RankPart, mine: LocalReads) -> RankReads:
    """Return what a rank executes, by what the coordinator sent it and by its own reads.

    `CheckpointCorrupt` if elements of a shard lie across blocks.
    """
    own = np.flatnonzero(part.reader == part.rank)
    own = own[np.argsort(part.number[own], kind="stable")]
    requests = part.requests.take(own)
    order, _ = canonical(metadata, mine.shard, mine.offsets, mine.lengths)
    file, first, last, _, _ = spans(
        metadata, mine.shard[order], mine.offsets[order], mine.lengths[order]
    )
    line = line_bases(np.array(metadata.files.sizes, np.int64))
    begin, counts = part.requests.meeting(line, line[file] + first, line[file] + last)
    rows, request = np.repeat(order, counts), ranges(begin, counts)
    cuts = _cut(
        metadata,
        part.requests,
        request,
        (mine.shard[rows], mine.offsets[rows], mine.lengths[rows]),
    )
    which = request[cuts.pair]
    copied = np.flatnonzero(part.reader[which] == part.rank)
    copied = copied[np.argsort(part.number[which[copied]], kind="stable")]
    received = np.flatnonzero(part.reader[which] != part.rank)
    received = received[order_by(part.number[which[received]], part.reader[which[received]])]
    base = mine.offsets - mine.corner
    receives, message = _messages(
        part.number[which[received]], part.reader[which[received]], _bytes(cuts, received)
    )
    copies = _pieces(mine, rows, cuts, copied, (part.number[which[copied]], base))
    receipts = _pieces(mine, rows, cuts, received, (message, base))
    receipts.source[:] = -1
    receipts.strides[:] = 0
    sends, sent = _sends(metadata, part)
    return RankReads(requests, copies, sends, sent, receives, receipts)


def _bytes(cuts: _Cuts, rows: I64) -> I64:
    return np.asarray(volumes(cuts.lengths[rows]) * cuts.itemsize[rows])


def _pieces(mine: LocalReads, rows: I64, cuts: _Cuts, kept: I64, more: tuple[I64, I64]) -> Pieces:
    """Return cuts of the rank's own pieces, with the request or message given in `more`."""
    request, base = more
    row = rows[cuts.pair[kept]]
    return Pieces(
        request,
        mine.item[row],
        mine.box[row],
        cuts.source[kept],
        cuts.strides[kept],
        cuts.lengths[kept],
        base[row] + cuts.inside[kept],
        cuts.itemsize[kept],
    )


def _messages(request: I64, peer: I64, nbytes: I64) -> tuple[Messages, I64]:
    """Return runs of rows of one request and peer as messages, and the message of each row."""
    new = fresh(request, peer)
    first = np.flatnonzero(new).astype(np.int64)
    count = np.diff(np.append(first, len(request)))
    messages = Messages(peer[first], request[first], first, count, run_sums(nbytes, first))
    return messages, np.asarray(np.cumsum(new) - 1)


def _sends(metadata: Metadata, part: RankPart) -> tuple[Messages, Pieces]:
    cuts = _cut(metadata, part.requests, part.request, (part.shard, part.offsets, part.lengths))
    # One row for each cut and each other rank that wants its piece: rank by rank, then the cuts
    # of a piece in their order, which is what the receiver does.
    owner = np.repeat(np.arange(len(part.request)), np.diff(part.bounds))
    other = part.members != part.rank
    owner, peer = owner[other], part.members[other]
    first = np.searchsorted(cuts.pair, owner).astype(np.int64)
    counts = np.searchsorted(cuts.pair, owner, side="right").astype(np.int64) - first
    cut, peer = ranges(first, counts), np.repeat(peer, counts)
    number = part.number[part.request[np.repeat(owner, counts)]]
    order = order_by(number, peer)
    cut, peer, number = cut[order], peer[order], number[order]
    messages, _ = _messages(number, peer, _bytes(cuts, cut))
    nobody = np.full(len(cut), -1, np.int64)
    pieces = Pieces(
        number,
        nobody,
        nobody,
        cuts.source[cut],
        cuts.strides[cut],
        cuts.lengths[cut],
        np.zeros_like(cuts.lengths[cut]),
        cuts.itemsize[cut],
    )
    return messages, pieces
