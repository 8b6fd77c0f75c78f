"""Frames between attention ranks (M) and expert ranks (N), and the protocol of what carries them.

A frame is a header of 64 bytes, int32 counts of rows by local expert, and the rows themselves,
sorted by local expert and then by the order of tokens at the source. One frame goes from each
attention rank to each expert rank for each layer and micro-batch, even without rows, and one
comes back. Nothing here opens a connection or knows weights.

Each receiver keeps two buffers for each peer and micro-batch, chosen by the parity of the layer; a
sender may only write into a buffer that it knows to be free. So at most two frames of one
micro-batch are under way to one peer, and nothing is queued without a bound.

Source: MegaScale-Infer, arXiv 2504.02263, section 5 (M2N): pre-registered buffers, no group set-up
per call, no collective call, acknowledgements apart from data.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple, Protocol

import google_crc32c
import torch
from torch import Tensor

from planish.base.errors import ConfigError, ProtocolError

MAGIC = b"M2NF"
PROTOCOL = 1
HEADER_BYTES = 64
CONTROL_MICRO_BATCH = 0xFFFF
"""What `micro_batch` is in CONTROL frames, which belong to none and have buffers of their own."""

_LAYOUT = struct.Struct("<4sBBBBHHHHIIQQIIIIII")
_NUMBERS = (
    *("source", "target", "micro_batch", "num_local_experts"),
    *("weight_version", "placement_version", "iteration", "sent_ns"),
    *("layer", "num_rows", "row_bytes", "released", "payload_crc"),
)
"""Fields in the order of the layout, after magic, protocol, kind, dtype and flags."""
_DTYPES = {
    1: torch.uint8,
    2: torch.float32,
    3: torch.float64,
    4: torch.bfloat16,
    5: torch.float16,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


class FrameKind(IntEnum):
    """What a frame is for."""

    DISPATCH = 1
    """Rows of tokens on their way to experts."""
    REPLY = 2
    """Outputs of experts, unweighted, in the order in which their rows were dispatched."""
    CONTROL = 3
    """Bytes that the ranks agree upon, such as the plan of an iteration; no counts."""
    CREDIT = 4
    """Which buffers are free, and a sign of life; transports use it and `poll` never returns it."""


_KINDS = frozenset(int(kind) for kind in FrameKind)


class Slot(NamedTuple):
    """Names one of a peer's receive buffers; it holds one frame until it is posted again."""

    micro_batch: int
    """From 0, or `CONTROL_MICRO_BATCH`."""
    parity: int
    """`layer % 2`."""


@dataclass(frozen=True)
class FrameLimits:
    """Sizes of the buffers, equal on all ranks of an instance; no frame may exceed them.

    Example:
        >>> FrameLimits.of(2, max_tokens=8, top_k=2, num_local_experts=4, row_bytes=128).num_rows
        16
    """

    num_micro_batches: int
    """Micro-batches that have buffers, 1 to 65534; prefill has one of its own, where it is used."""
    num_rows: int
    """Rows of the largest frame."""
    row_bytes: int
    """Bytes of the widest row."""
    num_local_experts: int
    """Experts (with replicas) of the rank that has most."""
    control_bytes: int = 65536
    """Bytes of the largest CONTROL frame."""

    def __post_init__(self) -> None:
        """Refuse sizes that no frame could have."""
        if not 1 <= self.num_micro_batches < CONTROL_MICRO_BATCH:
            raise ConfigError(
                f"`num_micro_batches` must be 1 to {CONTROL_MICRO_BATCH - 1}, "
                f"got {self.num_micro_batches}; lower `micro_batches` of the engine"
            )
        if not 1 <= self.num_local_experts <= 0xFFFF or min(self.num_rows, self.row_bytes) < 1:
            raise ConfigError(
                "a frame must hold at least one row of one byte for 1 to 65535 local experts, got "
                f"num_rows={self.num_rows} row_bytes={self.row_bytes} "
                f"num_local_experts={self.num_local_experts}"
            )

    @classmethod
    def of(
        cls,
        num_micro_batches: int,
        *,
        max_tokens: int,
        top_k: int,
        num_local_experts: int,
        row_bytes: int,
    ) -> FrameLimits:
        """Return the limits of micro-batches with at most `max_tokens` tokens.

        A token sends a rank at most one row for each expert there, and at most `top_k` rows in all.
        """
        num_rows = max_tokens * min(top_k, num_local_experts)
        return cls(num_micro_batches, num_rows, row_bytes, num_local_experts)

    def admit(self, num_rows: int) -> None:
        """Refuse a micro-batch whose frames would exceed the buffers, before any is sent.

        Raises:
            ProtocolError: `num_rows` exceeds the buffers; nothing is ever cut off.
        """
        if num_rows > self.num_rows:
            raise ProtocolError(
                f"a frame must have at most {self.num_rows} rows, got {num_rows}; admit fewer "
                "tokens into a micro-batch or give the buffers more rows"
            )


@dataclass(frozen=True)
class FrameHeader:
    """What a frame is, from whom, to whom, and how much follows.

    Example:
        >>> header = FrameHeader(
        ...     FrameKind.DISPATCH, source=0, target=2, weight_version=7, iteration=40, layer=3,
        ...     micro_batch=1, num_rows=5, row_bytes=256, dtype=torch.float32, num_local_experts=4)
        >>> FrameHeader.decode(header.encode()) == header, header.slot
        (True, Slot(micro_batch=1, parity=1))
    """

    kind: FrameKind
    source: int
    """Rank that sends, 0 to 65535."""
    target: int
    """Rank that receives, 0 to 65535."""
    weight_version: int
    """Version of the weights at the source; the two roles never mix versions."""
    iteration: int
    """Decode iteration, counted from 0 by the coordinator."""
    layer: int
    """MoE layer from 0; in CONTROL frames a counter of the source, which chooses the buffer."""
    micro_batch: int
    """From 0; `CONTROL_MICRO_BATCH` in CONTROL frames."""
    num_rows: int
    """Rows that follow, 0 included; in CONTROL frames bytes."""
    row_bytes: int
    """Bytes of a row; 1 in CONTROL frames."""
    dtype: torch.dtype
    """Of the rows: float32, float64, bfloat16, float16, or uint8."""
    num_local_experts: int
    """int32 counts that follow; a REPLY may leave them out (0)."""
    placement_version: int = 0
    """Version of the expert placement by which the rows were sorted."""
    is_prefill: bool = False
    """Rows are of a prompt: no other attention rank takes part, so an expert rank does not wait."""
    sent_ns: int = 0
    """Monotonic clock of the source, nanoseconds; a transport sets it when it is 0."""
    released: int = 0
    """Frames that the source has released of the target's slots of this micro-batch: the count of
    parity 0 in the lower 16 bits, of parity 1 in the upper; set by the transport."""
    payload_crc: int = 0
    """CRC-32C of counts and rows; set by the transport."""

    @property
    def slot(self) -> Slot:
        """The buffer of the target that this frame fills."""
        return Slot(self.micro_batch, self.layer % 2)

    @property
    def is_urgent(self) -> bool:
        """Whether it goes ahead of rows on their way out."""
        return self.kind is not FrameKind.DISPATCH

    @property
    def payload_bytes(self) -> int:
        """Bytes of counts and rows together."""
        return 4 * self.num_local_experts + self.num_rows * self.row_bytes

    @classmethod
    def control(cls, source: int, target: int, counter: int, num_bytes: int) -> FrameHeader:
        """Return the header of a CONTROL frame, the `counter`-th from `source` to `target`."""
        return cls(
            kind=FrameKind.CONTROL,
            source=source,
            target=target,
            weight_version=0,
            iteration=0,
            layer=counter,
            micro_batch=CONTROL_MICRO_BATCH,
            num_rows=num_bytes,
            row_bytes=1,
            dtype=torch.uint8,
            num_local_experts=0,
        )

    def reply(self, *, row_bytes: int | None = None) -> FrameHeader:
        """Return the header of the REPLY to this DISPATCH: the same rows back, without counts."""
        return replace(
            self,
            kind=FrameKind.REPLY,
            source=self.target,
            target=self.source,
            row_bytes=self.row_bytes if row_bytes is None else row_bytes,
            num_local_experts=0,
            sent_ns=0,
        )

    def encode(self) -> bytes:
        """Return the 64 bytes of the header, little endian, its own CRC-32C in the last four.

        Raises:
            ProtocolError: a field does not fit its place.
        """
        try:
            numbers = [getattr(self, name) for name in _NUMBERS]
            first = (MAGIC, PROTOCOL, self.kind, _CODES[self.dtype], self.is_prefill)
            body = bytes(_LAYOUT.pack(*first, *numbers, 0)[:-4])
        except (struct.error, KeyError) as error:
            raise ProtocolError(
                f"fields of a frame's header must fit it, got {self}: {error}"
            ) from error
        crc: int = google_crc32c.value(body)
        return body + crc.to_bytes(4, "little")

    @classmethod
    def decode(cls, data: bytes | bytearray, limits: FrameLimits | None = None) -> FrameHeader:
        """Return the header in `data`.

        Args:
            data: exactly 64 bytes.
            limits: sizes that the frame must fit; None checks none.

        Raises:
            ProtocolError: wrong length, magic, protocol, CRC, kind, dtype or sizes; the message
                names which.
        """
        if len(data) != HEADER_BYTES:
            raise ProtocolError(f"a header must have {HEADER_BYTES} bytes, got {len(data)}")
        magic, protocol, kind, dtype, flags, *numbers, crc = _LAYOUT.unpack(data)
        if magic != MAGIC:
            raise ProtocolError(
                f"a frame must begin with the magic {MAGIC!r}, got {magic!r}; the peer is foreign "
                "or the stream is torn"
            )
        if protocol != PROTOCOL:
            raise ProtocolError(
                f"the protocol version of a frame must be {PROTOCOL}, got {protocol}; run one "
                "release on all ranks"
            )
        seen = google_crc32c.value(bytes(data[:-4]))
        if crc != seen:
            raise ProtocolError(f"the CRC of a header must be {crc:#010x}, got {seen:#010x}")
        if kind not in _KINDS or dtype not in _DTYPES or flags > 1:
            raise ProtocolError(
                "kind, dtype and flags of a frame must be known, got "
                f"kind={kind} dtype={dtype} flags={flags}"
            )
        fields = dict(zip(_NUMBERS, numbers, strict=True))
        header = cls(FrameKind(kind), dtype=_DTYPES[dtype], is_prefill=bool(flags), **fields)
        header.check_sizes(limits)
        return header

    def check_sizes(self, limits: FrameLimits | None) -> None:
        """Refuse sizes that contradict each other or exceed `limits`.

        Raises:
            ProtocolError: which size, its value and its bound.
        """
        is_control = self.kind is FrameKind.CONTROL
        faults = []
        if self.row_bytes % self.dtype.itemsize:
            faults.append(f"row_bytes={self.row_bytes} is no multiple of one {self.dtype}")
        if is_control and (self.micro_batch, self.row_bytes) != (CONTROL_MICRO_BATCH, 1):
            faults.append(f"CONTROL has micro_batch={self.micro_batch} row_bytes={self.row_bytes}")
        if limits is not None:
            rows, width = limits.num_rows, limits.row_bytes
            if is_control:
                rows, width = limits.control_bytes, 1
            elif self.micro_batch >= limits.num_micro_batches and (
                self.kind is not FrameKind.CREDIT or self.micro_batch != CONTROL_MICRO_BATCH
            ):
                faults.append(f"micro_batch={self.micro_batch} of {limits.num_micro_batches}")
            if self.num_rows > rows:
                faults.append(f"num_rows={self.num_rows} exceeds the capacity {rows}")
            if self.row_bytes > width:
                faults.append(f"row_bytes={self.row_bytes} exceeds the capacity {width}")
            if self.num_local_experts > limits.num_local_experts:
                faults.append(
                    f"num_local_experts={self.num_local_experts} exceeds the capacity "
                    f"{limits.num_local_experts}"
                )
        if faults:
            raise ProtocolError(
                f"a frame must fit the buffers of the instance, got {'; '.join(faults)} in "
                f"{self.kind.name} from rank {self.source} to rank {self.target}"
            )


@dataclass(frozen=True)
class Frame:
    """A frame that has arrived. Its tensors are views of the receive buffer until it is posted."""

    header: FrameHeader
    counts: Tensor
    """[num_local_experts] int32, rows of each local expert; their sum is `header.num_rows`."""
    rows: Tensor
    """[num_rows, row_bytes / itemsize] of `header.dtype`, sorted by (local expert, source order);
    [bytes, 1] uint8 in a CONTROL frame."""

    @property
    def source(self) -> int:
        """Rank that sent it."""
        return self.header.source

    @property
    def slot(self) -> Slot:
        """The buffer that holds it: pass it to `Transport.post_receive` when done."""
        return self.header.slot


class SendHandle(Protocol):
    """A send under way; the memory of its rows must not change until it is done."""

    @property
    def is_done(self) -> bool:
        """The rows have left their memory (which does not say that the peer has them)."""

    def wait(self, timeout_s: float) -> None:
        """Return when done.

        Raises:
            PeerLost: the peer died, or the time ran out.
        """


class Transport(Protocol):
    """Carries frames of one rank to and from its peers; no call is collective.

    A transport is made with its rank and its `FrameLimits`. Calls may come from several threads,
    `poll` from one. The order of frames of one kind between two ranks is kept.

    Example, an expert rank that answers every DISPATCH::

        transport.connect(addresses)
        while running:
            for frame in transport.poll(0.5):
                outputs = experts(frame.counts, frame.rows)
                transport.post_receive(frame.source, frame.slot)
                transport.send(frame.header.reply(), None, outputs)
    """

    rank: int
    """Of this process."""

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect with all peers and post all their buffers; every peer must do so too.

        Args:
            addresses: host and port of each peer by rank; a transport without a network ignores
                the values.

        Raises:
            PeerLost: a peer did not answer in time.
            ProtocolError: a peer is of another instance, release or size.
        """

    def post_receive(self, source: int, slot: Slot) -> None:
        """Give a buffer back whose frame is no longer read, so that `source` may fill it again.

        Raises:
            ProtocolError: the buffer holds no frame that `poll` returned.
        """

    def send(
        self, header: FrameHeader, counts: Tensor | None, rows: Tensor | Sequence[Tensor]
    ) -> SendHandle:
        """Send a frame to `header.target` without waiting for the peer to read it.

        Args:
            header: `sent_ns`, `released` and `payload_crc` are filled in.
            counts: [num_local_experts] int32 on the CPU; None when the header says 0.
            rows: contiguous CPU tensors [n_i, width] of `header.dtype`, together `num_rows` rows;
                several are sent one after another without being copied together.

        Returns:
            What says when the memory of `rows` may change.

        Raises:
            ProtocolError: the frame exceeds the limits, or header and tensors differ.
            PeerLost: the peer is dead, or did not free the slot of the frame before this one within
                the transport's `send_timeout_s`.
        """

    def poll(self, timeout_s: float) -> list[Frame]:
        """Return the frames that have arrived, waiting up to `timeout_s` for the first.

        Returns:
            Frames in order of arrival; an empty list when the time ran out.

        Raises:
            PeerLost: a peer died (`per_rank` says which and why); raised once for each peer, after
                the frames that had arrived whole. The other peers go on.
            ProtocolError: a peer sent what no peer may send; it is treated as dead afterwards.
        """

    def close(self) -> None:
        """End all connections and threads, in bounded time; a second call does nothing."""
