"""Signed requests to an S3 server, with retries, and its failures in our words.

No message holds a key, a signature or a signed URL. Nothing here knows what objects are for.
"""

from __future__ import annotations

import functools
import http.client
import re
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import TypeVar
from urllib.parse import quote

from planish.base.errors import (
    AccessRefused,
    ObjectMissing,
    StoreError,
    StoreMisconfigured,
    StoreUnavailable,
)
from planish.checkpoint.storage.base import Counters
from planish.checkpoint.storage.retries import (
    Transient,
    Tries,
    reason,
    transient,
)
from planish.checkpoint.storage.sigv4 import canonical_query, sign
from planish.checkpoint.storage.wire import READ_SECONDS, Answer, Line, Pool
from planish.store.retry import FULL_CODES, passes
from planish.store.s3 import Settings
from planish.store.s3_errors import BAD_TOKEN, bad_token

T = TypeVar("T")
Take = Callable[[Line, Answer, float], T]
"""Reads the body of a good answer: line, answer, deadline."""

_ERROR_BYTES = 64 << 10
_DAMAGED = {"XAmzContentChecksumMismatch", "BadDigest", "IncompleteBody"}
"""The body changed on the way; sending it again may help."""


class Refused(Exception):
    """The server answered with an error that will not pass."""

    def __init__(self, status: int, code: str, message: str, date: str):
        super().__init__(f"HTTP {status} {code}: {message}")
        self.status = status
        self.code = code
        self.message = message
        self.date = date


class Client:
    """One bucket of one server."""

    def __init__(
        self,
        settings: Settings,
        bucket: str,
        *,
        timeout_s: float,
        read_seconds: float = READ_SECONDS,
    ):
        self.counters = Counters()
        self.bucket = bucket
        self.endpoint = settings.endpoint
        self._settings = settings
        token = settings.session_token
        self._token = {"x-amz-security-token": token} if token else {}
        self._timeout_s = timeout_s
        self._date = ("", 0.0)
        context = _tls() if settings.secure else None
        try:
            Line(settings.endpoint, context, read_seconds).close()
        except http.client.InvalidURL as error:
            raise StoreMisconfigured(
                f"`MINIO_ENDPOINT` must be `host:port`, got {settings.endpoint!r} ({error})"
            ) from None
        self.pool = Pool(settings.endpoint, context, read_seconds)

    def call(
        self,
        kind: str,
        method: str,
        key: str,
        take: Take[T],
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        body: memoryview | None = None,
        tries: Tries | None = None,
    ) -> T:
        """Send a request until it succeeds, and return what `take` makes of the answer.

        Args:
            kind: for the counters.
            method: GET, PUT, ...
            key: of the object; empty for the bucket.
            take: called with each good answer; what breaks in it is retried.
            query: names and values.
            headers: besides those of the signature; a function is called for each try.
            body: contiguous bytes.
            tries: to learn how it went; None makes them.

        Raises:
            Refused: an error answer that will not pass.
            AccessRefused: the credentials or the clock.
            StoreMisconfigured: no such bucket, not an S3 server, TLS.
            StoreUnavailable: all tries failed.
        """
        tries = tries or self.tries()
        once = functools.partial(
            self._once, kind, method, key, take, query or {}, headers or {}, body, tries.deadline
        )
        try:
            return tries.run(once)
        except Transient as error:
            raise StoreUnavailable(
                f"{self.place(key)} can not be reached ({tries.count} tries): {error}; start the "
                "server, correct `MINIO_ENDPOINT`, or try again later"
            ) from None

    def tries(self) -> Tries:
        """Return tries for one request."""
        deadline = time.monotonic() + self._timeout_s
        return Tries(self.counters, deadline, self._settings.retry_seconds)

    def place(self, key: str) -> str:
        """Return a key as messages name it."""
        return f"`s3://{self.bucket}/{key}` at {self.endpoint!r}"

    def error(self, refused: Refused, key: str) -> Exception:
        """Return our error for an answer that is not one of a condition."""
        place, code = self.place(key), refused.code
        if refused.status == 404 and code in {"", "NoSuchKey", "NoSuchVersion", "NoSuchUpload"}:
            return ObjectMissing(f"{place} must be there, but is not ({code or 'HTTP 404'})")
        if code in FULL_CODES or refused.status == 507:
            return StoreError(f"{place} can not be written: the server is full ({code}); make room")
        return StoreError(f"{place}: the server answers {refused}")

    def now(self) -> float:
        """Return the server's time of its last answer, moved on by our clock."""
        text, at = self._date
        try:
            return parsedate_to_datetime(text).timestamp() + time.monotonic() - at
        except (TypeError, ValueError):
            return time.time()

    def _once(
        self,
        kind: str,
        method: str,
        key: str,
        take: Take[T],
        query: Mapping[str, str],
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]],
        body: memoryview | None,
        deadline: float,
    ) -> T:
        own = headers() if callable(headers) else headers
        path = f"/{self.bucket}" + (f"/{quote(key, safe='/-_.~')}" if key else "")
        text = canonical_query(query)
        settings = self._settings
        signed = sign(
            method,
            path,
            text,
            {"host": settings.endpoint, **self._token, **own},
            access_key=settings.access_key,
            secret_key=settings.secret_key,
            region=settings.region,
        )
        self.counters.add(kind, sent=0 if body is None else body.nbytes)
        target = f"{path}?{text}" if text else path
        # Leaving the block by an error closes the connection, so nothing stale is read later.
        with self.pool.line() as line:
            try:
                answer = line.request(method, target, signed, body, deadline)
                self._date = (answer.headers.get("Date", ""), time.monotonic())
                if answer.status < 300:
                    return take(line, answer, deadline)
                data = line.read_all(answer, _ERROR_BYTES, deadline) or b""
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, StoreError):
                    raise
                raise self._broken(error, line) from None
        raise self._refusal(answer, data)

    def _broken(self, error: Exception, line: Line) -> Exception:
        found = transient(error, sent=line.has_sent)
        if found is not None:
            return found
        return StoreMisconfigured(
            f"`MINIO_ENDPOINT` {self.endpoint!r} (bucket {self.bucket!r}) can not be spoken to: "
            f"{reason(error)}; a plain server needs `MINIO_SECURE=0`, an own certificate "
            "authority `SSL_CERT_FILE`"
        )

    def _refusal(self, answer: Answer, data: bytes) -> Exception:
        code = _tag(data, "Code") or answer.headers.get("x-minio-error-code", "")
        message = _tag(data, "Message")
        status, endpoint, bucket = answer.status, self.endpoint, self.bucket
        if passes(status, code) or code in _DAMAGED:
            return Transient(code or str(status), f"HTTP {status} {code}")
        if code == "NoSuchBucket":
            return StoreMisconfigured(
                f"bucket {bucket!r} must exist, but the server {endpoint!r} has none of that name; "
                "create it or correct the URI"
            )
        if code == "RequestTimeTooSkewed":
            return AccessRefused(
                f"the clocks of this machine and of {endpoint!r} must agree within 15 minutes, got "
                f"{answer.headers.get('Date', 'unknown')!r} there; set the clock of this node"
            )
        if code in BAD_TOKEN:
            return bad_token(code)
        if status in {401, 403}:
            return AccessRefused(
                f"`MINIO_ACCESS_KEY` and `MINIO_SECRET_KEY` must be allowed to use bucket "
                f"{bucket!r} of {endpoint!r}, but the server answers {code or status}; correct "
                "the secret that sets them"
            )
        if not code and status != 404 and b"<Error>" not in data and status not in {412, 416, 507}:
            return StoreMisconfigured(
                f"`MINIO_ENDPOINT` must be the S3 port of a server, got {endpoint!r}, which "
                f"answers HTTP {status} without an S3 error to a request for bucket {bucket!r}; "
                "correct the address, or `MINIO_SECURE` (0 without TLS)"
            )
        return Refused(status, code, message, answer.headers.get("Date", ""))


def drained(line: Line, answer: Answer, deadline: float) -> Mapping[str, str]:
    """Read an empty body away and return the headers."""
    line.read_all(answer, _ERROR_BYTES, deadline)
    return dict(answer.headers.items())


def _tag(data: bytes, name: str) -> str:
    """Return the first simple element of that name in an error document."""
    found = re.search(rf"<{name}>([^<]*)</{name}>".encode(), data)
    return found[1].decode("utf-8", "replace") if found else ""


def _tls() -> ssl.SSLContext:
    import os

    import certifi

    return ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE") or certifi.where())
