"""Frames over TCP: one connection for each pair of ranks, and one thread that receives.

Each attention rank connects to its expert ranks once. After that there is no set-up, no allocation
of buffers and no collective call. The caller sends a frame from the memory of its tensors by one
system call, as far as the kernel takes it; the thread sends the rest. The thread writes arriving
rows into the buffer of their peer and micro-batch, so a rank computes while rows arrive. The end of
a connection shows a lost peer; the coordinator ends a rank that hangs.

Two checksums follow the header, since TCP's own checksum of 16 bits misses damage: the CRC32C of
counts and rows, and that of all bytes before it. After a damaged frame the start of the next one is
unknown, so its peer counts as lost.

Source: MegaScale-Infer, arXiv 2504.02263, section 5 (M2N): on sockets instead of RDMA.
"""

from __future__ import annotations

import contextlib
import json
import logging
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from planish.base.errors import EngineError, PeerLost, ProtocolError
from planish.engines.deploy.connections import HELLO_S, dial, keep_alive, proven
from planish.engines.disagg.m2n.frames import (
    HEADER_BYTES,
    Deliver,
    Frame,
    FrameHeader,
    FrameLimits,
    InTurn,
)

logger = logging.getLogger(__name__)

_SUMS = struct.Struct("<II")
"""CRC32C of counts and rows, and CRC32C of the header with that first sum."""
_CPU = torch.device("cpu")
CLOSE_S = 2.0
"""Seconds in which pending data may leave when a transport closes."""


class _Peer:
    """The connection to one peer; the thread reads, and the holder of the lock sends."""

    def __init__(self, rank: int, end: socket.socket, limits: FrameLimits, pin_memory: bool):
        self.rank, self.end = rank, end
        self.lock = threading.Lock()
        self.outbox: deque[list[memoryview]] = deque()
        """Frames that the kernel has not accepted completely yet."""
        self.lost = ""
        num_bytes = limits.num_rows * limits.row_bytes
        self.buffers = [
            (
                torch.zeros(limits.num_local_experts, dtype=torch.int32),
                torch.empty(-(-num_bytes // 8) * 8, dtype=torch.uint8, pin_memory=pin_memory),
            )
            for _ in range(limits.num_micro_batches)
        ]
        self._head = bytearray(HEADER_BYTES + _SUMS.size)
        self._frame: Frame | None = None
        self._missing = [memoryview(self._head)]

    def send(self, views: list[memoryview]) -> bool:
        """Send as much as the kernel accepts now and queue the rest; return whether something is
        queued.

        Raises:
            OSError: the connection is closed.
        """
        with self.lock:
            if not self.outbox:
                self._push(views)
            if views:
                self.outbox.append(views)
            return bool(self.outbox)

    def drain(self) -> None:
        """Send queued data as far as the kernel accepts it."""
        with self.lock:
            while self.outbox:
                self._push(self.outbox[0])
                if self.outbox[0]:
                    return
                self.outbox.popleft()

    def _push(self, views: list[memoryview]) -> None:
        with contextlib.suppress(BlockingIOError):
            while views:
                _advance(views, self.end.sendmsg(views))

    def receive(self) -> Frame | None:
        """Read arrived bytes, up to the end of one frame; return the frame once it is complete.

        Raises:
            OSError: the peer has closed the connection.
            PeerLost: the frame is damaged.
        """
        while self._fill():
            wanted, head_sum = _SUMS.unpack_from(self._head, HEADER_BYTES)
            if self._frame is not None:
                frame, self._frame, self._missing = self._frame, None, [memoryview(self._head)]
                self._compare(wanted, _checksum(_arrays(frame.counts, frame.rows)))
                return frame
            self._compare(head_sum, google_crc32c.value(bytes(self._head[:-4])))
            header = FrameHeader.decode(self._head[:HEADER_BYTES])
            counts, rows = self.buffers[header.micro_batch]
            rows = rows[: header.num_rows * header.row_bytes].view(header.dtype)
            width = header.row_bytes // header.dtype.itemsize
            counts, rows = counts[: header.num_local_experts], rows.view(header.num_rows, width)
            self._frame, self._missing = Frame(header, counts, rows), _views(_arrays(counts, rows))
        return None

    def _compare(self, wanted: int, found: int) -> None:
        if wanted != found:
            raise _loss(self, f"its frame came damaged (CRC32C {found:08x}, sent {wanted:08x})")

    def _fill(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            while self._missing:
                got = self.end.recvmsg_into(self._missing)[0]
                if not got:
                    raise ConnectionError("closed its connection")
                _advance(self._missing, got)
        return not self._missing


def _loss(peer: _Peer, reason: str) -> PeerLost:
    return PeerLost(f"rank {peer.rank} is lost: {reason}", per_rank={peer.rank: reason})


def _arrays(*tensors: Tensor) -> list[NDArray[np.uint8]]:
    """Return the memory of contiguous tensors as bytes; only tensors of a device are copied."""
    # The tensors are viewed as bytes, since numpy has no bfloat16.
    return [t.detach().cpu().view(torch.uint8).numpy() for t in tensors if t.nbytes]


def _views(arrays: list[NDArray[np.uint8]]) -> list[memoryview]:
    return [array.data.cast("B") for array in arrays]


def _checksum(arrays: list[NDArray[np.uint8]]) -> int:
    found = 0
    for array in arrays:
        found = google_crc32c.extend(found, array)
    return found


def _signed(header: FrameHeader, payload: list[NDArray[np.uint8]]) -> bytes:
    """Return a header with its checksums."""
    head = header.encode() + _checksum(payload).to_bytes(4, "little")
    return head + int(google_crc32c.value(head)).to_bytes(4, "little")


def _advance(views: list[memoryview], num_bytes: int) -> None:
    """Drop the first `num_bytes` from the front, which were sent or received."""
    while views and num_bytes >= views[0].nbytes:
        num_bytes -= views.pop(0).nbytes
    if num_bytes:
        views[0] = views[0][num_bytes:]


class SocketTransport:
    """Transport of the frames of one rank over TCP."""

    def __init__(
        self,
        rank: int,
        limits: FrameLimits,
        secret: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        connect_s: float = 60.0,
        device: torch.device = _CPU,
    ) -> None:
        """Listen at `host`, where port 0 takes a free port; connect to no peer before `connect`.

        `limits` and `secret` are equal on all ranks of the instance. All peers must answer within
        `connect_s`. Rows are sent from `device`; they arrive in host memory, which is page-locked
        if `device` is not the CPU.
        """
        self.rank, self._limits, self._secret = rank, limits, secret
        self._connect_s, self._device = connect_s, device
        self._listener = socket.create_server((host, port))
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """Host and port at which peers connect to this rank."""
        self.peers: dict[int, _Peer] = {}
        self._in_turn = InTurn()
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name=f"m2n-{rank}", daemon=True)

    def connect(self, addresses: Mapping[int, tuple[str, int]], deliver: Deliver) -> None:
        """Connect with all peers, as in `Transport`."""
        self._deliver = deliver
        ends: dict[int, socket.socket] = {}
        deadline = time.monotonic() + self._connect_s
        try:
            with self._listener:
                for peer in sorted(rank for rank in addresses if rank > self.rank):
                    ends[peer] = self._dial(peer, addresses[peer], deadline)
                self._accept({rank for rank in addresses if rank < self.rank}, ends, deadline)
        except BaseException:
            for end in ends.values():
                end.close()
            raise
        self._selector = selectors.DefaultSelector()
        self._alarm, self._bell = socket.socketpair()
        for end in (self._alarm, self._bell):
            end.setblocking(False)
        self._selector.register(self._alarm, selectors.EVENT_READ)
        for peer, end in ends.items():
            keep_alive(end)
            end.setblocking(False)
            is_pinned = self._device.type == "cuda"
            self.peers[peer] = _Peer(peer, end, self._limits, is_pinned)
            self._selector.register(end, selectors.EVENT_READ, self.peers[peer])
        self._thread.start()

    def _dial(self, peer: int, address: tuple[str, int], deadline: float) -> socket.socket:
        def greet(connection: Connection) -> None:
            connection.send_bytes(json.dumps(self.rank).encode())
            connection.recv_bytes()

        try:
            return dial(address, self._secret, deadline - time.monotonic(), greet)
        except (AuthenticationError, OSError) as error:
            reason = f"did not answer at {address[0]}:{address[1]} ({error})"
            raise PeerLost(
                f"rank {peer} must answer its peers in time, but it {reason}; see whether it runs",
                per_rank={peer: reason},
            ) from None

    def _accept(self, expected: set[int], ends: dict[int, socket.socket], deadline: float) -> None:
        """Accept connections until all expected ranks have connected; close connections of
        strangers.
        """
        refused = "nobody"
        while missing := expected - ends.keys():
            self._listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                caller, (host, *_) = self._listener.accept()
            except TimeoutError:
                reason = f"did not call in time; refused callers: {refused}"
                raise PeerLost(
                    f"ranks {sorted(missing)} must call rank {self.rank}, but they {reason}",
                    per_rank=dict.fromkeys(missing, reason),
                ) from None
            try:
                with proven(caller, self._secret, HELLO_S, is_caller=False) as connection:
                    rank = json.loads(connection.recv_bytes())
                    connection.send_bytes(b"")
                ends[rank] = caller
            except (AuthenticationError, OSError) as error:
                caller.close()
                refused = f"{host} ({error})"
                logger.warning("refused_caller rank=%d caller=%s", self.rank, refused)

    def room(self, first: FrameHeader, num_rows: int) -> Tensor:
        """Return new memory, as in `Transport`: the kernel may still read earlier frames."""
        width = first.row_bytes // first.dtype.itemsize
        return torch.empty(num_rows, width, dtype=first.dtype, device=self._device)

    def send(self, header: FrameHeader, counts: Tensor | None, rows: Tensor) -> None:
        """Send a frame, as in `Transport`."""
        peer = self.peers[header.target]
        payload = _arrays(rows) if counts is None else _arrays(counts, rows)
        try:
            is_kept = peer.send([memoryview(_signed(header, payload)), *_views(payload)])
        except OSError:
            raise _loss(peer, peer.lost or "closed its connection") from None
        if is_kept:
            self._wake()

    def close(self) -> None:
        """Close all connections and end the thread, as in `Transport`."""
        self._is_closing = True
        self._listener.close()
        if self._thread.ident is not None:
            self._wake()
            self._thread.join(CLOSE_S + 1.0)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._bell.send(b"\0")

    # What the thread does.

    def _run(self) -> None:
        close_by = float("inf")
        try:
            while True:
                alive = [peer for peer in self.peers.values() if not peer.lost]
                for peer in alive:
                    # The selector watches for writability only while data is queued.
                    wanted = selectors.EVENT_READ | selectors.EVENT_WRITE * bool(peer.outbox)
                    if self._selector.get_key(peer.end).events != wanted:
                        self._selector.modify(peer.end, wanted, peer)
                if self._is_closing:
                    close_by = min(close_by, time.monotonic() + CLOSE_S)
                    if time.monotonic() > close_by or not any(peer.outbox for peer in alive):
                        return
                for key, mask in self._selector.select(CLOSE_S / 4 if self._is_closing else None):
                    if key.data is None:
                        self._alarm.recv(4096)
                    else:
                        self._handle(key.data, mask)
        except Exception as error:
            self._deliver(EngineError(f"receiving on rank {self.rank} ended: {error!r}"))
            raise
        finally:
            for peer in self.peers.values():
                peer.lost = peer.lost or "this transport is closed"
                peer.end.close()
            self._selector.close()
            self._alarm.close()
            self._bell.close()

    def _handle(self, peer: _Peer, mask: int) -> None:
        """Send to and receive from one peer as much as is possible now."""
        try:
            if mask & selectors.EVENT_WRITE:
                peer.drain()
            if mask & selectors.EVENT_READ:
                frame = peer.receive()
                if frame is not None:
                    is_own_name = frame.header.source == peer.rank
                    self._in_turn.check(frame.header, is_own_name=is_own_name)
                    self._deliver(frame)
        except ProtocolError as error:
            self._deliver(error)
        except PeerLost as loss:
            self._lose(peer, loss.per_rank[peer.rank])
        except OSError:
            self._lose(peer, "closed its connection")

    def _lose(self, peer: _Peer, reason: str) -> None:
        peer.lost = reason
        self._selector.unregister(peer.end)
        with peer.lock:
            peer.end.close()
            peer.outbox.clear()
        if not self._is_closing:
            self._deliver(_loss(peer, reason))
