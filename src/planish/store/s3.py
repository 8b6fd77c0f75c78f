"""Objects in buckets of MinIO or any other S3 server.

The only module that reads `MINIO_ENDPOINT`, `MINIO_ACCESS_KEY`, `MINIO_SECRET_KEY`,
`MINIO_SESSION_TOKEN` (of temporary keys), `MINIO_SECURE` (0 for a server without TLS),
`MINIO_REGION` and `MINIO_RETRY_SECONDS` (for how long a request that fails is sent again).
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO

import certifi
from minio import Minio
from minio.error import S3Error
from urllib3 import Timeout
from urllib3.response import BaseHTTPResponse

from planish.base import telemetry
from planish.base.errors import ConfigError, ObjectExists, ObjectMissing, StoreError
from planish.store.base import Address, parse_uri
from planish.store.retry import RETRY_SECONDS, TRANSIENT_ERRORS, RetryingPool, policy
from planish.store.s3_errors import told

CONNECT_SECONDS = 5.0
READ_SECONDS = 60.0
PART_BYTES = 16 << 20
"""Larger objects go up in parts of at least this size."""
_MAX_PARTS = 10_000
_PARALLEL_PARTS = 3
_READ_BYTES = 1 << 20
_LONGEST_RETRY_SECONDS = 86_400


@dataclass(frozen=True)
class Settings:
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
    """A request that fails is sent again until so much was waited; 0 for one try."""


def read_settings() -> Settings:
    """Read the settings from the environment.

    Raises:
        ConfigError: names every variable that is missing or wrong.
    """
    names = ("MINIO_ENDPOINT", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"{', '.join(f'`{name}`' for name in missing)} must be set to use s3:// URIs, got "
            "nothing; a cluster sets them from a secret"
        )
    secure = os.environ.get("MINIO_SECURE", "1")
    if secure not in {"0", "1"}:
        raise ConfigError(f"`MINIO_SECURE` must be 0 or 1, got {secure!r}")
    endpoint, access_key, secret_key = (os.environ[name] for name in names)
    if "/" in endpoint:
        raise ConfigError(
            f"`MINIO_ENDPOINT` must be `host:port` without a scheme or path, got {endpoint!r}; "
            "`MINIO_SECURE` chooses between http and https"
        )
    region = os.environ.get("MINIO_REGION", "us-east-1")
    token = os.environ.get("MINIO_SESSION_TOKEN", "")
    return Settings(
        endpoint, access_key, secret_key, secure == "1", region, token, _read_retry_seconds()
    )


def _read_retry_seconds() -> float:
    text = os.environ.get("MINIO_RETRY_SECONDS", str(RETRY_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _LONGEST_RETRY_SECONDS:
        raise ConfigError(
            f"`MINIO_RETRY_SECONDS` must be a number from 0 to {_LONGEST_RETRY_SECONDS}, got "
            f"{text!r}"
        )
    return seconds


@dataclass(frozen=True)
class _Connection:
    client: Minio
    pool: RetryingPool
    endpoint: str
    retry_seconds: float
    seen: set[str] = field(default_factory=set)
    """Buckets that are known to exist."""


@functools.lru_cache(maxsize=8)
def _connect(settings: Settings, _process: int) -> _Connection:
    """One client per process: connections must not be shared across a fork."""
    pool = RetryingPool(
        retry_seconds=settings.retry_seconds,
        timeout=Timeout(connect=CONNECT_SECONDS, read=READ_SECONDS),
        maxsize=10,
        cert_reqs="CERT_REQUIRED",
        ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
    )
    try:
        client = Minio(
            settings.endpoint,
            access_key=settings.access_key,
            secret_key=settings.secret_key,
            session_token=settings.session_token or None,
            secure=settings.secure,
            region=settings.region,
            http_client=pool,
        )
    except ValueError as error:
        raise ConfigError(
            f"`MINIO_ENDPOINT` must be `host:port`, got {settings.endpoint!r} ({error})"
        ) from None
    return _Connection(client, pool, settings.endpoint, settings.retry_seconds)


class S3Store:
    """`s3://bucket/key`."""

    def __init__(self, *, retry_seconds: float | None = None):
        """Take `retry_seconds` in place of what the environment says."""
        self._retry_seconds = retry_seconds

    def read(self, uri: str, start: int = 0, length: int | None = None) -> bytes:
        """Return at most `length` bytes from byte `start`."""
        if length == 0:
            self.size(uri)
            return b""
        data = bytearray()
        self._stream(uri, start, length, data.extend)
        return bytes(data)

    def write(self, uri: str, data: bytes) -> None:
        """Put an object in place as a whole."""
        self._put(uri, io.BytesIO(data), len(data))

    def create(self, uri: str, data: bytes) -> None:
        """Write an object only if there is none yet."""
        with self._use(uri) as (connection, address):
            # The client's own calls can not carry `If-None-Match`; a signed URL can.
            url = connection.client.get_presigned_url(
                "PUT", address.bucket, address.key, expires=timedelta(hours=1)
            )
            answer, tries = connection.pool.send(
                "PUT", url, body=data, headers={"If-None-Match": "*"}
            )
            if answer.status == 200:
                return
            if answer.status == 412:
                # A try whose answer was lost may have created the object.
                if tries > 1 and self.read(uri) == data:
                    return
                raise ObjectExists(f"`{uri}` must not exist yet; another process has created it")
            raise _s3_error(answer)

    def write_file(self, uri: str, path: Path) -> None:
        """Write an object from a local file of any size."""
        with open(path, "rb") as file:
            self._put(uri, file, os.fstat(file.fileno()).st_size)

    def read_file(self, uri: str, path: Path) -> None:
        """Copy an object of any size to a local file."""
        try:
            with open(path, "wb") as file:
                self._stream(uri, 0, None, file.write)
        except StoreError:
            path.unlink()
            raise

    def size(self, uri: str) -> int:
        """Return the number of bytes of an object."""
        with self._use(uri) as (connection, address):
            try:
                found = connection.client.stat_object(address.bucket, address.key)
            except S3Error as error:
                if error.code != "NoSuchKey" or address.bucket not in connection.seen:
                    _explain(connection, address)
                raise
            return int(found.size)

    def exists(self, uri: str) -> bool:
        """Return whether there is an object; a bucket is none, but must be there."""
        try:
            with self._use(uri, needs_key=False) as (connection, address):
                if not address.key:
                    _explain(connection, address)
                    return False
            self.size(uri)
        except ObjectMissing:
            return False
        return True

    def list(self, prefix_uri: str) -> list[str]:
        """Return the URIs of all objects below a folder, sorted."""
        address = parse_uri(prefix_uri)
        prefix = f"{address.key}/" if address.key else ""
        with self._use(prefix_uri, needs_key=False) as (connection, _):
            found = connection.client.list_objects(address.bucket, prefix=prefix, recursive=True)
            names = [str(item.object_name) for item in found]
        return sorted(f"s3://{address.bucket}/{n}" for n in names if not n.endswith("/"))

    def delete(self, uri: str) -> None:
        """Remove an object; an absent one is no error."""
        with self._use(uri) as (connection, address):
            connection.client.remove_object(address.bucket, address.key)

    def local_path(self, uri: str) -> None:
        """Objects of a bucket do not lie on this machine."""
        parse_uri(uri)

    @contextlib.contextmanager
    def _use(self, uri: str, *, needs_key: bool = True) -> Iterator[tuple[_Connection, Address]]:
        address = parse_uri(uri)
        if address.scheme != "s3" or (needs_key and not address.key):
            raise ConfigError(f"an S3 object must read `s3://bucket/key`, got {uri!r}")
        settings = read_settings()
        if self._retry_seconds is not None:
            settings = replace(settings, retry_seconds=self._retry_seconds)
        connection = _connect(settings, os.getpid())
        with told(uri, address.bucket, connection.endpoint):
            yield connection, address

    def _put(self, uri: str, content: BinaryIO, size: int) -> None:
        with self._use(uri) as (connection, address):
            try:
                connection.client.put_object(
                    address.bucket,
                    address.key,
                    content,
                    size,
                    part_size=max(PART_BYTES, -(-size // _MAX_PARTS)),
                    num_parallel_uploads=_PARALLEL_PARTS,
                )
            except S3Error as error:
                # The answer to the closing request of a multipart upload was lost, and the
                # second try finds the upload gone because the first had closed it.
                if error.code != "NoSuchUpload" or self.size(uri) != size:
                    raise
            telemetry.count("planish_store_written_bytes_total", size, scheme="s3")

    def _stream(
        self, uri: str, start: int, length: int | None, sink: Callable[[bytes], Any]
    ) -> None:
        """Hand the bytes to `sink`; a connection that breaks is taken up where it broke."""
        with self._use(uri) as (connection, address):
            reader = _Reader(connection.client, address, start, length, sink)
            try:
                policy(connection.retry_seconds, _Broken)(reader.go_on)
            except _Broken as broken:
                raise broken.reason from None
            except S3Error as error:
                if error.code == "PreconditionFailed":
                    raise StoreError(
                        f"`{uri}` must not change while it is read, but was replaced; read it again"
                    ) from None
                if error.code != "InvalidRange":
                    raise


class _Broken(Exception):
    """The body of an answer ended too early."""

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


@dataclass
class _Reader:
    """A read that remembers how far it came."""

    client: Minio
    address: Address
    start: int
    length: int | None
    sink: Callable[[bytes], Any]
    done: int = 0
    etag: str = ""

    def go_on(self) -> None:
        left = 0 if self.length is None else self.length - self.done
        if self.length is not None and left == 0:
            return
        response = self.client.get_object(
            self.address.bucket,
            self.address.key,
            offset=self.start + self.done,
            length=left,
            request_headers={"If-Match": self.etag} if self.etag else None,
        )
        try:
            self.etag = response.headers.get("ETag", "")
            for block in response.stream(_READ_BYTES):
                self.sink(block)
                self.done += len(block)
                telemetry.count("planish_store_read_bytes_total", len(block), scheme="s3")
        except TRANSIENT_ERRORS as error:
            response.close()
            raise _Broken(error) from None
        finally:
            response.release_conn()


def _explain(connection: _Connection, address: Address) -> None:
    """Raise why a HEAD request failed, if it is not the object: only a listing tells."""
    for _ in connection.client.list_objects(address.bucket, prefix=address.key):
        break
    connection.seen.add(address.bucket)


def _s3_error(answer: BaseHTTPResponse) -> Exception:
    if answer.data and "application/xml" in answer.headers.get("content-type", ""):
        found: Exception = S3Error.fromxml(answer)
        return found
    return StoreError(f"the server answers HTTP {answer.status} to a conditional write")
