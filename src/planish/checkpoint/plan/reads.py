"""Plan of one rank for a load: its reads, its copies, and the pieces that it wants from others.

A rank knows its own pieces. The coordinator sends it a `RankPart`: the requests that contain them,
and the reader of each. The rank cuts its pieces at the bounds of requests. It describes pieces to
their reader by bytes of a request, so a reader need not know their tensors. All coordinates are
padded to the same number of dimensions with offset 0 and length 1.

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
    """Pieces that one rank wants: the intersections of a wanted box with a stored shard."""

    item: I64
    """[m], number of the item on the rank."""
    box: I64
    """[m], number of the box in the item."""
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
        """Return the requests of `rows`, in this order."""
        return ReadRequests(self.file[rows], self.start[rows], self.stop[rows])

    def meeting(self, base: I64, first: I64, last: I64) -> tuple[I64, I64]:
        """Return [k] the first request that overlaps each byte range, and [k] their number.

        A range is `[first, last)` on a number line on which file f begins at `base[f]`.
        """
        low, high = base[self.file] + self.start, base[self.file] + self.stop
        begin = np.searchsorted(high, first, side="right").astype(np.int64)
        end = np.searchsorted(low, last, side="left").astype(np.int64)
        return begin, np.maximum(end - begin, 0)


@dataclass(frozen=True)
class Pieces:
    """Strided parts of tensors, each inside the bytes of one request.

    Element `i` of a piece lies at byte `source + sum(i * strides)` of its request, and goes to
    `target + i` of box `box` of item `item`.
    """

    request: I64
    """[p], number of the request among its reader's."""
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
        """[p], number of bytes of the densely packed piece."""
        return np.asarray(volumes(self.lengths) * self.itemsize)

    def take(self, rows: I64 | Flags) -> Pieces:
        """Return the pieces of `rows`."""
        return Pieces(*(column[rows] for column in vars(self).values()))

    def asked(self) -> I64:
        """Return [p, 3 + 2 d]: the columns that the reader needs to send the pieces."""
        columns = self.request, self.source, self.itemsize, self.strides, self.lengths
        return np.column_stack(columns).astype(np.int64)

    @classmethod
    def from_asked(cls, asked: I64) -> Pieces:
        """Undo `asked`; item, box and target are 0, because only the receiver needs them."""
        strides, lengths = np.hsplit(asked[:, 3:], 2)
        nowhere = np.zeros(len(asked), np.int64)
        request, source, itemsize = asked[:, :3].T
        return cls(request, nowhere, nowhere, source, strides, lengths, 0 * lengths, itemsize)


class RankReads(NamedTuple):
    """Reads of one rank: its requests, its copies, and the pieces that it gets from other ranks."""

    requests: ReadRequests
    copies: Pieces
    """Pieces in the rank's own requests, ascending by request."""
    asks: Pieces
    """Pieces in other ranks' requests, ascending by reader and request."""
    readers: I64
    """[p of `asks`], the rank that reads each piece."""


@dataclass(frozen=True)
class RankPart:
    """One rank's part of a shared plan: requests that it reads, and those whose bytes it needs."""

    rank: int
    requests: ReadRequests
    """[q], ascending by file and start."""
    reader: I64
    """[q], the rank that reads each."""
    number: I64
    """[q], number of the request among its reader's."""

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
    """Return of each piece: file, first byte, last + 1, strides [k, d] in bytes, item bytes."""
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
    """Cut piece i of (shard, offsets, lengths) at the bounds of request `rows[i]`.

    Returns:
        [c] row i of the piece, [c] byte of the first element in the request, [c, d] strides in
        bytes, [c, d] first element relative to that of the piece, [c, d] lengths, [c] item bytes.
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
    """Return the boxes of `region` with elements `low` to `high` (row-major) of a box of `shape`.

    Their offsets are relative to the corner of `region`; they ascend in row-major order.
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
    """Return the reads of one rank from the coordinator's `part` and its own pieces.

    Raises `CheckpointCorrupt` if an element of a shard crosses the bound of a request.
    """
    own = np.flatnonzero(part.reader == part.rank)
    own = own[np.argsort(part.number[own], kind="stable")]
    file, first, last, _, _ = spans(metadata, mine.shard, mine.offsets, mine.lengths)
    line = line_bases(metadata)
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


def line_bases(metadata: Metadata) -> I64:
    """Return [f]: the start of each file on one number line, at multiples of a block."""
    sizes = np.array(metadata.files.sizes, np.int64)
    return before(-(-sizes // BLOCK) * BLOCK)
