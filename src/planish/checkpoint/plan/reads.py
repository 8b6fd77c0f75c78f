"""What one rank reads, copies and asks other ranks for in a load, and how it works that out.

A rank knows its own pieces; the coordinator sends it a `RankPart`: the requests that hold them, and
who reads each. Pieces are cut at the bounds of requests; those that others read are asked for in
the words of the request, so a reader need not know what tensors they are. All coordinates are
padded to the same number of dimensions with offset 0 and length 1.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (load workflow) and 4.1 (redundant reads).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.geometry import (
    I64,
    Box,
    Flags,
    before,
    fit,
    flat_boxes,
    intersect,
    order_by,
    ranges,
    strides_of,
    volumes,
)
from planish.checkpoint.format.items import pack_columns, unpack_columns
from planish.checkpoint.format.metafile import BLOCK, Metadata


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

    Element `i` of a piece lies at byte `source + sum(i * strides)` of its request, and goes to
    `target + i` of box `box` of item `item`.
    """

    request: I64
    """[p], which of its reader's requests."""
    item: I64
    box: I64
    source: I64
    """[p], byte of the first element, counted from the start of the request."""
    strides: I64
    """[p, d], bytes from one element to the next in the request."""
    lengths: I64
    target: I64
    """[p, d], first element, counted from the corner of the wanted box."""
    itemsize: I64
    """[p], bytes of an element."""

    def __len__(self) -> int:
        return len(self.request)

    @property
    def nbytes(self) -> I64:
        """[p], bytes of all elements, densely packed."""
        return np.asarray(volumes(self.lengths) * self.itemsize)

    def take(self, rows: I64 | Flags) -> Pieces:
        """Return some of the pieces."""
        return Pieces(*(column[rows] for column in vars(self).values()))

    def asked(self) -> I64:
        """Return [p, 3 + 2 d]: what their reader must know to send them."""
        columns = self.request, self.source, self.itemsize, self.strides, self.lengths
        return np.column_stack(columns).astype(np.int64)

    @classmethod
    def from_asked(cls, asked: I64) -> Pieces:
        """Return what `asked` says; where the pieces go is their receiver's business."""
        strides, lengths = np.hsplit(asked[:, 3:], 2)
        nowhere = np.zeros(len(asked), np.int64)
        request, source, itemsize = asked[:, :3].T
        return cls(request, nowhere, nowhere, source, strides, lengths, 0 * lengths, itemsize)


@dataclass(frozen=True)
class RankReads:
    """What one rank executes: read its requests, copy, and ask other ranks for the rest."""

    requests: ReadRequests
    copies: Pieces
    """From the rank's own requests into its own items, ascending by request."""
    asks: Pieces
    """What other ranks read, ascending by reader and request."""
    readers: I64
    """[p of `asks`], who reads it."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a shared plan: requests that it reads, and those whose bytes it needs."""

    rank: int
    requests: ReadRequests
    """[q], ascending by file and start."""
    reader: I64
    """[q], who reads each."""
    number: I64
    """[q], which of the reader's requests it is."""

    def encode(self) -> bytes:
        """Return the part as bytes."""
        columns = {**vars(self.requests), "reader": self.reader, "number": self.number}
        return pack_columns({"rank": self.rank}, columns)

    @classmethod
    def decode(cls, data: bytes) -> RankPart:
        """Undo `encode`."""
        head, columns = unpack_columns(data)
        file, start, stop, reader, number = columns.values()
        return cls(head["rank"], ReadRequests(file, start, stop), reader, number)


def spans(
    metadata: Metadata, shard: I64, offsets: I64, lengths: I64
) -> tuple[I64, I64, I64, I64, I64]:
    """Return pieces' file, first byte, last + 1 [k], strides in bytes [k, d] and item bytes [k]."""
    shards = metadata.shards
    width = offsets.shape[1]
    itemsize = metadata.tensors.item_bytes[shards.tensor[shard]]
    strides = strides_of(fit(shards.lengths, width, 1))[shard] * itemsize[:, None]
    inside = offsets - fit(shards.offsets, width, 0)[shard]
    first = shards.start[shard] + np.einsum("kn,kn->k", inside, strides)
    last = first + np.einsum("kn,kn->k", lengths - 1, strides) + itemsize
    return shards.file[shard], first, last, strides, itemsize


def _cut(
    metadata: Metadata, requests: ReadRequests, rows: I64, pieces: tuple[I64, I64, I64]
) -> tuple[I64, I64, I64, I64, I64, I64]:
    """Cut pieces (shard, offsets, lengths), one of the requests `rows` for each, at its bounds.

    Returns:
        [c] row of what was cut, byte of the first element in the request, [c, d] bytes from one
        element to the next, first element counted from that of the piece, extent, [c] bytes of an
        element.
    """
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
    return pairs, source, strides[pairs], insides, extents, itemsize[pairs]


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
    file, first, last, _, _ = spans(metadata, mine.shard, mine.offsets, mine.lengths)
    line = line_bases(np.array(metadata.files.sizes, np.int64))
    begin, counts = part.requests.meeting(line, line[file] + first, line[file] + last)
    rows, request = np.repeat(np.arange(len(mine)), counts), ranges(begin, counts)
    wanted = mine.shard[rows], mine.offsets[rows], mine.lengths[rows]
    pair, source, strides, inside, lengths, itemsize = _cut(
        metadata, part.requests, request, wanted
    )
    row, request = rows[pair], request[pair]
    target = (mine.offsets - mine.corner)[row] + inside
    number, reader = part.number[request], part.reader[request]
    order = order_by(reader, number)
    pieces = Pieces(
        number, mine.item[row], mine.box[row], source, strides, lengths, target, itemsize
    ).take(order)
    reader = reader[order]
    is_own = reader == part.rank
    return RankReads(
        part.requests.take(own), pieces.take(is_own), pieces.take(~is_own), reader[~is_own]
    )


def line_bases(sizes: I64) -> I64:
    """Return [f]: where each file begins on one number line, at multiples of a block."""
    return before(-(-sizes // BLOCK) * BLOCK)
