"""Frames between attention ranks (M) and expert ranks (N).

A frame is a header, int32 counts of rows by local expert, and the rows themselves, sorted by local
expert and then by the order of tokens at the source. One frame goes from each attention rank to
each expert rank for each layer and micro-batch, even without rows, and one comes back.

Since the next frame of a micro-batch leaves only after the answer to the last, the answer says that
the buffer of the last is free: each receiver has one buffer for each peer and micro-batch, nothing
is queued without a bound, and no message of its own controls the flow.

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
    """What a frame is for."""

    DISPATCH = 1
    """Rows of tokens on their way to experts."""
    REPLY = 2
    """Outputs of experts, unweighted, in the order in which their rows were dispatched."""


class FrameLimits(NamedTuple):
    """Sizes of the buffers, equal on all ranks of an instance."""

    num_micro_batches: int
    num_rows: int
    """Rows of the largest frame."""
    row_bytes: int
    """Bytes of the widest row."""
    num_local_experts: int
    """Experts, replicas included, of the rank that has most."""


class FrameHeader(NamedTuple):
    """What a frame is, from whom, to whom, and how much follows."""

    kind: FrameKind
    source: int
    target: int
    weight_version: int
    """Version of the weights at the source; the two roles never mix versions."""
    iteration: int
    """Decode iteration, counted from 0 by the coordinator."""
    layer: int
    micro_batch: int
    num_rows: int
    """Rows that follow, 0 included."""
    row_bytes: int
    dtype: torch.dtype
    """Type of the rows: float32, float64, bfloat16, float16, or uint8."""
    num_local_experts: int
    """int32 counts that follow; a REPLY has none."""
    placement_version: int = 0
    """Version of the expert placement by which the rows were sorted."""
    is_prefill: bool = False
    """Rows are of a prompt: no other attention rank takes part, so an expert rank does not wait."""
    sent_ns: int = 0
    """Monotonic clock of the source when the frame left, nanoseconds."""

    @property
    def num_bytes(self) -> int:
        """Bytes of header, counts and rows together."""
        return HEADER_BYTES + 4 * self.num_local_experts + self.num_rows * self.row_bytes

    def reply(self) -> FrameHeader:
        """Return the header of the REPLY to this DISPATCH: the same rows back, without counts."""
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
    """The last frames of a rank's peers: one that comes again, late or in another name is none."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        """By peer and micro-batch, when the last frame was sent."""

    def check(self, header: FrameHeader, *, is_own_name: bool) -> None:
        """Take up a frame that has come; ProtocolError if it must not have."""
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

    Its tensors are views of the receive buffer, valid until this rank has answered it (a DISPATCH)
    or has sent the next frame of its micro-batch (a REPLY).
    """

    header: FrameHeader
    counts: Tensor
    """[num_local_experts] int32, rows of each local expert; their sum is `header.num_rows`."""
    rows: Tensor
    """[num_rows, row_bytes / itemsize] of `header.dtype`, sorted by (local expert, source order)"""


Deliver = Callable[[Frame | PlanishError], None]
"""Gets what arrives, from a thread of the transport: whole frames in the order of each peer, and
`PeerLost` once for each peer that is lost, after its last frame."""


class Transport(Protocol):
    """Carries the frames of one rank."""

    address: Any
    """Where peers find this rank, as JSON holds it."""

    def connect(self, addresses: Mapping[int, Any], deliver: Deliver) -> None:
        """Connect with all peers; PeerLost where one does not do so too in time.

        Addresses are by rank; `deliver` gets what arrives from now on.
        """

    def room(self, first: FrameHeader, num_rows: int) -> Tensor:
        """Return memory for the rows of frames that one micro-batch sends next, [num_rows, width].

        They stand one after another, in the order of their targets, of whom `first` names the
        first; it also has width and dtype.
        """

    def send(self, header: FrameHeader, counts: Tensor | None, rows: Tensor) -> None:
        """Send a frame to `header.target` without waiting until it is read, or raise PeerLost.

        Counts are [num_local_experts] int32 on the CPU, or None where the header says 0; rows
        [num_rows, width] are contiguous in `room`, and nobody changes them before the answer.
        """

    def close(self) -> None:
        """End all connections in bounded time; a second call does nothing."""
