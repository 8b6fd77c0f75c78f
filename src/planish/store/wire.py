"""HTTP/1.1 connections that stay open, with a time limit on every step.

A body goes out of, and comes into, the memory of the caller without a copy. Nothing here knows S3
or retries.

urllib3 under the same limits takes some 18 % longer for the ranged reads of a checkpoint and 1.4 to
1.6 times the processor time; `tests/benchmarks/bench_storage.py` compares the two.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import os
import select
import socket
import ssl
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
"""The longest wait for the head of an answer, and for each MiB of a body in either direction."""
_SLICE_BYTES = 1 << 20
_HEAD_BYTES = 1 << 16
_MAX_IDLE = 64


class _Source(io.BufferedIOBase):
    """The receiving side of a socket, every read of which ends by a moment.

    A large read goes straight into its target by one call of the system, in which other threads
    may run.
    """

    def __init__(self, sock: socket.socket, deadline: float):
        self.deadline = deadline
        self._sock = sock
        self._flags = 0 if isinstance(sock, ssl.SSLSocket) else socket.MSG_WAITALL
        self._file = sock.makefile("rb", buffering=0)  # keeps the socket open while it is read
        self._received = b""

    def readable(self) -> bool:
        return True

    def readline(self, size: int | None = -1) -> bytes:
        limit = _HEAD_BYTES if size is None or size < 0 else size
        while b"\n" not in self._received[:limit] and len(self._received) < limit:
            block = self._receive(_HEAD_BYTES)
            if not block:
                break
            self._received += block
        return self._cut(self._received.find(b"\n", 0, limit) + 1 or limit)

    def read(self, size: int | None = -1) -> bytes:
        if size is None or size < 0:
            blocks = [self._cut(len(self._received))]
            while block := self._receive(_SLICE_BYTES):
                blocks.append(block)
            return b"".join(blocks)
        target = bytearray(size)
        return bytes(memoryview(target)[: self.readinto(target)])

    def readinto(self, target: Any) -> int:
        view = memoryview(target).cast("B")
        ahead = self._cut(view.nbytes)
        done = len(ahead)
        view[:done] = ahead
        while done < view.nbytes:
            limit_calls(self._sock, self.deadline)
            count = self._sock.recv_into(view[done:], 0, self._flags)
            if not count:
                break
            done += count
        return done

    def close(self) -> None:
        self._file.close()
        super().close()

    def _cut(self, size: int) -> bytes:
        block, self._received = self._received[:size], self._received[size:]
        return block

    def _receive(self, size: int) -> bytes:
        limit_calls(self._sock, self.deadline)
        return self._sock.recv(size)


def limit_calls(sock: socket.socket, deadline: float) -> None:
    """Let each call of the system on a socket end by a moment (monotonic seconds).

    A plain socket stays blocking: Python would ask twice for each piece otherwise.

    Raises:
        TimeoutError: the moment has passed.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    if isinstance(sock, ssl.SSLSocket):
        sock.settimeout(left)
        return
    value = struct.pack("ll", int(left), max(1, int(left % 1 * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


class Answer(http.client.HTTPResponse):
    """An answer whose head, and each MiB of whose body, must come within a time."""

    def __init__(
        self, sock: socket.socket, *rest: Any, deadline: float, read_seconds: float, **options: Any
    ):
        super().__init__(sock, *rest, **options)
        self.fp.close()
        self._deadline = deadline
        self._read_seconds = read_seconds
        self._source = _Source(sock, 0.0)
        self._begin_step()
        self.fp = self._source  # type: ignore[assignment]

    def fill(self, view: memoryview) -> int:
        """Fill `view` from the body; return how many bytes came, fewer when it ended early."""
        done = 0
        while not self.isclosed():  # an empty body, too, must be read to its end
            self._begin_step()
            count = self.readinto(view[done : done + _SLICE_BYTES])
            done += count
            if not count or done == view.nbytes:
                break
        return done

    def read_whole(self, limit: int) -> bytes | None:
        """Return the whole body, None if it has more than `limit` bytes."""
        body = bytearray()
        while True:
            self._begin_step()
            block = self.read(_SLICE_BYTES)
            if not block:
                break
            body += block
            if len(body) > limit:
                return None
        if self.length:
            raise http.client.IncompleteRead(b"", self.length)
        return bytes(body)

    def _begin_step(self) -> None:
        self._source.deadline = min(self._deadline, time.monotonic() + self._read_seconds)


class Connection:
    """One connection; of one thread at a time."""

    def __init__(self, host: str, context: ssl.SSLContext | None, read_seconds: float):
        self._http: http.client.HTTPConnection
        if context is None:
            self._http = http.client.HTTPConnection(host, timeout=CONNECT_SECONDS)
        else:
            self._http = http.client.HTTPSConnection(host, timeout=CONNECT_SECONDS, context=context)
        self._read_seconds = read_seconds
        self._answer: Answer | None = None
        self.has_sent = False
        """Whether bytes of the present request have left."""

    def request(
        self,
        method: str,
        target: str,
        headers: Mapping[str, str],
        body: memoryview | None,
        deadline: float,
    ) -> Answer:
        """Send a request and return the head of its answer.

        Args:
            method: GET, PUT, ...
            target: path and query.
            headers: all but the length.
            body: contiguous bytes, or None.
            deadline: monotonic seconds; nothing goes on for longer.
        """
        self.has_sent = False
        self._answer = None
        connection = self._http
        if connection.sock is None:
            connection.timeout = max(0.001, min(CONNECT_SECONDS, deadline - time.monotonic()))
            connection.connect()
            sock = cast(socket.socket, connection.sock)
            if not isinstance(sock, ssl.SSLSocket):
                sock.settimeout(None)  # `limit_calls` takes over
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("content-length", str(body.nbytes))
        connection.response_class = functools.partial(  # type: ignore[assignment]
            Answer, deadline=deadline, read_seconds=self._read_seconds
        )
        try:
            self._limit_calls(deadline)
            connection.endheaders()
            self.has_sent = True
            for start in range(0, 0 if body is None else body.nbytes, _SLICE_BYTES):
                self._limit_calls(deadline)
                # `sendall` takes the whole slice within the limit or raises.
                connection.send(cast(memoryview, body)[start : start + _SLICE_BYTES])
        except (BrokenPipeError, ConnectionResetError):
            # A server may refuse before it has read the body: its answer says why.
            self.has_sent = True
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self._head()
            raise
        return self._head()

    def is_free(self) -> bool:
        """Return whether the last answer was read to its end, so that another may follow."""
        return self._answer is None or self._answer.isclosed()

    def is_dropped(self) -> bool:
        """Return whether the server has closed an idle connection (or sent what nobody asked)."""
        sock = self._http.sock
        if sock is None:
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        if not poll.poll(0):
            return False
        if not isinstance(sock, ssl.SSLSocket):
            return True
        try:
            # TLS itself may have sent something, such as a ticket for the next session.
            sock.settimeout(0)
            sock.recv(1)
        except ssl.SSLWantReadError:
            return False
        except OSError:
            pass
        return True

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _head(self) -> Answer:
        self._answer = cast(Answer, self._http.getresponse())
        return self._answer

    def _limit_calls(self, deadline: float) -> None:
        limit_calls(self._http.sock, min(deadline, time.monotonic() + self._read_seconds))


class Pool:
    """Connections to one server; each is lent to one thread at a time and used again."""

    def __init__(self, host: str, context: ssl.SSLContext | None, read_seconds: float):
        self._open = functools.partial(Connection, host, context, read_seconds)
        self._open().close()  # refuses an address that can not be
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    @contextlib.contextmanager
    def connection(self) -> Iterator[Connection]:
        """Lend a connection; it is kept if the block ends well and has read its answer."""
        connection = self._take()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            keep = self._process == os.getpid() and len(self._idle) < _MAX_IDLE
            keep = keep and connection.is_free()
            if keep:
                self._idle.append(connection)
        if not keep:
            connection.close()

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            idle, self._idle[:] = list(self._idle), []
        _close_all(idle)

    def _take(self) -> Connection:
        with self._lock:
            if self._process != os.getpid():
                # The parent of a fork goes on using these connections.
                self._idle.clear()
                self._process = os.getpid()
            while self._idle:
                connection = self._idle.pop()
                if not connection.is_dropped():
                    return connection
                connection.close()
        return self._open()


def _close_all(connections: list[Connection]) -> None:
    for connection in connections:
        connection.close()
