"""Signed requests to an S3 server, sent again where that may help, and its failures in our words.

No message holds a key, a signature or a token. Nothing here knows what objects are for.
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import http.client
import os
import re
import ssl
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import quote

import certifi

from planish.base.errors import (
    AccessRefused,
    ObjectMissing,
    StoreError,
    StoreMisconfigured,
    StoreUnavailable,
)
from planish.store.base import Counters
from planish.store.retry import (
    FULL_CODES,
    RETRY_SECONDS,
    Transient,
    Tries,
    describe,
    passes,
    transient,
)
from planish.store.wire import READ_SECONDS, Answer, Pool

T = TypeVar("T")
Take = Callable[[Answer], T]
"""Reads the body of a good answer."""

_ERROR_BYTES = 64 << 10
_PAGE_BYTES = 16 << 20
_UNSIGNED = "UNSIGNED-PAYLOAD"
"""A body is guarded by a checksum of its own; hashing it here would cost more than sending it."""


@dataclass(frozen=True)
class S3Settings:
    """How to reach the server."""

    endpoint: str
    """Host and port."""
    access_key: str = field(repr=False)
    secret_key: str = field(repr=False)
    secure: bool
    """Whether to speak TLS."""
    region: str
    session_token: str = field(default="", repr=False)
    """Of temporary keys that a security token service has given."""
    retry_seconds: float = RETRY_SECONDS
    """A request that fails is sent again until its waits come to this; 0 for one try."""


class Refused(Exception):
    """The server answered with an error that stays the same when the request is sent again."""

    def __init__(self, status: int, code: str, message: str = ""):
        super().__init__(f"{code} (HTTP {status}): {message}" if code else f"HTTP {status}")
        self.status = status
        self.code = code


class Client:
    """One bucket of one server."""

    def __init__(
        self,
        settings: S3Settings,
        bucket: str,
        *,
        timeout_s: float,
        read_seconds: float = READ_SECONDS,
    ):
        self.counters = Counters()
        self.bucket = bucket
        self.endpoint = settings.endpoint
        self._settings = settings
        self._timeout_s = timeout_s
        self._date = ("", 0.0)
        context = None
        if settings.secure:
            authorities = os.environ.get("SSL_CERT_FILE") or certifi.where()
            context = ssl.create_default_context(cafile=authorities)
        try:
            self.pool = Pool(settings.endpoint, context, read_seconds)
        except http.client.InvalidURL as error:
            raise StoreMisconfigured(
                f"`MINIO_ENDPOINT` must be `host:port`, got {settings.endpoint!r} ({error})"
            ) from None

    def call(
        self,
        kind: str,
        method: str,
        key: str,
        take: Take[T],
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        body: memoryview | bytes | None = None,
        tries: Tries | None = None,
        handled: Collection[int] = (),
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
            handled: HTTP statuses that the caller handles.

        Raises:
            Refused: an error answer of a status in `handled`.
            ObjectMissing: no such object or upload.
            AccessRefused: the credentials or the clock.
            StoreMisconfigured: no such bucket, not an S3 server, TLS.
            StoreUnavailable: all tries failed.
            StoreError: any other error answer.
        """
        tries = tries or self.tries()
        view = None if body is None else memoryview(body)

        def once() -> T:
            own = headers() if callable(headers) else headers or {}
            return self._send(kind, method, key, take, query or {}, own, view, tries.deadline)

        try:
            return tries.run(once)
        except Refused as refused:
            if refused.status in handled:
                raise
            raise self.error(refused, key) from None
        except Transient as error:
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

    def document(self, kind: str, method: str, key: str, **options: Any) -> ElementTree.Element:
        """Send a request and return its answer, a document without name spaces."""
        return self.call(kind, method, key, _document, **options)

    def tries(self) -> Tries:
        """Return tries for one request."""
        deadline = time.monotonic() + self._timeout_s
        return Tries(self.counters, deadline, self._settings.retry_seconds)

    def place(self, key: str) -> str:
        """Return a key as messages name it."""
        return f"`s3://{self.bucket}/{key}` at {self.endpoint!r}"

    def now(self) -> float:
        """Return the server's time of its last answer, moved on by our clock."""
        text, at = self._date
        try:
            return parsedate_to_datetime(text).timestamp() + time.monotonic() - at
        except (TypeError, ValueError):
            return time.time()

    def _send(
        self,
        kind: str,
        method: str,
        key: str,
        take: Take[T],
        query: Mapping[str, str],
        headers: Mapping[str, str],
        body: memoryview | None,
        deadline: float,
    ) -> T:
        path = quote(f"/{self.bucket}/{key}" if key else f"/{self.bucket}", safe="/-_.~")
        text = canonical_query(query)
        signed = sign(
            method,
            path,
            text,
            {"host": self.endpoint, **headers},
            self._settings,
            datetime.now(UTC),
        )
        self.counters.add(kind, sent=0 if body is None else body.nbytes)
        # Leaving the block by an error closes the connection, so nothing stale is read later.
        with self.pool.connection() as connection:
            try:
                target = f"{path}?{text}" if text else path
                answer = connection.request(method, target, signed, body, deadline)
                self._date = (answer.headers.get("Date", ""), time.monotonic())
                if answer.status < 300:
                    return take(answer)
                data = answer.read_whole(_ERROR_BYTES) or b""
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, StoreError):
                    raise
                broken = transient(error, sent=connection.has_sent)
                raise broken or StoreMisconfigured(
                    f"`MINIO_ENDPOINT` {self.endpoint!r} (bucket {self.bucket!r}) can not be "
                    f"spoken to: {describe(error)}; a plain server needs `MINIO_SECURE=0`, an own "
                    "certificate authority `SSL_CERT_FILE`"
                ) from None
        code = _tag(data, "Code") or answer.headers.get("x-minio-error-code", "")
        if passes(answer.status, code):
            raise Transient(
                code or str(answer.status), code or f"HTTP {answer.status}", answered=True
            )
        if not code and method != "HEAD":
            raise StoreMisconfigured(
                f"`MINIO_ENDPOINT` must be the S3 port of a server, got {self.endpoint!r}, which "
                f"answers HTTP {answer.status} without an S3 error to a request for bucket "
                f"{self.bucket!r}; correct the address, or `MINIO_SECURE` (0 without TLS)"
            )
        raise Refused(answer.status, code, _tag(data, "Message"))

    def error(self, refused: Refused, key: str) -> StoreError:
        """Return our error for an answer: which thing is wrong and who must change it."""
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
                ours=datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT"),
                theirs=self._date[0],
            )
        )


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
        "`MINIO_ACCESS_KEY` must be allowed to use {place}, but the server answers {answer}; give "
        "the user a policy for this bucket",
    ),
}
"""What an error code of S3 means and who must change what; see `retry` for those that pass."""
_CODE_OF_STATUS = {
    401: "AccessDenied",
    403: "AccessDenied",
    404: "NoSuchKey",
    507: "XMinioStorageFull",
}
"""The code to take an HTTP status for where the server's own is missing or unknown."""


def headers_of(answer: Answer) -> Mapping[str, str]:
    """Read an empty body away and return the headers."""
    answer.read_whole(_ERROR_BYTES)
    return dict(answer.headers.items())


def _document(answer: Answer) -> ElementTree.Element:
    data = answer.read_whole(_PAGE_BYTES)
    try:
        root = ElementTree.fromstring(data or b"")
    except ElementTree.ParseError:
        raise Transient("ParseError", "the answer is no XML document") from None
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
    failed = root if root.tag == "Error" else root.find("Error")
    if failed is not None:
        # Some answers begin with HTTP 200 before the server knows how they end.
        code = failed.findtext("Code") or ""
        if passes(200, code):
            raise Transient(code, code, answered=True)
        raise Refused(200, code, failed.findtext("Message") or "")
    return root


def _tag(data: bytes, name: str) -> str:
    """Return the first simple element of that name in an error document."""
    element = re.search(rf"<{name}>([^<]*)</{name}>".encode(), data)
    return element[1].decode("utf-8", "replace") if element else ""


def canonical_query(query: Mapping[str, str]) -> str:
    """Return a query string in the order and the escaping that are signed.

    Example:
        >>> canonical_query({"uploadId": "a/b", "partNumber": "2"})
        'partNumber=2&uploadId=a%2Fb'
    """
    pairs = sorted((quote(name, safe="-_.~"), quote(v, safe="-_.~")) for name, v in query.items())
    return "&".join(f"{name}={value}" for name, value in pairs)


def sign(
    method: str,
    path: str,
    query: str,
    headers: Mapping[str, str],
    settings: S3Settings,
    at: datetime,
) -> dict[str, str]:
    """Return the headers of a request whose body is not hashed, signed.

    Args:
        method: GET, PUT, ...
        path: escaped, from the first slash.
        query: as `canonical_query` makes it.
        headers: to be sent and signed; must hold `host`; names in lower case.
        settings: keys and region.
        at: time of signing.

    Source: AWS Signature Version 4 of a single request.
    """
    moment = at.strftime("%Y%m%dT%H%M%SZ")
    signed = {**headers, "x-amz-content-sha256": _UNSIGNED, "x-amz-date": moment}
    if settings.session_token:
        signed["x-amz-security-token"] = settings.session_token
    names = sorted(signed)
    lines = "".join(f"{name}:{' '.join(signed[name].split())}\n" for name in names)
    request = "\n".join([method, path, query, lines, ";".join(names), _UNSIGNED])
    scope = f"{moment[:8]}/{settings.region}/s3/aws4_request"
    digest = hashlib.sha256(request.encode()).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", moment, scope, digest])
    key = _signing_key(settings.secret_key, moment[:8], settings.region)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={settings.access_key}/{scope}, "
        f"SignedHeaders={';'.join(names)}, Signature={signature}"
    )
    return signed


@functools.lru_cache(maxsize=16)
def _signing_key(secret_key: str, day: str, region: str) -> bytes:
    key = b"AWS4" + secret_key.encode()
    for part in (day, region, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return key
