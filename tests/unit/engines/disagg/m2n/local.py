"""Frames between ranks that are threads of one process.

Buffers, credits and checks are those of every transport; only the wire is a copy of memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.m2n.frames import FrameHeader, FrameLimits, SendHandle
from planish.engines.disagg.m2n.peers import PeerTransport, Sent, Timeouts


class LocalNetwork:
    """Where the transports of one process find each other."""

    def __init__(self) -> None:
        """Begin without ranks."""
        self._changed = threading.Condition()
        self._ranks: dict[int, LocalTransport] = {}

    def join(self, transport: LocalTransport) -> None:
        """Let others find a transport."""
        with self._changed:
            self._ranks[transport.rank] = transport
            self._changed.notify_all()

    def find(self, rank: int, timeout_s: float) -> LocalTransport:
        """Return the transport of a rank.

        Raises:
            PeerLost: it did not join in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: rank in self._ranks, timeout_s):
                raise PeerLost(
                    f"rank {rank} must join the network in time, got {sorted(self._ranks)}",
                    per_rank={rank: "did not join"},
                )
            return self._ranks[rank]


class LocalTransport(PeerTransport):
    """A `Transport` within one process."""

    def __init__(
        self,
        rank: int,
        limits: FrameLimits,
        network: LocalNetwork,
        timeouts: Timeouts | None = None,
    ) -> None:
        """Keep the settings; `connect` joins the network."""
        super().__init__(rank, limits, timeouts)
        self._network = network
        self._found: dict[int, LocalTransport] = {}

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Join the network and find all peers; see `Transport.connect`."""
        self.meet(list(addresses))
        self._network.join(self)
        deadline = time.monotonic() + self.timeouts.connect_s
        for rank in addresses:
            peer = self._network.find(rank, deadline - time.monotonic())
            if peer.limits != self.limits:
                raise ProtocolError(
                    f"all ranks must have buffers of one size, got {self.limits} and, of rank "
                    f"{rank}, {peer.limits}"
                )
            self._found[rank] = peer

    def carry(self, header: FrameHeader, views: list[memoryview]) -> SendHandle:
        """Copy a frame into the buffer of its target."""
        target = self._found[header.target]
        if target.is_closing:
            raise ConnectionError("it closed its transport")
        target.take_in(header, views)
        return Sent()

    def take_in(self, header: FrameHeader, views: list[memoryview]) -> None:
        """Receive a frame; called by its sender."""
        buffers = self.peers[header.source].buffers
        try:
            if self.admit(header.source, header):
                payload = b"".join(views)
                for part in buffers.begin(header):
                    part[:], payload = payload[: part.nbytes], payload[part.nbytes :]
                self.deliver(buffers.finish(header))
        except ProtocolError as error:
            self.lose(header.source, error)

    def cut(self, rank: int) -> None:
        """Tell a lost peer, which has no connection to notice it by."""
        if rank in self._found:
            self._found[rank].lose(self.rank, PeerLost("it closed its transport"))

    def close(self) -> None:
        """Leave the peers, who lose this rank; see `Transport.close`."""
        super().close()
        for rank in self._found:
            self.cut(rank)
