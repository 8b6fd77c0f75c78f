"""Child processes of this program, and JSON messages over the sockets to them.

A child begins a session of its own, so that its end also ends its descendants. Its standard input
is one end of a pair of sockets, over which both sides send one JSON object a line; nothing is
pickled. A child that is not trusted gets neither credentials nor the standard error of its parent,
and the size of its messages and every wait for them have limits.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""Variables that a child gets without trust; the keys of stores and hubs are not among them."""
MAX_BYTES = 1 << 30
"""Longest message of a child that is trusted."""
WATCH_SECONDS = 0.1
"""Interval between two checks of a watched child."""
_LONG_SECONDS = 60.0


class Channel:
    """One end of a socket with a JSON object in each line; any thread may send, one may receive.

    Attributes:
        files: descriptors that came with messages, in order; the receiver closes them.
        heard_s: monotonic seconds at which bytes came last.
    """

    def __init__(
        self,
        end: socket.socket,
        *,
        max_bytes: int = MAX_BYTES,
        max_files: int = 0,
        watch: Callable[[], str] | None = None,
    ) -> None:
        """Take over a stream socket.

        Args:
            end: the socket; it is closed with this object.
            max_bytes: size of a message from which on it is an error.
            max_files: number of descriptors that one message may bring.
            watch: returns the reason to end a wait early, or "".
        """
        end.setblocking(False)
        # Not by `close`: another thread may still wait at this descriptor.
        weakref.finalize(self, end.close)
        self._end, self._max_bytes, self._max_files = end, max_bytes, max_files
        self._watch = watch
        self._lock = threading.Lock()
        self._part = bytearray()
        self._lines: deque[bytearray] = deque()
        self.files: list[int] = []
        self.heard_s = time.monotonic()

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._end.fileno()

    def send(
        self,
        message: Mapping[str, object],
        seconds: float = math.inf,
        *,
        files: Sequence[int] = (),
    ) -> None:
        """Send one message, with some descriptors.

        Raises:
            TimeoutError: the other end does not read in time; no further message will arrive whole.
            OSError: the other end is gone.
        """
        left = memoryview(json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n")
        deadline = time.monotonic() + seconds
        with self._lock:
            while left:
                try:
                    sent = socket.send_fds(self._end, [left], files)
                except BlockingIOError:
                    if not self._is_ready(select.POLLOUT, deadline):
                        raise TimeoutError(f"a message was not read within {seconds:g} s") from None
                else:
                    left, files = left[sent:], ()

    def receive(self, seconds: float = math.inf) -> Message:
        """Return the next message.

        Raises:
            TimeoutError: no whole message in time.
            ConnectionError: the other end is closed.
            OSError: the message is too long or no JSON object, or `watch` has a reason.
        """
        if not self.has_message(seconds):
            raise TimeoutError(f"no message within {seconds:g} s")
        line = self._lines.popleft()
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise OSError(f"a message must be JSON, got {error}") from None
        if not isinstance(message, dict):
            raise OSError(f"a message must be an object, got {bytes(line[:80])!r}")
        return message

    def has_message(self, seconds: float = 0.0) -> bool:
        """Return whether a whole message has arrived within `seconds`; raises like `receive`."""
        deadline = time.monotonic() + seconds
        while not self._lines:
            if not self._is_ready(select.POLLIN, deadline):
                return False
            data, files, *_ = socket.recv_fds(self._end, 1 << 16, self._max_files)
            self.files += files
            if not data:
                raise ConnectionError("the other end has closed the connection")
            self.heard_s = time.monotonic()
            first, *others = data.split(b"\n")
            self._part += first
            if len(self._part) > self._max_bytes:
                raise OSError(f"a message of more than {self._max_bytes} bytes")
            for other in others:
                self._lines.append(self._part)
                self._part = bytearray(other)
            if not others:
                self._check_watch()
        return True

    def close(self) -> None:
        """End the connection for both sides, which wakes a waiting thread."""
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _is_ready(self, event: int, deadline: float) -> bool:
        """Wait until the socket can be used, at most until `deadline`."""
        longest = _LONG_SECONDS if self._watch is None else WATCH_SECONDS
        poll = select.poll()
        poll.register(self._end, event)
        while not poll.poll(1000 * max(0.0, min(deadline - time.monotonic(), longest))):
            self._check_watch()
            if time.monotonic() >= deadline:
                return False
        return True

    def _check_watch(self) -> None:
        if self._watch is not None and (reason := self._watch()):
            raise OSError(reason)


class Child:
    """A process and the channel to it.

    `process` is None if the other end is a thread, or a process that another machine has started.
    """

    def __init__(self, channel: Channel, process: subprocess.Popen[bytes] | None = None) -> None:
        self.channel, self._process = channel, process

    @property
    def pid(self) -> int:
        """Process id; 0 if no process runs."""
        return self._process.pid if self._process and self._process.poll() is None else 0

    def code(self, seconds: float = 0.0) -> int | None:
        """Return the exit code if the process ends within `seconds`, else None."""
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        return self._process.returncode

    def ask(self, request: Mapping[str, object] | None, seconds: float) -> Message:
        """Send a request, if there is one, and return the next message.

        A child that gives none is ended.

        Raises:
            TimeoutError: no message in time.
            OSError: the child ended, or sent what is no message.
        """
        deadline = time.monotonic() + seconds
        try:
            if request is not None:
                self.channel.send(request, seconds)
            return self.channel.receive(max(0.0, deadline - time.monotonic()))
        except ConnectionError:
            code = self.code(1.0)
            self.close()
            raise OSError(f"its process ended, exit code {code}") from None
        except OSError:
            self.close()
            raise

    def wait_ready(self, seconds: float) -> Message:
        """Return the first message of a child that is ready; it reads `{"outcome": "ready"}`.

        Raises:
            OSError: the child is not ready in time and was ended; the text is its reason.
        """
        try:
            message = self.ask(None, seconds)
        except TimeoutError:
            raise OSError(f"not ready within {seconds:g} s") from None
        if message.get("outcome") != "ready":
            self.close()
            raise OSError(str(message.get("error", "no reason")))
        return message

    def close(self, seconds: float = 0.0) -> int | None:
        """End the child and its descendants, by force after `seconds`; return the exit code."""
        self.channel.close()
        code = self.code(seconds)
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        return code


def start_child(
    command: Sequence[str],
    *,
    is_trusted: bool = False,
    environment: Mapping[str, str] | None = None,
    files: Sequence[int] = (),
    max_bytes: int = MAX_BYTES,
    watch: Callable[[], str] | None = None,
) -> Child:
    """Start a program whose standard input is the other end of the channel.

    Args:
        command: program and arguments.
        is_trusted: it gets all variables and the standard error of this process.
        environment: variables beside these, or beside `KEPT_ENVIRONMENT`.
        files: descriptors of this process that it gets under the same numbers.
        max_bytes: size of a message from which on it is an error.
        watch: returns the reason to end a wait for it early, or "".
    """
    kept = {k: v for k, v in os.environ.items() if is_trusted or k in KEPT_ENVIRONMENT}
    here, there = socket.socketpair()
    channel = Channel(here, max_bytes=max_bytes, watch=watch)
    with there:
        process = subprocess.Popen(
            command,
            stdin=there.fileno(),
            stdout=subprocess.DEVNULL,
            stderr=None if is_trusted else subprocess.DEVNULL,
            env={**kept, **(environment or {})},
            pass_fds=files,
            start_new_session=True,
        )
    return Child(channel, process)
