"""Objects in a bucket of MinIO or another S3 server.

Each body has a CRC-32C that the server checks, so damaged bodies are sent again. Conditional
writes are those of S3 itself (`If-None-Match`, `If-Match`).

This is the only module that reads `MINIO_ENDPOINT`, `MINIO_ACCESS_KEY`, `MINIO_SECRET_KEY`,
`MINIO_SESSION_TOKEN` (of temporary keys), `MINIO_SECURE` (0 for a server without TLS),
`MINIO_REGION` and `MINIO_RETRY_SECONDS` (limit of the retries of a failed request). Without these
keys it takes those of AWS, if the environment names any.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from xml.sax.saxutils import escape

import google_crc32c
import numpy as np
from minio.datatypes import CompleteMultipartUploadResult, Object
from minio.deleteobjects import DeleteObject
from minio.helpers import check_bucket_name

from planish.base.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
    StoreMisconfigured,
)
from planish.base.telemetry import redact
from planish.store.base import (
    TIMEOUT_SECONDS,
    Buffer,
    Folder,
    Stat,
    Upload,
    check_key,
    key_prefix,
    part_bytes,
)
from planish.store.keys import has_aws_keys
from planish.store.retry import RETRY_SECONDS, Transient
from planish.store.s3_client import (
    READ_SECONDS,
    SLICE_BYTES,
    Answer,
    Client,
    Refused,
    S3Settings,
    headers_of,
    whole,
)

_LONGEST_RETRY_SECONDS = 86_400
_REMOVED = b"removed by planish\n"
"""Bytes that mark a removed object: MinIO checks conditions of writes, not of deletions."""
_REMOVED_TAG = f'"{hashlib.md5(_REMOVED, usedforsecurity=False).hexdigest()}"'
_HAS_CRC32C = google_crc32c.implementation == "c"


def connect(bucket: str, *, timeout_s: float = TIMEOUT_SECONDS) -> S3Store:
    """Return the store of a bucket at the server that the environment names.

    Raises:
        StoreMisconfigured: settings are missing or invalid.
    """
    return _connect(read_settings(), bucket, timeout_s, os.getpid())


@functools.lru_cache(maxsize=8)
def _connect(settings: S3Settings, bucket: str, timeout_s: float, _process: int) -> S3Store:
    return S3Store(settings, bucket, timeout_s=timeout_s)


def read_settings() -> S3Settings:
    """Read the settings from the environment.

    Raises:
        StoreMisconfigured: a variable is missing or wrong; the message names it.
    """
    names = ("MINIO_ENDPOINT", "MINIO_ACCESS_KEY", "MINIO_SECRET_KEY")
    endpoint, access_key, secret_key = values = [os.environ.get(name, "") for name in names]
    comes_from_aws = not access_key and has_aws_keys()
    needed = zip(names, values, strict=True)
    missing = [n for n, value in needed if not value and not (comes_from_aws and n != names[0])]
    if missing:
        raise StoreMisconfigured(
            f"{', '.join(f'`{name}`' for name in missing)} must be set to use s3:// URIs, got "
            "nothing; a cluster sets them from a secret"
        )
    secure = os.environ.get("MINIO_SECURE", "1")
    if secure not in {"0", "1"}:
        raise StoreMisconfigured(f"`MINIO_SECURE` must be 0 or 1, got {secure!r}")
    if "/" in endpoint or "@" in endpoint:
        user, mark, host = endpoint.rpartition("@")
        raise StoreMisconfigured(
            "`MINIO_ENDPOINT` must be `host:port` without a scheme, path or user, got "
            f"{'***' * bool(user) + mark + host!r}; `MINIO_SECURE` chooses between http and https, "
            "and `MINIO_ACCESS_KEY` and `MINIO_SECRET_KEY` say who asks"
        )
    text = os.environ.get("MINIO_RETRY_SECONDS", str(RETRY_SECONDS))
    try:
        retry_seconds = float(text)
    except ValueError:
        retry_seconds = -1.0
    if not 0 <= retry_seconds <= _LONGEST_RETRY_SECONDS:
        raise StoreMisconfigured(
            f"`MINIO_RETRY_SECONDS` must be a number from 0 to {_LONGEST_RETRY_SECONDS}, got "
            f"{text!r}"
        )
    return S3Settings(
        endpoint,
        access_key,
        secret_key,
        secure=secure == "1",
        region=os.environ.get("MINIO_REGION", "us-east-1"),
        session_token=os.environ.get("MINIO_SESSION_TOKEN", ""),
        retry_seconds=retry_seconds,
    )


class S3Store:
    """Store of `s3://bucket/key`, with its own pool of connections."""

    in_memory = False

    def __init__(
        self,
        settings: S3Settings,
        bucket: str,
        *,
        timeout_s: float = TIMEOUT_SECONDS,
        read_seconds: float = READ_SECONDS,
    ):
        try:
            check_bucket_name(bucket)
        except ValueError:
            raise StoreMisconfigured(
                f"`{redact(f's3://{bucket}')}` is not what an S3 server takes; correct the name of "
                "the bucket"
            ) from None
        self._client = Client(settings, bucket, timeout_s=timeout_s, read_seconds=read_seconds)
        self.retries = self._client.retries

    def uri(self, key: str) -> str:
        """Return `s3://bucket/key`."""
        return f"s3://{self._client.bucket}/{key}"

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole."""
        view = memoryview(data).cast("B")
        headers = {**_condition(if_none_match, if_match), **_checksum(view)}
        try:
            with self._client.tries() as tries:
                answer = self._client.call(
                    "PUT",
                    check_key(key),
                    headers_of,
                    headers=headers,
                    body=view,
                    handled={412},
                )
        except Refused:
            # An earlier try without an answer may have written the present object.
            etag = self._tag_of_same(key, view) if tries.is_ambiguous else ""
            if etag:
                return etag
            if if_none_match:
                with contextlib.suppress(ObjectChanged, ObjectMissing):
                    return self.put(key, view, if_match=_REMOVED_TAG)
            raise _unmet(self._client.place(key), if_match) from None
        return answer.get("ETag", "")

    def open_multipart(self, key: str, size: int) -> S3Multipart:
        """Start to write an object in parts."""
        headers: dict[str, Any] = {"x-amz-checksum-algorithm": "CRC32C"} if _HAS_CRC32C else {}
        with self._client.tries() as tries:
            upload_id = self._client._create_multipart_upload(
                self._client.bucket, check_key(key), headers
            )
        return S3Multipart(self, self._client, key, upload_id, part_bytes(size), tries.is_ambiguous)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload."""
        with contextlib.suppress(ObjectMissing):
            self._client._abort_multipart_upload(self._client.bucket, check_key(key), upload_id)

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the uploads of a key; MinIO lists them by exact key only."""
        found = self._client._list_multipart_uploads(self._client.bucket, prefix=check_key(key))
        return [
            Upload(item.upload_id or "", _moment(item.initiated_time))
            for item in found.uploads
            if item.object_name == key
        ]

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` from an object; resume a broken read where it broke."""
        view = target.cast("B")
        if not view.nbytes:
            present = self.head(key).etag
            if etag and present != etag:
                raise _unmet(self._client.place(key), etag)
            return
        download = _Download(self._client, check_key(key), offset, view.nbytes, view, etag)
        download.run()
        if download.done < view.nbytes:
            raise StoreError(
                f"{self._client.place(key)} must have {offset + view.nbytes} bytes, got fewer"
            )

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return a range of an object, up to its end."""
        if length == 0:
            self.head(key)
            return b""
        download = _Download(self._client, check_key(key), start, length)
        download.run()
        return bytes(download.target or b"")

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole object; after a broken read, start again with the current object."""
        download = _Download(self._client, check_key(key), 0, None, limit=limit)
        download.run()
        return bytes(download.target or b""), download.etag

    def head(self, key: str) -> Stat:
        """Return the metadata of an object."""
        try:
            headers = self._client.call(
                "HEAD",
                check_key(key),
                lambda answer: headers_of(_present(answer)),
                handled={400, 403, 404},
            )
        except Refused as refused:
            if not refused.code:
                # The answer has no body, and some servers do not name the code in a header.
                first = next(self._items(key, recursive=False), None)
                if first and first.object_name == key and refused.status == 404:
                    return _stat(first)  # the 404 is of a gateway
            raise self._client.error(refused, key) from None
        modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
        return Stat(key, int(headers["Content-Length"]), headers.get("ETag", ""), modified)

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every object below a folder."""
        for item in self._items(key_prefix(folder)):
            if not item.is_dir:
                yield _stat(item)

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder."""
        direct = Folder([], [])
        prefix = key_prefix(folder)
        for item in self._items(prefix, recursive=False):
            if not item.is_dir:
                direct.objects.append(_stat(item))
            elif item.object_name != prefix:
                direct.folders.append((item.object_name or "").rstrip("/"))
        direct.folders.sort()  # the server sorts them with their slash
        return direct

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, up to 1,000 per request."""
        named = (DeleteObject(check_key(key)) for key in keys)
        for _ in self._client.remove_objects(self._client.bucket, named):
            pass  # a key that cannot be removed fails its request

    def delete_exact(self, key: str, etag: str) -> bool:
        """Replace an unchanged object by `_REMOVED`, which every method treats as no object."""
        try:
            tag = self.put(key, _REMOVED, if_match=etag)
        except (ObjectChanged, ObjectMissing):
            return False
        if tag != _REMOVED_TAG:
            # The tag is no MD5, so this is AWS with SSE-KMS, which checks conditions of deletions.
            with contextlib.suppress(Refused):
                condition = _condition(False, tag)
                self._client.call("DELETE", key, headers_of, headers=condition, handled={412})
        return True

    def tidy(self, folder: str) -> None:
        """Remove the marks of `delete_exact`."""
        items = self._items(key_prefix(folder), removed=True)
        self.delete(item.object_name or "" for item in items)

    def now(self) -> float:
        """Return the time of the server."""
        return self._client.now()

    def _items(
        self, prefix: str, *, recursive: bool = True, removed: bool = False
    ) -> Iterator[Object]:
        items = self._client.list_objects(self._client.bucket, prefix=prefix, recursive=recursive)
        return (item for item in items if (f'"{item.etag}"' == _REMOVED_TAG) == removed)

    def _tag_of_same(self, key: str, view: memoryview) -> str:
        """Return the entity tag of an object that has exactly these bytes, else ""."""
        try:
            content, etag = self.get(key, view.nbytes)
        except ObjectMissing:
            return _REMOVED_TAG if view == _REMOVED else ""
        except ObjectTooLarge:
            return ""
        return etag if content == view else ""


@dataclass(eq=False)
class S3Multipart:
    """An upload in parts of `S3Store`."""

    _store: S3Store
    _client: Client
    key: str
    upload_id: str
    part_bytes: int
    may_be_begun_twice: bool
    _parts: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Entity tag and CRC-32C of each part that is written."""

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write one part."""
        view = memoryview(data).cast("B")
        checksum = _checksum(view, crc32c)
        query = {"partNumber": str(number), "uploadId": self.upload_id}
        answer = self._client.call(
            "PUT", self.key, headers_of, query=query, headers=checksum, body=view
        )
        self._parts[number] = (answer.get("ETag", ""), "".join(checksum.values()))

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Make the object visible."""
        parts = sorted(self._parts.items())
        rows = []
        for number, (etag, crc32c) in parts:
            crc = f"<ChecksumCRC32C>{crc32c}</ChecksumCRC32C>" if crc32c else ""
            rows.append(
                f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>{crc}</Part>"
            )
        # The SDK's own request has no checksums and no condition.
        body = f"<CompleteMultipartUpload>{''.join(rows)}</CompleteMultipartUpload>".encode()
        try:
            with self._client.tries() as tries:
                answer = self._client.call(
                    "POST",
                    self.key,
                    whole,
                    query={"uploadId": self.upload_id},
                    headers=_condition(if_none_match, if_match),
                    body=body,
                    handled={200, 404, 412},
                )
        except Refused as refused:
            etag = ""
            if refused.code == "NoSuchUpload" or (refused.status == 412 and tries.is_ambiguous):
                etag = self._tag_of_completed([etag for _, (etag, _) in parts])
            if etag:
                return etag
            if refused.status == 412:
                if if_none_match:
                    with contextlib.suppress(ObjectChanged, ObjectMissing):
                        return self.complete(if_match=_REMOVED_TAG)
                raise _unmet(self._client.place(self.key), if_match) from None
            raise self._client.error(refused, self.key) from None
        return f'"{CompleteMultipartUploadResult(answer).etag}"'

    def abort(self) -> None:
        """Drop all parts."""
        self._store.abort_upload(self.key, self.upload_id)

    def _tag_of_completed(self, etags: list[str]) -> str:
        """Return the entity tag if an earlier try has completed this upload, else ""."""
        try:
            digests = [binascii.unhexlify(etag.strip('"')) for etag in etags]
            present = self._store.head(self.key).etag
        except (ObjectMissing, ValueError):
            return ""
        joined = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        return present if present.strip('"') == f"{joined}-{len(digests)}" else ""


@dataclass
class _Download:
    """Download of a range of an object into memory, which can be resumed."""

    client: Client
    key: str
    start: int
    length: int | None
    target: memoryview | None = None
    """Buffer with the size from the first answer, unless the caller gives it."""
    etag: str = ""
    """Entity tag of the first answer; later answers must have the same one."""
    limit: int | None = None
    """Most bytes of a whole object that may change; None for any other download."""
    done: int = 0

    def run(self) -> None:
        """Read the range up to the object's end; raises ObjectChanged, ObjectTooLarge."""
        try:
            self.client.call("GET", self.key, self._take, headers=self._headers, handled={412, 416})
        except Refused as refused:
            if refused.status == 412:
                raise _unmet(self.client.place(self.key), self.etag) from None
            # 416: the object ends before the range begins.

    def _headers(self) -> dict[str, str]:
        if self.limit is not None:
            self.target, self.etag, self.done = None, "", 0
        condition = _condition(False, self.etag)
        first = self.start + self.done
        if self.length is None:
            return {"range": f"bytes={first}-", **condition} if first else condition
        return {"range": f"bytes={first}-{self.start + self.length - 1}", **condition}

    def _take(self, answer: Answer) -> None:
        _present(answer)
        first, place = self.start + self.done, self.client.place(self.key)
        span = answer.headers.get("Content-Range", "")
        is_whole = self.length is None and not first
        length = answer.length_remaining
        if length is None or not (is_whole or span.startswith(f"bytes {first}-")):
            raise StoreError(
                f"{place} must be read from byte {first}, but the server answers HTTP "
                f"{answer.status} with the range {span!r}"
            )
        if self.limit is not None and length > self.limit:
            raise ObjectTooLarge(f"{place} must be at most {self.limit} bytes here, got {length}")
        if self.target is None:
            self.target = memoryview(bytearray(length))
        self.etag = self.etag or answer.headers.get("ETag", "")
        end = self.done + min(length, self.target.nbytes - self.done)
        mark, began = self.done, time.monotonic()
        while self.done < end:
            block = answer.read1(min(SLICE_BYTES, end - self.done), decode_content=False)
            if not block:
                raise Transient("IncompleteRead", "the answer ended early")
            self.target[self.done : self.done + len(block)] = block
            self.done += len(block)
            if self.done >= mark + SLICE_BYTES:
                mark, began = self.done, time.monotonic()
            elif time.monotonic() - began > self.client.read_seconds:
                # The answer trickles: another connection may be faster.
                raise Transient("TimeoutError", "no answer in time")


def _present(answer: Answer) -> Answer:
    if answer.headers.get("ETag") == _REMOVED_TAG:
        raise Refused(404, "NoSuchKey")
    return answer


def _unmet(place: str, if_match: str) -> ObjectChanged | ObjectExists:
    """Return the error of a write whose condition is not met."""
    if if_match:
        return ObjectChanged(
            f"{place} must be the object {if_match}, but is another; read it again"
        )
    return ObjectExists(f"{place} must not exist yet, but does; another process has created it")


def _condition(if_none_match: bool, if_match: str) -> dict[str, str]:
    if if_none_match:
        return {"if-none-match": "*"}
    return {"if-match": if_match} if if_match else {}


def _checksum(view: memoryview, crc32c: int | None = None) -> dict[str, str]:
    """Return the CRC-32C header of a body, if the checksum is known or cheap, else no header."""
    if crc32c is None:
        if not _HAS_CRC32C:
            return {}
        crc32c = google_crc32c.extend(0, np.frombuffer(view, np.uint8)) if view.nbytes else 0
    return {"x-amz-checksum-crc32c": base64.b64encode(crc32c.to_bytes(4, "big")).decode()}


def _stat(item: Object) -> Stat:
    modified = _moment(item.last_modified)
    return Stat(item.object_name or "", item.size or 0, f'"{item.etag}"', modified)


def _moment(at: datetime | None) -> float:
    return at.timestamp() if at else 0.0
