"""Retry policy for requests to an S3 server.

It classifies failures as transient or not, whatever the request means: a failed condition is no
failure here.
"""

from __future__ import annotations

import logging
import math
import random
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, SSLError
from urllib3.exceptions import TimeoutError as LateError

from planish.base import telemetry
from planish.base.errors import StoreError

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_SECONDS = 60.0
"""Sum of the waits between the tries of a request, long enough for a server to restart."""
STRANGER_SECONDS = 3.0
"""The same sum while no S3 server has answered at the address yet."""
FIRST_WAIT_SECONDS = 0.1
"""Full jitter: the wait before try k + 1 is uniform in 0..min(10, 0.1 * 2**(k - 1))."""
LONGEST_WAIT_SECONDS = 10.0
_JITTER = random.Random()
"""Generator of the waits; a seed of the program leaves it alone."""

TRANSIENT_CODES = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "RequestTimeout", "InternalError"}
    | {"ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict"}
    | {"XMinioServerNotInitialized", "XMinioIAMNotInitialized"}
    | {"XAmzContentChecksumMismatch", "BadDigest", "IncompleteBody"}
)
"""Error codes after which the same request may succeed, under any HTTP status. Those of the last
line mean that a body was damaged in transit."""
FULL_CODES = frozenset({"XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded"})
"""Error codes of a full store, under any HTTP status; they stay until somebody frees space."""


def passes(status: int, code: str) -> bool:
    """Return whether the same request may succeed later.

    Args:
        status: HTTP status.
        code: code in the error document; empty without one.
    """
    if code in FULL_CODES:
        return False
    return status in {500, 502, 503, 504} or code in TRANSIENT_CODES


class Transient(Exception):
    """Error of a failed try; a later try may succeed."""

    def __init__(
        self,
        reason: str,
        text: str,
        *,
        sent: bool = True,
        answered: bool = False,
        last: StoreError | None = None,
        patience: float = math.inf,
    ):
        super().__init__(text)
        self.reason = reason
        """Key of the count: an HTTP status, an S3 code or the name of an error."""
        self.sent = sent
        """True if the server may have received, and carried out, the request."""
        self.answered = answered
        """True if the server has answered that it cannot serve the request now."""
        self.last = last
        """Error to raise after the last try, if it does not come from the server."""
        self.patience = patience
        """Limit on the waits in seconds, if it is lower than the general limit."""


@dataclass
class Tries:
    """The tries of one request.

    Example:
        >>> tries = Tries(Counter(), deadline=time.monotonic() + 5)
        >>> tries.run(lambda: "answer"), tries.count, tries.is_ambiguous
        ('answer', 1, False)
    """

    retries: Counter[str]
    """Retries by reason; each retry adds one."""
    deadline: float
    """End of all tries and waits, in seconds of the monotonic clock."""
    retry_seconds: float = RETRY_SECONDS
    """Limit on the sum of the waits; 0 allows one try. The tries themselves do not count: one may
    transfer gigabytes before it fails."""
    count: int = 0
    is_ambiguous: bool = False
    """True if the server may have carried out an earlier try that failed here."""

    def run(self, once: Callable[[], T]) -> T:
        """Call `once` until it returns; after the last try raise its `Transient` unchanged."""
        waited = 0.0
        while True:
            self.count += 1
            try:
                return once()
            except Transient as error:
                self.is_ambiguous |= error.sent
                wait = _JITTER.uniform(0.0, longest_wait(self.count))
                limit = min(self.retry_seconds, error.patience)
                if waited >= limit or time.monotonic() + wait >= self.deadline:
                    raise
                waited += wait
                self.retries[error.reason] += 1
                telemetry.count("planish_store_retries_total", scheme="s3")
                facts = telemetry.event(
                    "retrying", tries=self.count, reason=error.reason, wait_seconds=wait
                )
                logger.warning("%s", facts)
                time.sleep(wait)


def longest_wait(tries: int) -> float:
    """Return the upper bound of the wait after `tries` tries, in seconds.

    Example:
        >>> [longest_wait(k) for k in (1, 2, 7, 8)]
        [0.1, 0.2, 6.4, 10.0]
    """
    return float(min(LONGEST_WAIT_SECONDS, FIRST_WAIT_SECONDS * 2.0 ** min(tries - 1, 60)))


def transient(error: HTTPError) -> Transient | None:
    """Return the `Transient` for a connection error; None if a retry cannot help."""
    reason = _reason(error)
    if isinstance(error, SSLError) and not isinstance(reason, ssl.SSLEOFError):
        return None  # the handshake failed: a certificate, or no TLS at all
    is_unsent = isinstance(error, (NewConnectionError, ConnectTimeoutError))
    return Transient(type(reason).__name__, describe(error), sent=not is_unsent)


def describe(error: HTTPError) -> str:
    """Return the reason of a failed connection in a few words."""
    reason = _reason(error)
    if isinstance(reason, socket.gaierror):
        return "its name does not resolve"
    if isinstance(error, SSLError):
        return (
            f"no trusted TLS connection ({getattr(reason, 'reason', '') or type(reason).__name__})"
        )
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    # This check precedes that for urllib3's errors, which include a refused connection.
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror.lower()
    return "no answer in time" if isinstance(error, LateError) else type(reason).__name__


def _reason(error: HTTPError) -> BaseException:
    """Return the error that urllib3 has wrapped, else the error itself."""
    wrapped = [each for each in (error.__cause__, *error.args) if isinstance(each, Exception)]
    return wrapped[0] if wrapped else error
