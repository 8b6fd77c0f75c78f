"""Mathematical equality in a child process that is killed when it does not answer in time.

The child is started at the first comparison and reused; it is started again after a kill or a
crash. The mathematics library is imported in the child only.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum

from planish.verifiers.child_process import START_SECONDS, ChildProcess, python_module

logger = logging.getLogger(__name__)

MAX_START_FAILURES = 3
"""After so many failed starts in a row no further start is tried."""
CACHE_ROWS = 4096
"""Comparisons remembered: the responses of a group often share their answer."""


class MathComparison(StrEnum):
    """Outcome of one comparison, or of one search."""

    EQUAL = "equal"
    DIFFERENT = "different"
    FOUND = "found"
    TIMEOUT = "timeout"
    CRASH = "crash"


class MathChild:
    """One child process and the pipe to it; safe to use from several threads.

    Args:
        command: program that speaks the protocol of `planish.verifiers.math_child`; empty: it.
        start_seconds: time it may take to become ready.
    """

    def __init__(
        self, command: Sequence[str] = (), *, start_seconds: float = START_SECONDS
    ) -> None:
        command = command or python_module("planish.verifiers.math_child")
        self._process = ChildProcess(command, start_seconds=start_seconds)
        self._failures = 0
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, ...], tuple[MathComparison, str]] = OrderedDict()

    @property
    def pid(self) -> int | None:
        """Process id of the running child, or None."""
        return self._process.pid

    def compare(self, gold: str, target: str, *, timeout_seconds: float) -> MathComparison:
        """Tell whether `target` is mathematically equal to `gold`; never raises on their text."""
        return self._remember({"gold": gold, "target": target}, timeout_seconds)[0]

    def find_value(self, text: str, *, timeout_seconds: float) -> tuple[MathComparison, str]:
        """Return FOUND and the value that math-verify finds in `text`, empty where it has none.

        Any other outcome is TIMEOUT or CRASH; never raises on the text.
        """
        return self._remember({"text": text}, timeout_seconds)

    def _remember(self, asked: dict[str, str], seconds: float) -> tuple[MathComparison, str]:
        with self._lock:
            key = tuple(asked.values())
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            outcome = self._ask(asked, seconds)
            # A timeout is remembered too: the same text would only be killed again.
            if outcome[0] is not MathComparison.CRASH:
                self._cache[key] = outcome
                if len(self._cache) > CACHE_ROWS:
                    self._cache.popitem(last=False)
            return outcome

    def close(self) -> None:
        """End the child."""
        self._process.close()

    def _ask(self, asked: dict[str, str], timeout_seconds: float) -> tuple[MathComparison, str]:
        crash = (MathComparison.CRASH, "")
        if self._failures >= MAX_START_FAILURES:
            return crash
        try:
            self._process.start()
        except OSError as error:
            self._failures += 1
            logger.error(
                "verifier child did not start reason=%r; install the extra `planish[reward]`",
                str(error),
            )
            return crash
        self._failures = 0
        request = {**asked, "alarm_seconds": int(timeout_seconds) + 5}
        try:
            reply = self._process.ask(request, timeout_seconds)
        except TimeoutError:
            logger.warning("verifier timeout seconds=%g", timeout_seconds)
            return MathComparison.TIMEOUT, ""
        except OSError as error:
            logger.warning("verifier crash error=%r", str(error))
            return crash
        known = {kind.value: kind for kind in MathComparison}
        return known.get(str(reply.get("outcome")), crash[0]), str(reply.get("value", ""))


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


def find_value(text: str, *, timeout_seconds: float) -> tuple[MathComparison, str]:
    """Search in the shared child."""
    return shared_child().find_value(text, timeout_seconds=timeout_seconds)
