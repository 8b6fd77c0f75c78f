"""Frames between M attention ranks and N expert ranks.

A frame is a header, int32 counts of rows by local expert, and the rows (hidden states of tokens),
sorted by local expert and then by the order of tokens at the source. For each layer and
micro-batch, one frame goes from each attention rank to each expert rank, even without rows, and one
comes back.

The next frame of a micro-batch leaves only after the reply to the last one, so the reply says that
the buffer of the last frame is free. Each receiver has one buffer for each peer and micro-batch.
Queues are therefore bounded, and flow control needs no messages.

Source: MegaScale-Infer, arXiv 2504.02263, section 5 (M2N): pre-registered buffers, no group set-up
per call, no collective call.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from planish.base.errors import PlanishError, ProtocolError

_LAYOUT = struct.Struct("<BHHIQIHIIBHI?Q")
HEADER_BYTES = _LAYOUT.size
_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.uint8]


class FrameKind(IntEnum):
    """Kind of a frame."""

    DISPATCH = 1
    """Rows of tokens on their way to the experts."""
    REPLY = 2
    """Outputs of experts, unweighted, in the order of the dispatched rows."""


class FrameLimits(NamedTuple):
    """Sizes of the buffers, equal on all ranks of an instance."""

    num_micro_batches: int
    num_rows: int
    """Rows of the largest frame."""
    row_bytes: int
    """Bytes of the widest row."""
    num_local_experts: int
    """Largest number of experts on one rank, replicas included."""


class FrameHeader(NamedTuple):
    """Header of a frame: kind, source, target, and sizes of the content."""

    kind: FrameKind
    source: int
    target: int
    weight_version: int
    """Version of the weights at the source; attention and expert ranks never mix versions."""
    iteration: int
    """Decode iteration, counted from 0 by the coordinator."""
    layer: int
    micro_batch: int
    num_rows: int
    """Number of rows that follow; may be 0."""
    row_bytes: int
    dtype: torch.dtype
    """Type of the rows: float32, float64, bfloat16, float16, or uint8."""
    num_local_experts: int
    """Number of int32 counts that follow; a REPLY has none."""
    placement_version: int = 0
    """Version of the expert placement by which the rows were sorted."""
    is_prefill: bool = False
    """True if the rows belong to a prompt: no other attention rank takes part, so an expert rank
    does not wait for more frames."""
    sent_ns: int = 0
    """Nanoseconds of the source's monotonic clock when the frame was sent."""

    @property
    def num_bytes(self) -> int:
        """Size of header, counts and rows in bytes."""
        return HEADER_BYTES + 4 * self.num_local_experts + self.num_rows * self.row_bytes

    def reply(self) -> FrameHeader:
        """Return the header of the REPLY to this DISPATCH, which has as many rows but no counts."""
        return self._replace(
            kind=FrameKind.REPLY, source=self.target, target=self.source, num_local_experts=0
        )

    def encode(self) -> bytes:
        """Return the bytes of the header, little endian, stamped with the time."""
        return _LAYOUT.pack(*self[:9], _DTYPES.index(self.dtype), *self[10:13], time.monotonic_ns())

    @classmethod
    def decode(cls, data: bytes | bytearray) -> FrameHeader:
        """Return the header in `HEADER_BYTES` bytes."""
        kind, *numbers = _LAYOUT.unpack(data)
        numbers[8] = _DTYPES[numbers[8]]
        return cls(FrameKind(kind), *numbers)


class InTurn:
    """The last frames of a rank's peers; it refuses frames that are repeated, late or forged."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        """Map from (peer, micro-batch) to the time at which its last frame was sent."""

    def check(self, header: FrameHeader, *, is_own_name: bool) -> None:
        """Accept a frame.

        Raises:
            ProtocolError: the frame is out of order.
        """
        key = header.source, header.micro_batch
        if not is_own_name or header.sent_ns <= self._last.get(key, 0):
            raise ProtocolError(
                "a rank must send each frame of a micro-batch once, in turn and in its own name, "
                f"got {header}; start all ranks anew"
            )
        self._last[key] = header.sent_ns


@dataclass(frozen=True)
class Frame:
    """A frame that has arrived.

    Its tensors are views of the receive buffer. They are valid until this rank has answered the
    frame (a DISPATCH), or has sent the next frame of its micro-batch (a REPLY).
    """

    header: FrameHeader
    counts: Tensor
    """[num_local_experts] int32, number of rows for each local expert; they sum to
    `header.num_rows`."""
    rows: Tensor
    """[num_rows, row_bytes / itemsize] of `header.dtype`, sorted by (local expert, source order)"""


Deliver = Callable[[Frame | PlanishError], None]
"""Callback that a thread of the transport calls with complete frames, in the order of each peer,
and with one `PeerLost` for each lost peer, after its last frame."""


class Transport(Protocol):
    """Transport of the frames of one rank."""

    address: Any
    """Address of this rank for its peers, in JSON form."""

    def connect(self, addresses: Mapping[int, Any], deliver: Deliver) -> None:
        """Connect to all peers.

        `addresses` maps rank to address. `deliver` gets everything that arrives from now on.

        Raises:
            PeerLost: a peer does not connect in time.
        """

    def room(self, first: FrameHeader, num_rows: int) -> Tensor:
        """Return memory [num_rows, width] for the rows of a micro-batch's next frames.

        The rows are in the order of their targets. `first` is the header of the first frame; it has
        width and dtype.
        """

    def send(self, header: FrameHeader, counts: Tensor | None, rows: Tensor) -> None:
        """Send a frame to `header.target` without waiting for its arrival.

        `counts` are [num_local_experts] int32 on the CPU, or None for a header without counts.
        `rows` [num_rows, width] are a contiguous part of a buffer that `room` returned, and must
        not change before the reply.

        Raises:
            PeerLost: the target is lost.
        """

    def close(self) -> None:
        """Close all connections in bounded time; a second call does nothing."""
