"""Frames over TCP: two connections for each pair of ranks and one thread that receives.

Each rank dials its peers once; afterwards nothing is set up, no call is collective and no buffer is
allocated. A frame leaves from the memory of its tensors by one system call of the caller as long
as the kernel takes it; the thread sends the rest. It writes what arrives into the buffers of its
slot, so that a rank computes while rows come in.

REPLY, CONTROL and CREDIT frames have a connection of their own and so never wait behind rows on
their way out. Loss of a peer shows as an end of its connection, or as silence.

Source: MegaScale-Infer, arXiv 2504.02263, section 5 (M2N): on sockets instead of RDMA.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping

from planish.base.errors import PeerLost, ProtocolError
from planish.engines.disagg.m2n.frames import HEADER_BYTES, FrameHeader, FrameLimits, SendHandle
from planish.engines.disagg.m2n.handshake import Handshake, Lane
from planish.engines.disagg.m2n.peers import PeerTransport, Sent, Timeouts

_PIECES = 512
"""Pieces of memory in one system call; the kernel takes 1024."""


class _Sending:
    """A frame that the kernel has not taken whole yet."""

    def __init__(self, views: list[memoryview]) -> None:
        self.views = views
        self.problem: str | None = None
        self._ended = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._ended.is_set()

    def end(self, problem: str | None = None) -> None:
        self.problem = problem
        self._ended.set()

    def wait(self, timeout_s: float) -> None:
        has_ended = self._ended.wait(timeout_s)
        problem = self.problem if has_ended else f"did not take it within {timeout_s:g} s"
        if problem is not None:
            raise PeerLost(f"a frame must leave in time, but its peer {problem}")


def _advance(views: list[memoryview], num_bytes: int) -> None:
    """Drop from the front what has been sent or received."""
    while views and num_bytes >= views[0].nbytes:
        num_bytes -= views.pop(0).nbytes
    if num_bytes:
        views[0] = views[0][num_bytes:]


class _Connection:
    """One lane of one peer; reading belongs to the thread, sending to whoever holds the lock."""

    def __init__(self, peer: int, lane: Lane, sock: socket.socket) -> None:
        self.peer, self.lane, self.sock = peer, lane, sock
        self.lock = threading.Lock()
        self.outbox: deque[_Sending] = deque()
        self.head = bytearray(HEADER_BYTES)
        self.missing = [memoryview(self.head)]
        self.header: FrameHeader | None = None
        self.has_failed = False

    def send(self, views: list[memoryview]) -> SendHandle:
        """Send what the kernel takes now; keep the rest for the thread."""
        with self.lock:
            if not self.outbox:
                self._push(views)
                if not views:
                    return Sent()
            sending = _Sending(views)
            self.outbox.append(sending)
            return sending

    def drain(self) -> None:
        """Send more of what is kept."""
        with self.lock:
            while self.outbox:
                self._push(self.outbox[0].views)
                if self.outbox[0].views:
                    return
                self.outbox.popleft().end()

    def _push(self, views: list[memoryview]) -> None:
        with contextlib.suppress(BlockingIOError):
            while views:
                _advance(views, self.sock.sendmsg(views[:_PIECES]))

    def receive(self) -> bool:
        """Read into what is missing of a header or a payload; return whether it is whole.

        Raises:
            EOFError: the peer has closed the connection between two frames.
            PeerLost: it has closed it within a frame.
        """
        with contextlib.suppress(BlockingIOError):
            while self.missing:
                try:
                    got = self.sock.recvmsg_into(self.missing)[0]
                except ConnectionResetError:
                    got = 0
                if not got:
                    if self.header is not None or self.missing[0].nbytes < HEADER_BYTES:
                        raise PeerLost("closed its connection within a frame")
                    raise EOFError
                _advance(self.missing, got)
        return not self.missing

    def expect_header(self) -> None:
        """Make ready for the next frame."""
        self.header, self.missing = None, [memoryview(self.head)]

    def fail(self, problem: str) -> None:
        """Close, and end what was to be sent."""
        with self.lock:
            self.has_failed = True
            self.sock.close()
            while self.outbox:
                self.outbox.popleft().end(problem)


class _Receiver(threading.Thread):
    """Receives, sends what the kernel did not take at once, and watches the peers."""

    def __init__(
        self, transport: PeerTransport, sockets: Mapping[tuple[int, Lane], socket.socket]
    ) -> None:
        super().__init__(name=f"m2n-{transport.rank}", daemon=True)
        self.transport = transport
        self.connections = {key: _Connection(*key, sock) for key, sock in sockets.items()}
        self.selector = selectors.DefaultSelector()
        self.alarm, self.alarm_out = socket.socketpair()
        for end in (self.alarm, self.alarm_out):
            end.setblocking(False)
        self.selector.register(self.alarm, selectors.EVENT_READ, None)
        for connection in self.connections.values():
            self.selector.register(connection.sock, selectors.EVENT_READ, connection)

    def wake(self) -> None:
        """Let the thread look again."""
        with contextlib.suppress(OSError):
            self.alarm_out.send(b"\0")

    def run(self) -> None:
        """Work until the transport closes."""
        timeouts = self.transport.timeouts
        close_by = float("inf")
        try:
            while True:
                open_ones = [c for c in self.connections.values() if not c.has_failed]
                for connection in open_ones:
                    # Room is watched for exactly where something is kept.
                    wanted = selectors.EVENT_READ | selectors.EVENT_WRITE * bool(connection.outbox)
                    if self.selector.get_key(connection.sock).events != wanted:
                        self.selector.modify(connection.sock, wanted, connection)
                if self.transport.is_closing:
                    close_by = min(close_by, time.monotonic() + timeouts.close_s)
                    if time.monotonic() > close_by or not any(c.outbox for c in open_ones):
                        return
                events = self.selector.select(timeouts.heartbeat_s / 4)
                # Urgent lanes first: a reply does not wait for rows that arrived beside it.
                events.sort(key=lambda event: -event[0].data.lane if event[0].data else 0)
                for key, mask in events:
                    if key.data is None:
                        self.alarm.recv(4096)
                    elif not key.data.has_failed:
                        self.handle(key.data, mask)
                self.transport.watch()
        except Exception as error:
            self.transport.fail(error)
            raise
        finally:
            for connection in self.connections.values():
                connection.fail("is no longer connected")
            self.selector.close()
            self.alarm.close()
            self.alarm_out.close()

    def drop(self, connection: _Connection, problem: str) -> None:
        """Close a connection, unless it is closed, and watch it no more."""
        if not connection.has_failed:
            self.selector.unregister(connection.sock)
            connection.fail(problem)

    def handle(self, connection: _Connection, mask: int) -> None:
        """Send and receive on one connection what is possible now, up to the end of one frame."""
        transport, rank = self.transport, connection.peer
        peer = transport.peers[rank]
        try:
            if mask & selectors.EVENT_WRITE:
                connection.drain()
            if not mask & selectors.EVENT_READ:
                return
            # From its first end on, a peer has `dead_after_s` for what is still on its way.
            if not any(self.connections[rank, lane].has_failed for lane in Lane):
                peer.heard_at = time.monotonic()
            is_whole = connection.receive()
            if is_whole and connection.header is None:
                header = FrameHeader.decode(connection.head, transport.limits)
                if not transport.admit(rank, header):
                    connection.expect_header()
                    return
                connection.header, connection.missing = header, peer.buffers.begin(header)
                is_whole = connection.receive()
            if is_whole and connection.header is not None:
                frame = peer.buffers.finish(connection.header)
                connection.expect_header()
                transport.deliver(frame)
        except EOFError:
            # Rows that left before the peer closed may still come on its other lane.
            self.drop(connection, "closed its connection")
            if all(self.connections[rank, lane].has_failed for lane in Lane):
                transport.lose(rank, PeerLost("closed its connection"))
        except (OSError, PeerLost, ProtocolError) as error:
            transport.lose(rank, error)


class SocketTransport(PeerTransport):
    """A `Transport` over TCP.

    Example::

        transport = SocketTransport(rank, limits, token=token)
        addresses = exchange(transport.address)     # by the launcher of the ranks
        transport.connect(addresses)
    """

    def __init__(
        self,
        rank: int,
        limits: FrameLimits,
        *,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        timeouts: Timeouts | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Listen; nobody is called before `connect`.

        Args:
            rank: of this process.
            limits: of frames, equal on all ranks.
            token: of this start of the instance, equal on all ranks.
            host: where to listen.
            port: 0 takes a free one.
            timeouts: of all waits; None for the defaults.
            pin_memory: make the receive buffers such that a GPU copies from them directly.
        """
        super().__init__(rank, limits, timeouts, pin_memory)
        self._token = token
        self._listener = socket.create_server((host, port))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """Host and port where this rank listens."""
        self._receiver: _Receiver | None = None

    def connect(self, addresses: Mapping[int, tuple[str, int]]) -> None:
        """Connect with all peers; see `Transport.connect`."""
        with self._listener as listener:
            handshake = Handshake(self.rank, self.limits, self._token, self.timeouts.connect_s)
            sockets = handshake.connect(listener, addresses)
        self.meet(list(addresses))
        self._receiver = _Receiver(self, sockets)
        self._receiver.start()

    def carry(self, header: FrameHeader, views: list[memoryview]) -> SendHandle:
        """Hand a frame to the kernel, or to the thread where the kernel is full."""
        assert self._receiver is not None
        lane = Lane.URGENT if header.is_urgent else Lane.DATA
        connection = self._receiver.connections[header.target, lane]
        sending = connection.send([memoryview(header.encode()), *views])
        if not sending.is_done:
            self._receiver.wake()
        return sending

    def cut(self, rank: int) -> None:
        """Close both connections with a lost peer; only the thread loses peers."""
        assert self._receiver is not None
        for lane in Lane:
            self._receiver.drop(self._receiver.connections[rank, lane], "is lost")

    def close(self) -> None:
        """End all connections and the thread; see `Transport.close`."""
        super().close()
        self._listener.close()
        if self._receiver is not None:
            self._receiver.wake()
            self._receiver.join(self.timeouts.close_s + 1.0)
