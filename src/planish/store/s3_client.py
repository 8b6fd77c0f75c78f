"""Requests to an S3 server by the `minio` SDK, with retries.

The SDK provides credentials, addresses, signatures, listings, deletions and the parsing of answers.
This module sends every request of the SDK through its own urllib3 pool: the SDK would hash each
body, which has a checksum already, and keep each answer in memory. No message contains a key, a
signature or a token.
"""

from __future__ import annotations

import contextlib
import math
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlunsplit

import certifi
import urllib3
from minio import Minio
from minio.deleteobjects import DeleteError, DeleteResult
from minio.error import S3Error
from minio.signer import sign_v4_s3
from minio.time import to_amz_date, utcnow
from minio.xml import unmarshal

from planish.base.answers import bounded
from planish.base.errors import (
    AccessRefused,
    ObjectMissing,
    StoreError,
    StoreMisconfigured,
    StoreUnavailable,
)
from planish.store.keys import keys_of
from planish.store.retry import (
    FULL_CODES,
    RETRY_SECONDS,
    STRANGER_SECONDS,
    Transient,
    Tries,
    describe,
    passes,
    transient,
)

T = TypeVar("T")
Answer = urllib3.BaseHTTPResponse
Take = Callable[[Answer], T]
"""Function that reads the body of a successful answer."""

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
"""Longest wait for the head of an answer, and for each slice of a body in either direction."""
SLICE_BYTES = 1 << 20
"""Size of a slice of a body; `READ_SECONDS` apply to each slice."""
_HEAD_BYTES = 1000
"""Size of the start of a document that contains its first element."""
_MAX_IDLE = 64
_UNSIGNED = "UNSIGNED-PAYLOAD"
"""Value that marks a body as unsigned: it has a checksum, and SHA-256 would cost more time."""
_DOCUMENT_BYTES = 16 << 20
"""Size limit of an answer that is no object; a page of a listing has about one MiB."""
_ERROR_BYTES = 1 << 16
"""Number of bytes read from an error answer."""
_WITHOUT_CODE = {"HEAD": (400, 403, 404, 412)}
"""Statuses without an error code, beside that of a failed condition."""
_spoken: set[tuple[str, bool]] = set()
"""(Address, uses TLS) of each S3 server that has answered this process."""


_asked: ContextVar[Tries | None] = ContextVar("tries", default=None)
"""The current `Client.tries`; the SDK does not pass it on."""


@dataclass(frozen=True)
class S3Settings:
    """Address and credentials of the server."""

    endpoint: str
    access_key: str = field(repr=False)
    """Access key; empty selects AWS's sources: keys, a web identity or the role of a pod."""
    secret_key: str = field(repr=False)
    secure: bool
    region: str
    session_token: str = field(default="", repr=False)
    """Token of temporary keys from a security token service."""
    retry_seconds: float = RETRY_SECONDS
    """Limit on the sum of the waits between tries; 0 allows one try."""


class Refused(Exception):
    """Error of a server's answer that a retry cannot change."""

    action = ""
    """Right that the user's policy must grant for the request."""

    def __init__(self, status: int, code: str, message: str = ""):
        super().__init__(f"{code} (HTTP {status}): {message}" if code else f"HTTP {status}")
        self.status = status
        self.code = code


class Client(Minio):
    """One bucket of one server."""

    def __init__(
        self,
        settings: S3Settings,
        bucket: str,
        *,
        timeout_s: float,
        read_seconds: float = READ_SECONDS,
    ):
        self.retries: Counter[str] = Counter()
        self.bucket = bucket
        self.endpoint = settings.endpoint
        self._server = self.endpoint, settings.secure
        self._settings = settings
        self._timeout_s = timeout_s
        self.read_seconds = read_seconds
        self._seen_date = ("", 0.0)
        self._process = os.getpid()
        self._keys = keys_of(settings.access_key, settings.secret_key, settings.session_token)
        try:
            super().__init__(
                settings.endpoint,
                secure=settings.secure,
                region=settings.region,
                credentials=self._keys,
                http_client=_pool(),
            )
        except ValueError as error:
            raise StoreMisconfigured(
                f"`MINIO_ENDPOINT` must be `host:port`, got {settings.endpoint!r} ({error})"
            ) from None

    def call(
        self,
        method: str,
        key: str,
        take: Take[T],
        *,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        body: memoryview | bytes | None = None,
        handled: Collection[int] = (),
    ) -> T:
        """Send a request until it succeeds, and return the result of `take` on the answer.

        Args:
            method: GET, PUT, ...
            key: key of the object; empty for the bucket.
            take: reads a successful answer; a broken answer is retried.
            query: names and values of the query.
            headers: headers beside those of the signature; a function is called for each try.
            body: contiguous bytes.
            handled: HTTP statuses that raise Refused, because the caller handles them.

        Raises:
            StoreError: result of `error` for any other answer; StoreUnavailable if all tries have
                                failed.
        """
        tries = _asked.get() or self._new_tries()
        view = None if body is None else memoryview(body)

        limit = math.inf if method == "GET" and key else _DOCUMENT_BYTES

        def once() -> T:
            left = tries.deadline - time.monotonic()
            if left <= 0:
                raise Transient("TimeoutError", "no answer in time", sent=False)
            own = headers() if callable(headers) else headers or {}
            with bounded(left, limit):
                return self._send(method, key, take, query or {}, own, view, left)

        try:
            return tries.run(once)
        except Refused as refused:
            refused.action = _action(method, key, query or {})
            if refused.status in handled:
                raise
            raise self.error(refused, key) from None
        except Transient as error:
            if error.last is not None:
                raise error.last from None
            place, times = self.place(key), f"{tries.count} tries"
            if error.answered:
                raise StoreUnavailable(
                    f"{place} can not be reached after {times}: the server keeps answering "
                    f"{error}; try again later"
                ) from None
            raise StoreUnavailable(
                f"`MINIO_ENDPOINT` must be a server that answers, got {self.endpoint!r} "
                f"({times} for {place}): {error}; start the server or correct the address"
            ) from None

    def _url_open(
        self,
        method: str,
        region: str,
        bucket_name: str | None = None,
        object_name: str | None = None,
        body: bytes | None = None,
        headers: Any = None,
        query_params: Any = None,
        preload_content: bool = True,
        no_body_trace: bool = False,
    ) -> Answer:
        """Send a request of the SDK, in place of the SDK's own method."""
        query = query_params or {}
        return self.call(method, object_name or "", whole, query=query, headers=headers, body=body)

    @contextlib.contextmanager
    def tries(self) -> Iterator[Tries]:
        """Yield the tries of the single request that the block sends."""
        token = _asked.set(tries := self._new_tries())
        try:
            yield tries
        finally:
            _asked.reset(token)

    def _new_tries(self) -> Tries:
        deadline = time.monotonic() + self._timeout_s
        return Tries(self.retries, deadline, self._settings.retry_seconds)

    def place(self, key: str) -> str:
        """Return the name of a key in messages."""
        return f"`s3://{self.bucket}/{key}` at {self.endpoint!r}"

    def now(self) -> float:
        """Return the server's time: that of its last answer plus the time since then."""
        text, at = self._seen_date
        try:
            return parsedate_to_datetime(text).timestamp() + time.monotonic() - at
        except (TypeError, ValueError):
            return time.time()

    def _send(
        self,
        method: str,
        key: str,
        take: Take[T],
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        body: memoryview | None,
        seconds: float,
    ) -> T:
        if self._process != os.getpid():
            # After a fork the parent still uses the old connections.
            self._http, self._process = _pool(), os.getpid()
        url, signed = self._signed(method, key, query, headers, body)
        answer: Answer | None = None
        try:
            answer = self._http.urlopen(
                method,
                url,
                body=None if body is None else _slices(body),
                headers=signed,
                preload_content=False,
                redirect=False,
                retries=False,
                timeout=urllib3.Timeout(
                    connect=min(CONNECT_SECONDS, seconds), read=min(self.read_seconds, seconds)
                ),
            )
            self._seen_date = (answer.headers.get("Date", ""), time.monotonic())
            if answer.status < 300:
                taken = take(answer)
                _spoken.add(self._server)
                return taken
            page = urllib3.HTTPResponse(answer.read(_ERROR_BYTES))
        except urllib3.exceptions.HTTPError as error:
            raise transient(error) or StoreMisconfigured(
                f"`MINIO_ENDPOINT` {self.endpoint!r} (bucket {self.bucket!r}) can not be spoken "
                f"to: {describe(error)}; a plain server needs `MINIO_SECURE=0`, an own "
                "certificate authority `SSL_CERT_FILE`"
            ) from None
        finally:
            if answer is not None:
                # The next request must not read the rest of this answer.
                answer.close()
        code, message = error_of(page)
        code = code or answer.headers.get("x-minio-error-code", "")
        if passes(answer.status, code):
            raise Transient(
                code or str(answer.status), code or f"HTTP {answer.status}", answered=True
            )
        if code:
            _spoken.add(self._server)
        elif answer.status not in _WITHOUT_CODE.get(method, (412, 416)):
            raise self._stranger(answer.status)
        raise Refused(answer.status, code, message)

    def _stranger(self, status: int) -> Transient:
        """Return the failure for an answer that is not of S3: of a gateway, or a wrong address."""
        text = f"HTTP {status} without an S3 error"
        if self._server in _spoken:
            return Transient(str(status), text, answered=True)
        wrong = StoreMisconfigured(
            f"`MINIO_ENDPOINT` must be the S3 port of a server, got {self.endpoint!r}, which "
            f"answers {text} to a request for bucket {self.bucket!r}; correct the address, or "
            "`MINIO_SECURE` (0 without TLS)"
        )
        return Transient(str(status), text, last=wrong, patience=STRANGER_SECONDS)

    def _signed(
        self,
        method: str,
        key: str,
        query: Mapping[str, Any],
        headers: Mapping[str, str],
        body: memoryview | None,
    ) -> tuple[str, dict[str, str]]:
        keys = self._keys.retrieve()
        url = self._base_url.build(
            method=method,
            region=self._settings.region,
            bucket_name=self.bucket,
            object_name=key or None,
            query_params=dict(query),
        )
        now = utcnow()
        fields: dict[str, Any] = {
            **headers,
            "Host": url.netloc,
            "x-amz-content-sha256": _UNSIGNED,
            "x-amz-date": to_amz_date(now),
        }
        if body is not None:
            fields["Content-Length"] = str(body.nbytes)
        if keys.session_token:
            fields["x-amz-security-token"] = keys.session_token
        signed: Any = sign_v4_s3(
            method=method,
            url=url,
            region=self._settings.region,
            headers=fields,
            credentials=keys,
            content_sha256=_UNSIGNED,
            date=now,
        )
        return urlunsplit(url), signed

    def error(self, refused: Refused, key: str) -> StoreError:
        """Return our error for an answer, with the fault and the remedy."""
        code = refused.code if refused.code in _ERRORS else _CODE_OF_STATUS.get(refused.status, "")
        if not code:
            return StoreError(f"{self.place(key)}: the server answers {refused}")
        error, text = _ERRORS[code]
        return error(
            text.format(
                place=self.place(key),
                bucket=self.bucket,
                endpoint=self.endpoint,
                answer=refused.code or f"HTTP {refused.status}",
                action=refused.action,
                ours=utcnow().strftime("%a, %d %b %Y %H:%M:%S GMT"),
                theirs=self._seen_date[0],
            )
        )


def _pool() -> urllib3.PoolManager:
    return urllib3.PoolManager(
        maxsize=_MAX_IDLE,
        cert_reqs=ssl.CERT_REQUIRED,
        ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
    )


def _slices(body: memoryview) -> Iterator[memoryview]:
    """Yield a body in slices; `READ_SECONDS` limits the sending of each."""
    for start in range(0, body.nbytes, SLICE_BYTES):
        yield body[start : start + SLICE_BYTES]


_MISSING = (ObjectMissing, "{place} must be an object, but there is none ({answer})")
_FULL = (StoreError, "{place} can not be written: the server is full ({answer}); make room")
_BAD_TOKEN = (
    AccessRefused,
    "`MINIO_SESSION_TOKEN` must be a valid token of `MINIO_ACCESS_KEY`, but {place} answers "
    "{answer}; ask the security token service for new keys",
)
_ERRORS: dict[str, tuple[type[StoreError], str]] = {
    "NoSuchKey": _MISSING,
    "NoSuchVersion": _MISSING,
    "NoSuchUpload": _MISSING,
    **dict.fromkeys(FULL_CODES, _FULL),
    "NoSuchBucket": (
        StoreMisconfigured,
        "bucket {bucket!r} must exist, but the server {endpoint!r} has none of that name; create "
        "it or correct the URI",
    ),
    "InvalidBucketName": (
        StoreMisconfigured,
        "{place} is not what an S3 server takes ({answer}); correct the name of the bucket",
    ),
    "InvalidAccessKeyId": (
        AccessRefused,
        "`MINIO_ACCESS_KEY` must be a key of the server, which knows no such key or has disabled "
        "it ({place} answers {answer}); correct the secret that sets it and `MINIO_SECRET_KEY`",
    ),
    "SignatureDoesNotMatch": (
        AccessRefused,
        "`MINIO_SECRET_KEY` must belong to `MINIO_ACCESS_KEY`, but {place} answers {answer}; "
        "correct the secret that sets it",
    ),
    "ExpiredToken": _BAD_TOKEN,
    "InvalidToken": _BAD_TOKEN,
    "InvalidTokenId": _BAD_TOKEN,
    "RequestTimeTooSkewed": (
        AccessRefused,
        "the clocks of this machine and of the server must agree within 15 minutes, got {ours!r} "
        "here and {theirs!r} at {place}; set the clock of this node",
    ),
    "AccessDenied": (
        AccessRefused,
        "`MINIO_ACCESS_KEY` must be allowed {action} at {place}, but the server answers {answer}; "
        "give the user a policy for this bucket",
    ),
}
"""Meaning and remedy of each S3 error code; `retry` has the transient codes."""
_CODE_OF_STATUS = {
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    507: "XMinioStorageFull",
}
"""Error code for an HTTP status if the server's code is missing or unknown."""


def _action(method: str, key: str, query: Mapping[str, Any]) -> str:
    """Return the name of a request's action in a policy."""
    if "delete" in query:
        return "`s3:DeleteObject`"
    if not key:
        return "`s3:ListBucketMultipartUploads`" if "uploads" in query else "`s3:ListBucket`"
    if method in ("PUT", "POST"):
        return "`s3:PutObject`"
    if method == "DELETE":
        return "`s3:AbortMultipartUpload`"
    return "`s3:GetObject` (and `s3:ListBucket`: without it an absent object is forbidden too)"


def headers_of(answer: Answer) -> Mapping[str, str]:
    """Read an empty body to its end and return the headers."""
    answer.read(_ERROR_BYTES)
    return answer.headers


def whole(answer: Answer) -> Answer:
    """Read a document to its end; a document with HTTP 200 may still be an error."""
    answer.read(cache_content=True)
    try:
        code, message = _error_in(answer)
    except (SyntaxError, ValueError):
        raise Transient("ParseError", "the answer is no XML document") from None
    if passes(200, code):
        raise Transient(code, code, answered=True)
    if code:
        raise Refused(200, code, message)
    return answer


def error_of(answer: Answer) -> tuple[str, str]:
    """Return code and message of an error document; empty where there is none."""
    try:
        return _error_in(answer)
    except (SyntaxError, ValueError):
        return "", ""


def _error_in(answer: Answer) -> tuple[str, str]:
    """Return code and message of a document, or of the first key that it could not delete.

    Raises:
        SyntaxError, ValueError: the answer is no XML document.
    """
    if not answer.data:
        return "", ""
    found: S3Error | DeleteError = S3Error.fromxml(answer)
    if b"<DeleteResult" in answer.data[:_HEAD_BYTES]:
        faults = unmarshal(DeleteResult, answer.data.decode()).error_list
        found = faults[0] if faults else found
    return found.code or "", found.message or ""
