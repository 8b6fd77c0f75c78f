"""HTTP/1.1 connections that stay open, with a time limit on every step.

A body goes out of, and comes into, the memory of the caller without a copy. Nothing here knows S3
or retries.
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
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, cast

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
"""The longest wait for the head of an answer, and for each MiB of a body in either direction."""
_SLICE_BYTES = 1 << 20
_MAX_IDLE = 64


class _Timed(io.RawIOBase):
    """The receiving side of a socket, up to a moment."""

    def __init__(self, sock: socket.socket):
        self._inner = sock.makefile("rb", buffering=0)
        self._sock = sock
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, target: Any) -> int:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        self._sock.settimeout(left)
        return cast(io.RawIOBase, self._inner).readinto(target) or 0

    def close(self) -> None:
        self._inner.close()
        super().close()


class Answer(http.client.HTTPResponse):
    """An answer whose every read ends by a moment (monotonic seconds)."""

    def __init__(self, sock: socket.socket, *rest: Any, deadline: float, **options: Any):
        super().__init__(sock, *rest, **options)
        self.fp.close()
        self._timed = _Timed(sock)
        self._timed.deadline = deadline
        self.fp = io.BufferedReader(self._timed, 1 << 16)

    def until(self, deadline: float) -> None:
        """Move the moment by which reads must have ended."""
        self._timed.deadline = deadline


class Line:
    """One connection; of one thread at a time."""

    def __init__(self, host: str, context: ssl.SSLContext | None, read_seconds: float):
        self._http: http.client.HTTPConnection
        if context is None:
            self._http = http.client.HTTPConnection(host, timeout=CONNECT_SECONDS)
        else:
            self._http = http.client.HTTPSConnection(host, timeout=CONNECT_SECONDS, context=context)
        self._read_seconds = read_seconds
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
        line = self._http
        if line.sock is None:
            line.timeout = max(0.001, min(CONNECT_SECONDS, deadline - time.monotonic()))
            line.connect()
        line.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in headers.items():
            line.putheader(name, value)
        if body is not None:
            line.putheader("content-length", str(body.nbytes))
        try:
            self._limit(deadline)
            line.endheaders()
            self.has_sent = True
            for start in range(0, 0 if body is None else body.nbytes, _SLICE_BYTES):
                self._limit(deadline)
                # `sendall` takes the whole slice within the limit or raises.
                line.send(cast(memoryview, body)[start : start + _SLICE_BYTES])
        except (BrokenPipeError, ConnectionResetError):
            # A server may refuse before it has read the body: its answer says why.
            self.has_sent = True
            with contextlib.suppress(OSError, http.client.HTTPException):
                return self._answer(deadline)
            raise
        return self._answer(deadline)

    def read_into(self, answer: Answer, view: memoryview, deadline: float) -> int:
        """Fill `view` from the body; return how many bytes came, fewer when it ended early."""
        done = 0
        while done < view.nbytes:
            self._until(answer, deadline)
            count = answer.readinto(view[done : done + _SLICE_BYTES])
            if not count:
                break
            done += count
        return done

    def read_all(self, answer: Answer, limit: int, deadline: float) -> bytes | None:
        """Return the whole body, None if it has more than `limit` bytes."""
        blocks = bytearray()
        while True:
            self._until(answer, deadline)
            block = answer.read(_SLICE_BYTES)
            if not block:
                break
            blocks += block
            if len(blocks) > limit:
                return None
        if answer.length:
            raise http.client.IncompleteRead(b"", answer.length)
        return bytes(blocks)

    def is_dropped(self) -> bool:
        """Return whether the server has closed an idle connection (or sent what nobody asked)."""
        sock = self._http.sock
        if sock is None:
            return True
        poll = select.poll()
        poll.register(sock, select.POLLIN | select.POLLHUP | select.POLLERR)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _answer(self, deadline: float) -> Answer:
        moment = min(deadline, time.monotonic() + self._read_seconds)
        self._http.response_class = functools.partial(Answer, deadline=moment)  # type: ignore[assignment]
        return cast(Answer, self._http.getresponse())

    def _until(self, answer: Answer, deadline: float) -> None:
        answer.until(min(deadline, time.monotonic() + self._read_seconds))

    def _limit(self, deadline: float) -> None:
        left = min(self._read_seconds, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("no time left")
        self._http.sock.settimeout(left)


class Pool:
    """Connections to one server; each is lent to one thread at a time and used again."""

    def __init__(self, host: str, context: ssl.SSLContext | None, read_seconds: float):
        self._host = host
        self._context = context
        self._read_seconds = read_seconds
        self._lock = threading.Lock()
        self._idle: list[Line] = []
        self._process = os.getpid()
        weakref.finalize(self, _close_all, self._idle)

    @contextlib.contextmanager
    def line(self) -> Iterator[Line]:
        """Lend a connection; it is kept if the block ends well and has read its answer."""
        line = self._take()
        try:
            yield line
        except BaseException:
            line.close()
            raise
        with self._lock:
            keep = self._process == os.getpid() and len(self._idle) < _MAX_IDLE
            if keep:
                self._idle.append(line)
        if not keep:
            line.close()

    def close(self) -> None:
        """Close all idle connections."""
        with self._lock:
            found, self._idle[:] = list(self._idle), []
        for line in found:
            line.close()

    def _take(self) -> Line:
        with self._lock:
            if self._process != os.getpid():
                # The parent of a fork goes on using these connections.
                self._idle.clear()
                self._process = os.getpid()
            while self._idle:
                line = self._idle.pop()
                if not line.is_dropped():
                    return line
                line.close()
        return Line(self._host, self._context, self._read_seconds)


def _close_all(lines: list[Line]) -> None:
    for line in lines:
        line.close()
