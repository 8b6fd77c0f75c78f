"""Receive buffers of a peer, allocated once, and payloads as memory.

The receiver counts how often it has released each slot; each frame that it sends back carries the
counts of its micro-batch, so that the steady exchange of DISPATCH and REPLY needs no message of
its own for flow control.

Source: MegaScale-Infer, arXiv 2504.02263, section 5: the receiver checks that the previous
consumer of a buffer has finished.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import google_crc32c
import numpy as np
import torch
from torch import Tensor

from planish.base.errors import ProtocolError
from planish.engines.disagg.m2n.frames import (
    CONTROL_MICRO_BATCH,
    Frame,
    FrameHeader,
    FrameLimits,
    Slot,
)

COUNT_MASK = 0xFFFF
"""Release counts wrap at 16 bits; at most one frame of a slot is ever under way."""


def payload_views(
    header: FrameHeader, counts: Tensor | None, rows: Tensor | Sequence[Tensor]
) -> list[memoryview]:
    """Return the memory of counts and rows as bytes, without copying it.

    Raises:
        ProtocolError: they are not what the header says.
    """
    tensors = [rows] if isinstance(rows, Tensor) else list(rows)
    parts = tensors if counts is None else [counts, *tensors]
    is_right = all(
        part.dtype == (torch.int32 if part is counts else header.dtype)
        and part.is_cpu
        and part.is_contiguous()
        for part in parts
    )
    sizes = (0 if counts is None else counts.numel(), sum(tensor.nbytes for tensor in tensors))
    if not is_right or sizes != (header.num_local_experts, header.num_rows * header.row_bytes):
        raise ProtocolError(
            f"counts and rows must be contiguous CPU tensors as their header says, {header}, got "
            f"{[(tuple(part.shape), part.dtype, part.device.type) for part in parts]}"
        )
    views = []
    for part in parts:
        if part.nbytes:
            # numpy has no bfloat16.
            plain = (
                part.detach().view(torch.uint8) if part.dtype == torch.bfloat16 else part.detach()
            )
            views.append(plain.numpy().data.cast("B"))
    return views


def payload_crc(views: Sequence[memoryview]) -> int:
    """Return the CRC-32C of several pieces of memory, one after another."""
    crc: int = 0
    for view in filter(len, views):
        # The library takes arrays that may be written to, but no such memoryview.
        crc = google_crc32c.extend(crc, np.frombuffer(view, dtype=np.uint8))
    return crc


class _Buffer:
    """Memory of one slot."""

    def __init__(self, num_counts: int, num_bytes: int, pin_memory: bool) -> None:
        self.counts = torch.zeros(num_counts, dtype=torch.int32)
        whole = -(-num_bytes // 8) * 8
        self.rows = torch.empty(whole, dtype=torch.uint8, pin_memory=pin_memory)
        self.counts_view = self.counts.view(torch.uint8).numpy().data
        self.rows_view = self.rows.numpy().data
        self.counts_array = self.counts.numpy()
        self.typed: dict[torch.dtype, Tensor] = {}
        self.holds: FrameHeader | None = None
        self.is_read = False


class ReceiveBuffers:
    """All buffers for the frames of one peer, allocated once.

    A buffer is free until `begin`, then being filled until `finish`, then read by the rank until
    `release`. A sender that keeps the rules never meets a buffer that is not free.
    """

    def __init__(self, peer: int, limits: FrameLimits, pin_memory: bool = False) -> None:
        self._peer, self._limits = peer, limits
        rows = limits.num_rows * limits.row_bytes
        sizes = dict.fromkeys(range(limits.num_micro_batches), rows)
        sizes[CONTROL_MICRO_BATCH] = limits.control_bytes
        self._buffers = {
            Slot(number, parity): _Buffer(limits.num_local_experts, size, pin_memory)
            for number, size in sizes.items()
            for parity in (0, 1)
        }
        self._lock = threading.Lock()
        self._released = dict.fromkeys(self._buffers, 0)
        self._unannounced: Counter[int] = Counter()

    def begin(self, header: FrameHeader) -> list[memoryview]:
        """Return where the payload of a frame goes: counts, then rows; parts without bytes not.

        Raises:
            ProtocolError: the peer had not been told that this buffer is free.
        """
        buffer = self._buffers[header.slot]
        if buffer.holds is not None:
            raise ProtocolError(
                f"a frame must fill a free buffer, got layer {header.layer} of micro-batch "
                f"{header.micro_batch} from rank {self._peer} while layer {buffer.holds.layer} "
                "is still there; the peer breaks the flow control"
            )
        buffer.holds, buffer.is_read = header, False
        counts = buffer.counts_view[: 4 * header.num_local_experts]
        rows = buffer.rows_view[: header.num_rows * header.row_bytes]
        return [view for view in (counts, rows) if view.nbytes]

    def finish(self, header: FrameHeader) -> Frame:
        """Return the frame whose payload has filled its buffer.

        Raises:
            ProtocolError: its CRC differs, or the counts are not those of its rows.
        """
        buffer = self._buffers[header.slot]
        num_bytes = header.num_rows * header.row_bytes
        crc = payload_crc(
            [buffer.counts_view[: 4 * header.num_local_experts], buffer.rows_view[:num_bytes]]
        )
        if crc != header.payload_crc:
            raise ProtocolError(
                f"the CRC of the payload from rank {self._peer} must be {header.payload_crc:#010x},"
                f" got {crc:#010x} in layer {header.layer} of micro-batch {header.micro_batch}"
            )
        num_counts = header.num_local_experts
        counts = buffer.counts_array[:num_counts]
        if num_counts and (counts.min() < 0 or counts.sum() != header.num_rows):
            raise ProtocolError(
                f"counts of local experts must be those of {header.num_rows} rows, got "
                f"{counts.tolist()} from rank {self._peer}"
            )
        width = header.row_bytes // header.dtype.itemsize
        if header.dtype not in buffer.typed:
            buffer.typed[header.dtype] = buffer.rows.view(header.dtype)
        rows = buffer.typed[header.dtype].as_strided((header.num_rows, width), (width, 1))
        buffer.is_read = True
        return Frame(header, buffer.counts[:num_counts], rows)

    def release(self, slot: Slot) -> int:
        """Free a buffer; return how many of its micro-batch the peer has not been told of.

        Raises:
            ProtocolError: it holds no frame that has been handed out.
        """
        buffer = self._buffers.get(slot)
        with self._lock:
            if buffer is None or not buffer.is_read:
                raise ProtocolError(
                    f"only a buffer that holds a frame can be posted, got {slot} of rank "
                    f"{self._peer}; post each frame once, after reading it"
                )
            buffer.holds, buffer.is_read = None, False
            self._released[slot] = self._released[slot] + 1 & COUNT_MASK
            self._unannounced[slot.micro_batch] += 1
            return self._unannounced[slot.micro_batch]

    def announce(self, micro_batch: int) -> int:
        """Return `FrameHeader.released` for a frame of this micro-batch to the peer."""
        with self._lock:
            del self._unannounced[micro_batch]
            low, high = (self._released[Slot(micro_batch, parity)] for parity in (0, 1))
        return low | high << 16

    def unannounced(self) -> list[int]:
        """Return the micro-batches whose released buffers the peer has not been told of."""
        with self._lock:
            return sorted(self._unannounced)
