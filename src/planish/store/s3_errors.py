"""Failures of an S3 server in our words: which thing is wrong and who must change it.

No message holds a key, a signature or a signed URL.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime

import urllib3.exceptions
from minio.error import InvalidResponseError, MinioException, S3Error, ServerError

from planish.base.errors import (
    AccessRefused,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    PlanishError,
    StoreError,
    StoreUnavailable,
)
from planish.store.retry import FULL_CODES, TRANSIENT_ERRORS, passes

BAD_TOKEN = {"ExpiredToken", "InvalidToken", "InvalidTokenId"}
"""Said of temporary keys; a missing token is said so too."""
_SIGNED_AT_ANOTHER_TIME = {"Request has expired", "Request is not valid yet"}
"""What MinIO says of a signed URL when the clocks differ; its code is AccessDenied."""


@contextlib.contextmanager
def told(uri: str, bucket: str, endpoint: str) -> Iterator[None]:
    """Turn what the client raises about `uri` into our errors."""
    try:
        yield
    except S3Error as error:
        raise from_code(error, uri, bucket) from None
    except (ServerError, InvalidResponseError) as error:
        raise _from_strange_answer(error, endpoint) from None
    except TRANSIENT_ERRORS as error:
        raise StoreUnavailable(
            f"`MINIO_ENDPOINT` must be a server that answers, got {endpoint!r}: {_reason(error)}; "
            "start the server or correct the address"
        ) from None
    except urllib3.exceptions.HTTPError as error:
        raise ConfigError(
            f"`MINIO_ENDPOINT` {endpoint!r} can not be spoken to: {_reason(error)}; a plain server "
            "needs `MINIO_SECURE=0`, an own certificate authority `SSL_CERT_FILE`"
        ) from None
    except (MinioException, ValueError) as error:
        if isinstance(error, PlanishError):
            raise
        raise ConfigError(f"`{uri}` is not what an S3 server takes: {error}") from None


def from_code(error: S3Error, uri: str, bucket: str) -> PlanishError:
    """Return our error for an error document of S3."""
    code = error.code or "unknown"
    if code in {"NoSuchKey", "NoSuchVersion"}:
        return ObjectMissing(f"`{uri}` must be an object, but there is none")
    if code == "NoSuchBucket":
        return ConfigError(
            f"bucket {bucket!r} must exist, but the server has none of that name; "
            "create it or correct the URI"
        )
    if code == "InvalidAccessKeyId":
        return AccessRefused(
            "`MINIO_ACCESS_KEY` must be a key of the server, which knows no such key; "
            "correct the secret that sets it"
        )
    if code == "SignatureDoesNotMatch":
        return AccessRefused(
            "`MINIO_SECRET_KEY` must belong to `MINIO_ACCESS_KEY`, but the signature does not "
            "match; correct the secret that sets it"
        )
    if code in BAD_TOKEN:
        return bad_token(code)
    if code == "RequestTimeTooSkewed" or (error.message or "") in _SIGNED_AT_ANOTHER_TIME:
        return _skew(error)
    if code == "AccessDenied":
        return AccessRefused(
            f"`MINIO_ACCESS_KEY` must be allowed to use `{uri}`, but the server denies it; "
            "give the user a policy for this bucket"
        )
    if code == "PreconditionFailed":
        return ObjectExists(f"`{uri}` must not exist yet; another process has created it")
    if code in FULL_CODES:
        return StoreError(f"`{uri}` can not be written: the server is full ({code}); make room")
    if passes(error.response.status, code):
        return StoreUnavailable(f"`{uri}`: the server keeps answering {code}; try again later")
    return StoreError(f"`{uri}`: the server answers {code}: {error.message}")


def bad_token(code: str) -> AccessRefused:
    """Return our error for one of `BAD_TOKEN`."""
    return AccessRefused(
        "`MINIO_SESSION_TOKEN` must be a valid token of `MINIO_ACCESS_KEY`, but the server "
        f"answers {code}; ask the security token service for new keys"
    )


def _skew(error: S3Error) -> AccessRefused:
    theirs = error.response.headers.get("Date", "unknown")
    ours = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    return AccessRefused(
        "the clocks of this machine and of the server must agree within 15 minutes, "
        f"got {ours!r} here and {theirs!r} there; set the clock of this node"
    )


def _from_strange_answer(error: ServerError | InvalidResponseError, endpoint: str) -> PlanishError:
    status = int(getattr(error, "status_code", 0) or getattr(error, "_code", 0))
    if status >= 500:
        return StoreUnavailable(
            f"`MINIO_ENDPOINT` {endpoint!r} keeps answering HTTP {status}; try again later"
        )
    return ConfigError(
        f"`MINIO_ENDPOINT` must be the S3 port of a server, got {endpoint!r}, which answers HTTP "
        f"{status} without an S3 error; correct the address, or `MINIO_SECURE` (0 without TLS)"
    )


def _reason(error: Exception) -> str:
    if isinstance(error, urllib3.exceptions.NameResolutionError):
        return "its name does not resolve"
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "no connection (" + str(error).rpartition("] ")[2].lower() + ")"
    if isinstance(error, urllib3.exceptions.ConnectTimeoutError):
        return "no connection in time"
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return "no answer in time"
    cause = error.__cause__ or (error.args[-1] if error.args else None)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    if isinstance(error, urllib3.exceptions.SSLError):
        return "no trusted TLS connection"
    return type(error).__name__
