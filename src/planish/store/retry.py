"""HTTP requests that are sent again after named transient failures.

Every request of the S3 client passes here, so that one part of a large object is sent again
alone. Nothing here knows S3 operations.
"""

from __future__ import annotations

import logging
from typing import Any

import tenacity
import urllib3
from urllib3.exceptions import (
    NewConnectionError,
    ProtocolError,
    ProxyError,
    TimeoutError,
)
from urllib3.response import BaseHTTPResponse

from planish import telemetry

logger = logging.getLogger(__name__)

ATTEMPTS = 8
"""Tries of one request, the first included."""
FIRST_WAIT_SECONDS = 0.1
"""Full jitter: the wait before try k + 1 is uniform in 0..min(10, 0.1 * 2**k)."""
LONGEST_WAIT_SECONDS = 10.0

TRANSIENT_ERRORS = (NewConnectionError, ProtocolError, ProxyError, TimeoutError)
"""No connection, a broken one, no answer in time. Certificate errors are not among them."""
TRANSIENT_STATUSES = frozenset({500, 502, 503, 504})
_TRANSIENT_CODES = (
    b"<Code>RequestTimeout<",
    b"<Code>SlowDown",
    b"<Code>ConditionalRequestConflict<",
)


class TransientAnswer(Exception):
    """The server answered that it can not answer now."""

    def __init__(self, response: BaseHTTPResponse):
        super().__init__(f"HTTP status {response.status}")
        self.response = response


def policy(attempts: int, *errors: type[Exception]) -> tenacity.Retrying:
    """Return a policy that tries again after `errors`: full-jitter exponential waits.

    The last error is raised as it is.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(errors),
        stop=tenacity.stop_after_attempt(attempts),
        wait=tenacity.wait_random_exponential(FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
        before_sleep=_tell,
        reraise=True,
    )


def _tell(state: tenacity.RetryCallState) -> None:
    """Log and count a try that failed; no URL, since signed ones are secrets for an hour."""
    telemetry.count("planish_store_retries_total", scheme="s3")
    reason = type(state.outcome.exception()).__name__ if state.outcome else "unknown"
    wait = round(state.upcoming_sleep, 3)
    facts = telemetry.event(
        "retrying", tries=state.attempt_number, reason=reason, wait_seconds=wait
    )
    logger.warning("%s", facts)


class RetryingPool(urllib3.PoolManager):
    """A pool of connections that sends a request again when that may help."""

    def __init__(self, *, attempts: int = ATTEMPTS, **options: Any):
        super().__init__(retries=False, **options)
        self._attempts = attempts

    def urlopen(  # type: ignore[override]  # the base class allows any keyword
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> BaseHTTPResponse:
        """Send a request; the last answer comes back even when it is a transient one."""
        return self.send(method, url, redirect=redirect, **options)[0]

    def send(self, method: str, url: str, **options: Any) -> tuple[BaseHTTPResponse, int]:
        """Send a request and return the answer and how often it was sent."""
        tries = policy(self._attempts, *TRANSIENT_ERRORS, TransientAnswer)

        def once() -> BaseHTTPResponse:
            response = super(RetryingPool, self).urlopen(method, url, **options)
            if _is_transient(response):
                response.read(cache_content=True)
                raise TransientAnswer(response)
            return response

        try:
            answer = tries(once)
        except TransientAnswer as error:
            answer = error.response
        return answer, int(tries.statistics["attempt_number"])


def _is_transient(response: BaseHTTPResponse) -> bool:
    if response.status in TRANSIENT_STATUSES:
        return True
    if response.status not in {400, 409}:
        return False
    response.read(cache_content=True)
    return any(code in response.data for code in _TRANSIENT_CODES)
