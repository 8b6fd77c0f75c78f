"""A child process that answers JSON lines within a time limit, or else is killed.

This module does not interpret requests; `own.py` and `isolated/` do. The child has its own session,
so that ending it also ends its descendants, and an environment without credentials.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

START_SECONDS = 120.0
"""Seconds in which a child must have imported its libraries."""
MAX_REPLY_BYTES = 65536
"""Longest reply in bytes; a longer reply counts as a crash."""
WATCH_SECONDS = 0.1
"""Seconds between two checks of a watched child."""
KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""Environment variables that a child gets; no keys of stores or hubs are among them."""


class ChildProcess:
    """A child process and the pipes to it.

    Args:
        command: program that writes `{"outcome": "ready"}` or `{"error": ...}`, then one JSON
            line for each JSON line that it reads.
        start_seconds: seconds in which it must become ready.
        environment: variables besides `KEPT_ENVIRONMENT`.
        max_reply_bytes: size limit of a reply.
        watch: returns the reason to end the child before it answers, or "".
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        start_seconds: float = START_SECONDS,
        environment: Mapping[str, str] | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        watch: Callable[[], str] | None = None,
    ) -> None:
        self._max_reply_bytes = max_reply_bytes
        self._watch = watch
        self._command = list(command)
        self._start_seconds = start_seconds
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self.ready: dict[str, Any] = {}
        """Message that the child sent when it became ready."""

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the child unless it runs.

        Raises:
            OSError: the child did not become ready and was ended; the message has the reason.
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        environment = {k: os.environ[k] for k in KEPT_ENVIRONMENT if k in os.environ}
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "OMP_NUM_THREADS": "1", **self._environment},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        try:
            reply = self._exchange(b"", self._start_seconds)
        except TimeoutError:
            reply = {"error": f"not ready within {self._start_seconds:g} s"}
        except (OSError, ValueError) as error:
            reply = {"error": str(error)}
        if reply.get("outcome") != "ready":
            self.close()
            raise OSError(str(reply.get("error", "no reply")))
        self.ready = reply

    def ask(self, request: Mapping[str, object], timeout_seconds: float) -> dict[str, Any]:
        """Send one request to the running child and return its reply.

        Raises:
            TimeoutError: there was no reply in time.
            OSError: the child ended or sent an invalid reply; it was ended.
        """
        try:
            return self._exchange(json.dumps(request).encode("ascii") + b"\n", timeout_seconds)
        except (OSError, ValueError) as error:
            self.close()
            raise error if isinstance(error, OSError) else OSError(str(error)) from None

    def close(self) -> None:
        """End the child and its descendants."""
        process, self._process, self._received = self._process, None, b""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _exchange(self, request: bytes, timeout_seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        unsent = memoryview(request)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if unsent:
                selector.register(process.stdin, selectors.EVENT_WRITE)
            while b"\n" not in self._received:
                left = max(deadline - time.monotonic(), 0.0)
                ready = selector.select(left if self._watch is None else min(left, WATCH_SECONDS))
                if fault := self._watch() if self._watch and not ready else "":
                    raise OSError(fault)
                if not ready and time.monotonic() >= deadline:
                    raise TimeoutError(f"no reply within {timeout_seconds:g} s")
                for key, _ in ready:
                    if key.fileobj is process.stdin:
                        unsent = unsent[os.write(process.stdin.fileno(), unsent[:65536]) :]
                        if not unsent:
                            selector.unregister(process.stdin)
                        continue
                    piece = os.read(process.stdout.fileno(), 65536)
                    if not piece:
                        with contextlib.suppress(subprocess.TimeoutExpired):
                            process.wait(1.0)
                        raise OSError(f"its process ended, exit code {process.poll()}")
                    self._received += piece
                    if len(self._received) > self._max_reply_bytes:
                        raise OSError(f"a reply of more than {self._max_reply_bytes} bytes")
        line, _, self._received = self._received.partition(b"\n")
        reply: Any = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError(f"a reply must be an object, got {line[:80]!r}")
        return reply
