"""What planning a load yields: wanted pieces, shared requests, and what one rank executes.

All coordinates are padded to the same number of dimensions with offset 0 and length 1. The order of
rows matters: the pieces of one message lie in it one after the other, in the order of their rows.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3 (load workflow) and 4.1 (redundant reads).
"""

from __future__ import annotations

from dataclasses import dataclass

from planish.checkpoint.format.geometry import I64


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
    """[m, d], extent of the piece."""
    corner: I64
    """[m, d], first element of the wanted box, in the coordinates of the tensor."""

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.item)


@dataclass(frozen=True)
class Requests:
    """Byte ranges to read, each at most 16 MiB, bounded by CRC blocks or the end of the file."""

    file: I64
    """[q], row of the file in the metadata."""
    start: I64
    """[q], first byte in the file."""
    stop: I64
    """[q], one past the last byte in the file."""

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self.file)


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
    """[p, d], extent."""
    target: I64
    """[p, d], first element, counted from the corner of the wanted box; 0 for sends."""
    itemsize: I64
    """[p], bytes of an element."""

    def __len__(self) -> int:
        """Return the number of pieces."""
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
    """[s], rows."""
    nbytes: I64
    """[s], bytes of the packed message."""

    def __len__(self) -> int:
        """Return the number of messages."""
        return len(self.peer)


@dataclass(frozen=True)
class RankReads:
    """What one rank executes: read its requests, copy, send to peers, receive from peers."""

    requests: Requests
    """To read, in this order."""
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
