"""Frames over point-to-point messages of gloo, in a process group of their own.

A frame is one message with header and counts, of fixed size and with the lane as its tag, and one
with the rows, with the slot as its tag, received straight into the buffer of the slot. Two threads
for each peer wait for headers, so that replies pass rows on their way out. No call is collective.

gloo ends a connection when a wait on it runs out of time: waits here have no bound of their own,
signs of life find a peer that hangs, and such a short wait is how a connection is ended.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.m2n.frames import (
    CONTROL_MICRO_BATCH,
    HEADER_BYTES,
    FrameHeader,
    FrameLimits,
    SendHandle,
    Slot,
)
from planish.engines.disagg.m2n.handshake import Lane
from planish.engines.disagg.m2n.peers import PeerTransport, Timeouts

_FOR_EVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_END_TAG = 2
"""Never sent: waiting for it briefly ends a connection."""


class _Sending:
    """Messages of one frame; gloo says only to who waits whether they have left."""

    def __init__(self, works: Sequence[Any], tensors: Sequence[Tensor]) -> None:
        self._works, self._tensors = works, tensors
        self.is_done = False

    def wait(self, timeout_s: float) -> None:
        try:
            for work in self._works:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise PeerLost(f"a frame must leave in time, got {error}") from error
        self.is_done = True


class _Receiver(threading.Thread):
    """Receives the frames of one lane of one peer."""

    def __init__(self, transport: GlooTransport, rank: int, lane: Lane) -> None:
        super().__init__(name=f"m2n-{transport.rank}-{rank}-{lane.name}", daemon=True)
        self.transport, self.peer, self.lane = transport, rank, lane

    def run(self) -> None:
        """Work until the connection ends."""
        transport = self.transport
        peer = transport.peers[self.peer]
        head = torch.zeros(transport.head_bytes, dtype=torch.uint8)
        try:
            while True:
                transport.group.recv([head], self.peer, self.lane).wait(_FOR_EVER)
                peer.heard_at = time.monotonic()
                data = head.numpy().tobytes()
                header = FrameHeader.decode(data[:HEADER_BYTES], transport.limits)
                if not transport.admit(self.peer, header):
                    continue
                views = peer.buffers.begin(header)
                if header.num_local_experts:
                    counts = views.pop(0)
                    counts[:] = data[HEADER_BYTES : HEADER_BYTES + counts.nbytes]
                for view in views:
                    rows = torch.frombuffer(view, dtype=torch.uint8)
                    tag = transport.tag(header.slot)
                    transport.group.recv([rows], self.peer, tag).wait(_FOR_EVER)
                transport.deliver(peer.buffers.finish(header))
        except ProtocolError as error:
            transport.lose(self.peer, error)
        except RuntimeError as error:
            transport.lose(self.peer, PeerLost(f"its connection ended ({error})"))


class GlooTransport(PeerTransport):
    """A `Transport` over gloo.

    Example::

        store = torch.distributed.TCPStore(host, port, num_ranks, is_master=rank == 0)
        transport = GlooTransport(rank, num_ranks, limits, store=store)
        transport.connect({peer: ("", 0) for peer in peers})
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        limits: FrameLimits,
        *,
        store: Store,
        timeouts: Timeouts | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Keep the settings; `connect` makes the group.

        Args:
            rank: of this process.
            num_ranks: of both roles together.
            limits: of frames, equal on all ranks.
            store: where the ranks find each other, of this start of the instance only.
            timeouts: of all waits; None for the defaults.
            pin_memory: make the receive buffers such that a GPU copies from them directly.
        """
        super().__init__(rank, limits, timeouts, pin_memory)
        self._num_ranks, self._store = num_ranks, store
        self.group: Any = None
        """The process group, which nothing else uses."""
        self.head_bytes = HEADER_BYTES + 4 * limits.num_local_experts
        """Of the first message of a frame."""
        self._sendings: dict[tuple[int, bool], deque[_Sending]] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect with all peers; see `Transport.connect`."""
        wait = timedelta(seconds=self.timeouts.connect_s)
        self._store.set(f"m2n/{self.rank}", repr(self.limits))
        try:
            self._store.wait([f"m2n/{rank}" for rank in addresses], wait)
            self.group = ProcessGroupGloo(
                PrefixStore("m2n", self._store), self.rank, self._num_ranks, wait
            )
        except RuntimeError as error:
            missing = {
                rank: "did not come" for rank in addresses if not self._store.check([f"m2n/{rank}"])
            }
            raise PeerLost(
                f"all ranks must come in time, got none of {sorted(missing)}: {error}",
                per_rank=missing,
            ) from error
        for rank in addresses:
            sizes = self._store.get(f"m2n/{rank}").decode()
            if sizes != repr(self.limits):
                raise ProtocolError(
                    f"all ranks must have buffers of one size, got {self.limits!r} and, of rank "
                    f"{rank}, {sizes}"
                )
        self.meet(list(addresses))
        self._sendings = {(rank, lane): deque() for rank in addresses for lane in (False, True)}
        self._threads = [_Receiver(self, rank, lane) for rank in addresses for lane in Lane]
        self._threads.append(threading.Thread(target=self.guard, name="m2n-guard", daemon=True))
        for thread in self._threads:
            thread.start()
        # Threads that still wait in gloo when the interpreter ends would abort the process.
        atexit.register(self.close)

    def guard(self) -> None:
        """Watch the peers until the transport closes."""
        while not self._closed.wait(self.timeouts.heartbeat_s / 4):
            self.watch()

    def tag(self, slot: Slot) -> int:
        """Return the tag of the rows of a slot."""
        is_control = slot.micro_batch == CONTROL_MICRO_BATCH
        number = self.limits.num_micro_batches if is_control else slot.micro_batch
        return _END_TAG + 1 + 2 * number + slot.parity

    def carry(self, header: FrameHeader, views: list[memoryview]) -> SendHandle:
        """Send the messages of a frame; several pieces of rows are copied together."""
        head = torch.zeros(self.head_bytes, dtype=torch.uint8)
        first = header.encode()
        if header.num_local_experts:
            first += bytes(views[0])
            views = views[1:]
        head[: len(first)] = torch.frombuffer(bytearray(first), dtype=torch.uint8)
        parts = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        messages = [(head, int(header.is_urgent))]
        if parts:
            messages.append(
                (parts[0] if len(parts) == 1 else torch.cat(parts), self.tag(header.slot))
            )
        kept = self._sendings[header.target, header.is_urgent]
        try:
            with self._lock:
                works = [self.group.send([part], header.target, tag) for part, tag in messages]
                sending = _Sending(works, [part for part, _ in messages])
                kept.append(sending)
                oldest = (
                    kept.popleft() if len(kept) > 4 * self.limits.num_micro_batches + 8 else None
                )
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error
        if oldest is not None:
            # Long gone: the peer has freed the buffer of that frame since.
            oldest.wait(self.timeouts.dead_after_s)
        return sending

    def cut(self, rank: int) -> None:
        """End the connection with a lost peer."""
        with contextlib.suppress(RuntimeError):
            unused = torch.empty(1, dtype=torch.uint8)
            self.group.recv([unused], rank, _END_TAG).wait(_AT_ONCE)

    def close(self) -> None:
        """End all connections and threads; see `Transport.close`."""
        if self.is_closing:
            return
        super().close()
        self._closed.set()
        deadline = time.monotonic() + self.timeouts.close_s
        for (rank, _), kept in self._sendings.items():
            with contextlib.suppress(PeerLost):
                while kept and self.peers[rank].lost is None:
                    kept.popleft().wait(max(deadline - time.monotonic(), 0.001))
        for rank in self.peers:
            self.cut(rank)
        for thread in self._threads:
            thread.join(1.0)
        self._threads.clear()
        atexit.unregister(self.close)
