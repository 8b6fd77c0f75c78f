"""What every transport keeps about its peers: free buffers, what arrived, who is lost.

A subclass moves bytes; it decides nothing about flow control, order or failure.
"""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from planish.base.errors import ConfigError, EngineError, PeerLost, PlanishError, ProtocolError
from planish.engines.disagg.m2n.buffers import (
    COUNT_MASK,
    ReceiveBuffers,
    payload_crc,
    payload_views,
)
from planish.engines.disagg.m2n.frames import (
    CONTROL_MICRO_BATCH,
    Frame,
    FrameHeader,
    FrameKind,
    FrameLimits,
    SendHandle,
    Slot,
)


@dataclass(frozen=True)
class Timeouts:
    """How long a transport waits; nothing waits without a bound."""

    connect_s: float = 60.0
    """For all peers to answer."""
    send_s: float = 60.0
    """For a peer to free the buffer that a frame needs."""
    heartbeat_s: float = 2.0
    """Between signs of life on an idle connection."""
    dead_after_s: float = 5.0
    """Of silence, after which a peer counts as lost."""
    close_s: float = 2.0
    """For what is already on its way to leave when a transport closes."""

    def __post_init__(self) -> None:
        """Refuse waits that make every peer look dead."""
        if not 0 < 2 * self.heartbeat_s <= self.dead_after_s:
            raise ConfigError(
                "`dead_after_s` must be at least two heartbeats, got "
                f"{self.dead_after_s} s of heartbeats every {self.heartbeat_s} s"
            )


class Credits:
    """Which buffers of a peer are free, as far as its frames have told."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._sent: dict[Slot, int] = {}
        self._free: dict[Slot, int] = {}
        self._changed = threading.Condition()
        self._lost: str | None = None

    def take(self, slot: Slot, timeout_s: float) -> None:
        """Wait until a buffer is free and count it as used.

        Raises:
            PeerLost: it did not become free within `timeout_s` seconds, or the peer is dead.
        """
        with self._changed:
            free = self._changed.wait_for(
                lambda: self._lost or self._sent.get(slot, 0) == self._free.get(slot, 0), timeout_s
            )
            self.check()
            if not free:
                reason = f"did not free the buffer {slot} within {timeout_s:g} s"
                raise PeerLost(
                    f"rank {self._peer} must read its frames, but {reason}; it hangs or is "
                    "overloaded",
                    per_rank={self._peer: reason},
                )
            self._sent[slot] = self._sent.get(slot, 0) + 1 & COUNT_MASK

    def check(self) -> None:
        """Raise if the peer is lost.

        Raises:
            PeerLost: it is.
        """
        if self._lost is not None:
            raise PeerLost(
                f"rank {self._peer} is lost: {self._lost}", per_rank={self._peer: self._lost}
            )

    def learn(self, header: FrameHeader) -> None:
        """Take over the counts of a frame from the peer.

        Frames of two connections may pass each other, so that older counts come later: they are
        left aside.

        Raises:
            ProtocolError: the peer releases what was never sent.
        """
        with self._changed:
            for parity in (0, 1):
                slot = Slot(header.micro_batch, parity)
                count = header.released >> 16 * parity & COUNT_MASK
                sent, known = self._sent.get(slot, 0), self._free.get(slot, 0)
                if 0 < (count - known & COUNT_MASK) <= COUNT_MASK // 2:
                    if (sent - count & COUNT_MASK) > 1:
                        raise ProtocolError(
                            f"rank {self._peer} must release the frames that it got, got "
                            f"{count} releases of {slot} after {sent} frames (modulo 65536)"
                        )
                    self._free[slot] = count
                    self._changed.notify_all()

    def lose(self, reason: str) -> None:
        """Wake who waits: the peer is dead."""
        with self._changed:
            self._lost = reason
            self._changed.notify_all()


class Sent:
    """The handle of a frame that has left."""

    is_done = True
    """Its memory may change."""

    def wait(self, timeout_s: float) -> None:
        """Return at once."""


@dataclass
class PeerState:
    """What a transport keeps about one peer."""

    buffers: ReceiveBuffers
    """For its frames."""
    credits: Credits
    """Its free buffers."""
    heard_at: float
    """Monotonic seconds of its last bytes."""
    told_at: float
    """Monotonic seconds of the last frame to it that was not rows on their way out."""
    lost: str | None = None
    """Why it counts as dead; None while it lives."""


class PeerTransport(ABC):
    """Everything of a `Transport` but the wire."""

    def __init__(
        self,
        rank: int,
        limits: FrameLimits,
        timeouts: Timeouts | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Keep the settings; `connect` makes the peers."""
        self.rank, self.limits = rank, limits
        self.timeouts = timeouts or Timeouts()
        self.peers: dict[int, PeerState] = {}
        """By rank, the lost ones included."""
        self.is_closing = False
        """`close` has been called."""
        self._pin_memory = pin_memory
        self._watched_s = time.monotonic()
        self._changed = threading.Condition()
        self._arrived: deque[Frame] = deque()
        self._faults: deque[PlanishError] = deque()

    @abstractmethod
    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect with all peers; see `Transport.connect`."""

    @abstractmethod
    def carry(self, header: FrameHeader, views: list[memoryview]) -> SendHandle:
        """Send a frame whose buffer at the peer is free.

        Raises:
            OSError: the peer can not be reached any more.
        """

    @abstractmethod
    def cut(self, rank: int) -> None:
        """End the connections with a lost peer; what waits for it must end."""

    def close(self) -> None:
        """Refuse further calls and wake `poll`; see `Transport.close`."""
        with self._changed:
            self.is_closing = True
            self._changed.notify_all()
        for peer in self.peers.values():
            peer.credits.lose("this transport is closed")

    def meet(self, ranks: Sequence[int]) -> None:
        """Make buffers for the frames of these peers."""
        now = time.monotonic()
        for rank in ranks:
            buffers = ReceiveBuffers(rank, self.limits, self._pin_memory)
            self.peers[rank] = PeerState(buffers, Credits(rank), now, now)

    def post_receive(self, source: int, slot: Slot) -> None:
        """Give a buffer back; see `Transport.post_receive`."""
        # One free buffer is told by the next frame that goes back, two do not wait for it.
        if self._peer(source).buffers.release(slot) > 1:
            self._credit(source, slot.micro_batch)

    def send(
        self, header: FrameHeader, counts: Tensor | None, rows: Tensor | Sequence[Tensor]
    ) -> SendHandle:
        """Send a frame; see `Transport.send`."""
        peer = self._peer(header.target)
        header.check_sizes(self.limits)
        if header.source != self.rank or header.kind is FrameKind.CREDIT:
            raise ProtocolError(
                f"rank {self.rank} must send its own frames, got {header.kind.name} of rank "
                f"{header.source}"
            )
        views = payload_views(header, counts, rows)
        crc = payload_crc(views)
        peer.credits.take(header.slot, self.timeouts.send_s)
        return self._carry(peer, header, views, crc)

    def poll(self, timeout_s: float) -> list[Frame]:
        """Return what has arrived; see `Transport.poll`."""
        if not self._arrived:
            for rank, peer in self.peers.items():
                for micro_batch in peer.buffers.unannounced():
                    self._credit(rank, micro_batch)
        with self._changed:
            self._changed.wait_for(
                lambda: self._arrived or self._faults or self.is_closing, timeout_s
            )
            frames = list(self._arrived)
            self._arrived.clear()
            if not frames and self._faults:
                raise self._faults.popleft()
        if self.is_closing and not frames:
            raise EngineError(f"the transport of rank {self.rank} is closed")
        return frames

    def admit(self, rank: int, header: FrameHeader) -> bool:
        """Take note of a header from a peer; return whether a payload belongs to it.

        Raises:
            ProtocolError: it names other ranks, or releases what was never sent.
        """
        if (header.source, header.target) != (rank, self.rank):
            raise ProtocolError(
                f"a frame on the connection of rank {rank} to rank {self.rank} must say so, got "
                f"{header.source} to {header.target}"
            )
        self.peers[rank].credits.learn(header)
        return header.kind is not FrameKind.CREDIT

    def deliver(self, frame: Frame) -> None:
        """Hand a frame to `poll`."""
        with self._changed:
            self._arrived.append(frame)
            self._changed.notify_all()

    def lose(self, rank: int, error: Exception) -> None:
        """Treat a peer as dead; `poll` tells it once."""
        peer = self.peers[rank]
        with self._changed:
            if peer.lost is not None or self.is_closing:
                return
            peer.lost = str(error)
            fault = error if isinstance(error, ProtocolError) else None
            told = fault or PeerLost(f"rank {rank} is lost: {error}")
            told.per_rank = {rank: peer.lost}
            self._faults.append(told)
            self._changed.notify_all()
        peer.credits.lose(peer.lost)
        self.cut(rank)

    def fail(self, error: Exception) -> None:
        """Tell `poll` of a fault of this process, so that nobody waits for ever."""
        with self._changed:
            self._faults.append(EngineError(f"receiving on rank {self.rank} ended: {error!r}"))
            self._changed.notify_all()

    def watch(self) -> None:
        """Give signs of life, and count silent peers as lost."""
        now = time.monotonic()
        was_stopped = now - self._watched_s > self.timeouts.dead_after_s / 2
        self._watched_s = now
        for rank, peer in self.peers.items():
            if was_stopped:
                # This process itself was stopped, and could hear nobody.
                peer.heard_at = now
            silent = now - peer.heard_at
            if peer.lost is None and silent > self.timeouts.dead_after_s:
                self.lose(rank, PeerLost(f"it was silent for {silent:.1f} s"))
            elif peer.lost is None and now - peer.told_at > self.timeouts.heartbeat_s:
                self._credit(rank, CONTROL_MICRO_BATCH)

    def _peer(self, rank: int) -> PeerState:
        if rank not in self.peers or self.is_closing:
            raise ProtocolError(
                f"a frame must go to or come from one of the connected ranks "
                f"{sorted(self.peers)}, got {rank}" + " after `close`" * self.is_closing
            )
        return self.peers[rank]

    def _carry(
        self, peer: PeerState, header: FrameHeader, views: list[memoryview], crc: int = 0
    ) -> SendHandle:
        header = replace(
            header,
            sent_ns=header.sent_ns or time.monotonic_ns(),
            released=peer.buffers.announce(header.micro_batch),
            payload_crc=crc,
        )
        if header.is_urgent:
            peer.told_at = time.monotonic()
        try:
            return self.carry(header, views)
        except OSError as error:
            # A connection that the other end has closed is closed here too by now.
            was_closed = error.errno in (errno.EBADF, errno.EPIPE, errno.ECONNRESET)
            reason = peer.lost or ("closed its connection" if was_closed else str(error))
            raise PeerLost(
                f"rank {header.target} is lost: {reason}", per_rank={header.target: reason}
            ) from error

    def _credit(self, rank: int, micro_batch: int) -> None:
        """Tell a peer which buffers of a micro-batch are free."""
        header = replace(
            FrameHeader.control(self.rank, rank, 0, 0),
            kind=FrameKind.CREDIT,
            micro_batch=micro_batch,
        )
        # `poll` tells who is lost.
        with contextlib.suppress(PeerLost):
            self._carry(self.peers[rank], header, [])
