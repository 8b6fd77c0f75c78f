"""Verifiers of the user: each function runs in its own child process.

A function `(response, answer) -> number from 0 to 1` may have columns of the data row as further
parameters. Its name is `package.module:function` or an entry point of the group
`planish.verifiers`. A function may hang, raise, print, fork or return nonsense. That fails the row,
not the stage, until the errors exceed the caller's rate or the function has hung too often in a
row.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from planish.base.child import Child, start_child
from planish.base.errors import ConfigError, VerifierFailure
from planish.verifiers.verdict import Verdict, VerifierOptions, failed, timed_out

logger = logging.getLogger(__name__)

ENTRY_POINTS = "planish.verifiers"
"""Group of entry points: name -> `package.module:function`."""
START_SECONDS = 120.0
"""Time limit of a child to import its libraries."""
MAX_REPLY_BYTES = 65536
"""A longer reply counts as a crash."""
MAX_TIMEOUTS = 5
"""Number of calls in a row without an answer after which the verifier fails."""

_REFERENCE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", re.ASCII)


def is_reference(name: str) -> bool:
    """Return whether a name has the form `package.module:function`."""
    return _REFERENCE.fullmatch(name) is not None


@functools.cache
def installed_verifiers() -> Mapping[str, str]:
    """Return name -> `package.module:function` of the entry points of installed packages."""
    return {point.name: point.value for point in metadata.entry_points(group=ENTRY_POINTS)}


class OwnVerifier:
    """One function of the user and its child process; safe to use from several threads.

    `environment` has further variables for the child.

    Attributes:
        warnings: allowed mistakes of the function: it printed, it forked.
    """

    def __init__(
        self,
        reference: str,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.reference = reference
        self._environment = {"OMP_NUM_THREADS": "1", **(environment or {})}
        self._child: Child | None = None
        self._columns: tuple[str, ...] = ()
        self._lock = threading.RLock()
        self._num_timeouts = 0
        self._logged: set[str] = set()
        self.warnings: list[str] = []

    @property
    def pid(self) -> int:
        """Process id of the running child, or 0."""
        return 0 if self._child is None else self._child.pid

    def start(self) -> Child:
        """Import the function unless the child runs; return the child."""
        if self._child is not None and self._child.pid:
            return self._child
        self.close()
        # `-P`: modules beside the working directory are not the user's package.
        command = [sys.executable, "-P", "-m", "planish.verifiers.own_child", self.reference]
        self._child = start_child(command, environment=self._environment, max_bytes=MAX_REPLY_BYTES)
        try:
            ready = self._child.wait_ready(START_SECONDS)
        except OSError as error:
            raise ConfigError(
                f"verifier {self.reference!r} must be a function that can be called with "
                f"(response, answer), got: {error}"
            ) from None
        self._columns = tuple(ready["columns"])
        return self._child

    def columns(self) -> tuple[str, ...]:
        """Return the columns that are parameters of the function; raises like `start`."""
        self.start()
        return self._columns

    def ask(self, response: str, answer: str, seconds: float, extra: str = "") -> dict[str, Any]:
        """Return the child's reply: `score`, `value` (built-in functions only) or `error`.

        Raises:
            TimeoutError: no reply in time.
            OSError: the child ended or sent an invalid reply.
        """
        request = {"response": response, "answer": answer, "alarm_seconds": int(seconds) + 5}
        with self._lock:
            return self.start().ask(request | ({"extra": extra} if extra else {}), seconds)

    def __call__(
        self, response: str, answer: str, options: VerifierOptions, extra: str = ""
    ) -> Verdict:
        """Score one response; `extra` has columns of the data row, as a JSON object.

        Raises:
            ConfigError: the function is not callable.
            VerifierFailure: `MAX_TIMEOUTS` calls in a row had no answer.
        """
        with self._lock:
            seconds = options.timeout_seconds
            try:
                reply = self.ask(response, answer, seconds, extra)
            except TimeoutError:
                self._num_timeouts += 1
                if self._num_timeouts < MAX_TIMEOUTS:
                    return self._failed(f"did not answer within {seconds:g} s", timeout=True)
                raise VerifierFailure(
                    f"verifier {self.reference!r} must answer within {seconds:g} s, got no answer "
                    f"to {MAX_TIMEOUTS} calls in a row; mend it, or raise "
                    "`verifier_timeout_seconds` of the stage"
                ) from None
            except OSError as error:
                self._num_timeouts = 0
                return self._failed(f"did not survive a call: {error}")
            self._num_timeouts = 0
            if "printed" in reply:
                self._warn(f"printed {reply['printed']!r}; what it prints is dropped")
            if "forked" in reply:
                # Copies that still run would add up.
                self.close()
                self._warn("forked; the copies are ended with the child after each such call")
            if "error" in reply:
                # For built-in functions a late answer is the fault of the response; a user's may
                # wait for a server.
                is_late = "timeout" in reply and self.reference.startswith("planish.verifiers.")
                return self._failed(str(reply["error"]), timeout=is_late)
            score = float(reply["score"])
            return Verdict(accuracy=float(score == 1.0), score=score)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            self._child.close()

    def _failed(self, reason: str, *, timeout: bool = False) -> Verdict:
        self._log_once(reason)
        return (timed_out if timeout else failed)(reason=f"{self.reference} {reason}")

    def _warn(self, what: str) -> None:
        if self._log_once(what):
            self.warnings.append(what)

    def _log_once(self, what: str) -> bool:
        """Log each kind of message once; return whether this was the first of its kind."""
        kind = what[:12]
        is_first = kind not in self._logged
        self._logged.add(kind)
        if is_first:
            logger.warning("verifier name=%s %s", self.reference, " ".join(what.split()))
        return is_first


_shared: dict[tuple[int, str], OwnVerifier] = {}
"""The verifiers of this process, by process id: a fork must not share its parent's pipes."""


def shared_verifier(reference: str) -> OwnVerifier:
    """Return the verifier that all verifications of this process share."""
    key = (os.getpid(), reference)
    if key not in _shared:
        _shared[key] = OwnVerifier(reference)
        atexit.register(_shared[key].close)
    return _shared[key]
