"""HTTP requests that are sent again after named transient failures.

Every request of the S3 client passes here, so that one part of a large object is sent again
alone. Nothing here knows S3 operations.
"""

from __future__ import annotations

import logging
import re
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

from planish.base import telemetry

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""A request is sent again until so much was waited between its tries: a server may restart."""
FIRST_WAIT_SECONDS = 0.1
"""Full jitter: the wait before try k + 1 is uniform in 0..min(10, 0.1 * 2**k)."""
LONGEST_WAIT_SECONDS = 10.0

TRANSIENT_ERRORS = (NewConnectionError, ProtocolError, ProxyError, TimeoutError)
"""No connection, a broken one, no answer in time. Certificate errors are not among them."""
TRANSIENT_STATUSES = frozenset({500, 502, 503, 504})
TRANSIENT_CODES = frozenset(
    {"SlowDown", "SlowDownRead", "SlowDownWrite", "RequestTimeout", "InternalError"}
    | {"ServiceUnavailable", "OperationAborted", "ConditionalRequestConflict"}
    | {"XMinioServerNotInitialized", "XMinioIAMNotInitialized"}
)
"""Codes of S3 that pass, whatever their status."""
FULL_CODES = frozenset({"XMinioStorageFull", "QuotaExceeded", "XMinioAdminBucketQuotaExceeded"})
"""Codes of S3 that do not pass, whatever their status."""
_CODE = re.compile(rb"<Code>([^<]*)</Code>")


class TransientAnswer(Exception):
    """The server answered that it can not answer now."""

    def __init__(self, response: BaseHTTPResponse):
        super().__init__(f"HTTP status {response.status}")
        self.response = response


def policy(retry_seconds: float, *errors: type[Exception]) -> tenacity.Retrying:
    """Return a policy that tries again after `errors`: full-jitter exponential waits.

    Only waits count against `retry_seconds`, since a try may carry gigabytes before it fails; 0
    is one try. The last error is raised as it is.
    """
    return tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(errors),
        stop=lambda state: state.idle_for >= retry_seconds,
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

    def __init__(self, *, retry_seconds: float = RETRY_SECONDS, **options: Any):
        super().__init__(retries=False, **options)
        self._retry_seconds = retry_seconds

    def urlopen(  # type: ignore[override]  # the base class allows any keyword
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> BaseHTTPResponse:
        """Send a request; the last answer comes back even when it is a transient one."""
        return self.send(method, url, redirect=redirect, **options)[0]

    def send(self, method: str, url: str, **options: Any) -> tuple[BaseHTTPResponse, int]:
        """Send a request and return the answer and how often it was sent."""
        tries = policy(self._retry_seconds, *TRANSIENT_ERRORS, TransientAnswer)

        def once() -> BaseHTTPResponse:
            response = super(RetryingPool, self).urlopen(method, url, **options)
            if _is_transient(response):
                raise TransientAnswer(response)
            return response

        try:
            answer = tries(once)
        except TransientAnswer as error:
            answer = error.response
        return answer, int(tries.statistics["attempt_number"])


def _is_transient(response: BaseHTTPResponse) -> bool:
    if response.status not in TRANSIENT_STATUSES | {400, 409}:
        return False
    response.read(cache_content=True)
    found = _CODE.search(response.data or b"")
    return passes(response.status, found[1].decode("utf-8", "replace") if found else "")


def passes(status: int, code: str) -> bool:
    """Tell whether an error answer may be another one later.

    Args:
        status: of HTTP.
        code: of the error document; empty where there is none.
    """
    return code not in FULL_CODES and (status in TRANSIENT_STATUSES or code in TRANSIENT_CODES)
