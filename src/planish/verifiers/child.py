"""Mathematical equality in a child process that is killed when it does not answer in time.

The child is started at the first comparison and reused; it is started again after a kill or a
crash. The mathematics library is imported in the child only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""Time the child may take to import its libraries."""
MAX_REPLY_BYTES = 65536
"""A longer reply counts as a crash."""
MAX_START_FAILURES = 3
"""After so many failed starts in a row no further start is tried."""
CACHE_ROWS = 4096
"""Comparisons remembered: the responses of a group often share their answer."""

_COMMAND = (sys.executable, "-P", "-m", "planish.verifiers.math_child")
_KEPT_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")


class MathComparison(StrEnum):
    """Outcome of one comparison."""

    EQUAL = "equal"
    DIFFERENT = "different"
    TIMEOUT = "timeout"
    CRASH = "crash"


class MathChild:
    """One child process and the pipe to it; safe to use from several threads.

    Args:
        command: program that speaks the protocol of `planish.verifiers.math_child`.
        start_seconds: time it may take to become ready.
    """

    def __init__(
        self, command: Sequence[str] = _COMMAND, *, start_seconds: float = START_SECONDS
    ) -> None:
        self._command = list(command)
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._received = b""
        self._failures = 0
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], MathComparison] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return None if self._process is None else self._process.pid

    def compare(self, gold: str, target: str, *, timeout_seconds: float) -> MathComparison:
        """Tell whether `target` is mathematically equal to `gold`; never raises on their text."""
        with self._lock:
            key = (gold, target)
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            outcome = self._ask(gold, target, timeout_seconds)
            # A timeout is remembered too: the same text would only be killed again.
            if outcome is not MathComparison.CRASH:
                self._cache[key] = outcome
                if len(self._cache) > CACHE_ROWS:
                    self._cache.popitem(last=False)
            return outcome

    def close(self) -> None:
        """End the child."""
        process, self._process, self._received = self._process, None, b""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()

    def _ask(self, gold: str, target: str, timeout_seconds: float) -> MathComparison:
        if not self._start():
            return MathComparison.CRASH
        request = {"gold": gold, "target": target, "alarm_seconds": int(timeout_seconds) + 5}
        try:
            reply = self._exchange(json.dumps(request).encode() + b"\n", timeout_seconds)
        except TimeoutError:
            logger.warning("verifier timeout seconds=%g", timeout_seconds)
            self.close()
            return MathComparison.TIMEOUT
        except (OSError, ValueError) as error:
            logger.warning("verifier crash error=%r", error)
            self.close()
            return MathComparison.CRASH
        known = {"equal": MathComparison.EQUAL, "different": MathComparison.DIFFERENT}
        return known.get(str(reply.get("outcome")), MathComparison.CRASH)

    def _start(self) -> bool:
        if self._process is not None and self._process.poll() is None:
            return True
        self.close()
        if self._failures >= MAX_START_FAILURES:
            return False
        environment = {k: os.environ[k] for k in _KEPT_ENVIRONMENT if k in os.environ}
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**environment, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            reply = self._exchange(b"", self._start_seconds)
        except (OSError, ValueError) as error:
            reply = {"error": repr(error)}
        if reply.get("outcome") == "ready":
            self._failures = 0
            return True
        self._failures += 1
        logger.error(
            "verifier child did not start reason=%r; install the extra `planish[reward]`",
            reply.get("error", "no reply"),
        )
        self.close()
        return False

    def _exchange(self, request: bytes, timeout_seconds: float) -> dict[str, object]:
        """Write one line and read one line within the limit."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_seconds
        if request:
            process.stdin.write(request)
            process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError(f"no reply within {timeout_seconds} s")
                piece = os.read(process.stdout.fileno(), 4096)
                if not piece or len(self._received) > MAX_REPLY_BYTES:
                    raise OSError("the child ended or said too much")
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        reply = json.loads(line)
        if not isinstance(reply, dict):
            raise ValueError(f"a reply must be an object, got {line[:80]!r}")
        return reply


_shared: dict[int, MathChild] = {}
"""The child of this process, by process id: a fork must not share its parent's pipe."""


def shared_child() -> MathChild:
    """Return the child that all verifications of this process share."""
    pid = os.getpid()
    if pid not in _shared:
        _shared[pid] = MathChild()
        atexit.register(_shared[pid].close)
    return _shared[pid]


def compare(gold: str, target: str, *, timeout_seconds: float) -> MathComparison:
    """Compare in the shared child."""
    return shared_child().compare(gold, target, timeout_seconds=timeout_seconds)
