"""Objects in a bucket of MinIO or another S3 server.

Each body carries a CRC-32C that the server checks, so that bytes which change on their way are
sent again. Conditional writes are those of S3 itself (`If-None-Match`, `If-Match`).
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from email.utils import parsedate_to_datetime
from itertools import islice
from typing import Any
from urllib.parse import unquote_plus
from xml.sax.saxutils import escape

from planish.base.errors import (
    ConfigError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreMisconfigured,
)
from planish.checkpoint.storage.base import (
    TIMEOUT_SECONDS,
    Buffer,
    Counters,
    Folder,
    Stat,
    Upload,
    check_key,
    inside,
    part_bytes,
)
from planish.checkpoint.storage.retries import Transient, Tries
from planish.checkpoint.storage.s3_client import Client, Refused, drained
from planish.checkpoint.storage.s3_messages import (
    HAS_CRC32C,
    RangedRead,
    checksum,
    condition,
    document,
    flat,
    moment,
    objects,
)
from planish.checkpoint.storage.wire import READ_SECONDS, Answer, Line
from planish.store.s3 import Settings, read_settings

_DELETE_KEYS = 1000


def connect(bucket: str, *, timeout_s: float = TIMEOUT_SECONDS) -> S3Storage:
    """Return the storage of a bucket at the server that the environment names.

    Raises:
        StoreMisconfigured: no or impossible settings.
    """
    try:
        settings = read_settings()
    except ConfigError as error:
        endpoint = os.environ.get("MINIO_ENDPOINT", "")
        raise StoreMisconfigured(
            f"bucket {bucket!r} at endpoint {endpoint!r} can not be used: {error}"
        ) from None
    return _connect(settings, bucket, timeout_s, os.getpid())


@functools.lru_cache(maxsize=8)
def _connect(settings: Settings, bucket: str, timeout_s: float, _process: int) -> S3Storage:
    return S3Storage(settings, bucket, timeout_s=timeout_s)


class S3Storage:
    """`s3://bucket/key`; an own set of connections."""

    def __init__(
        self,
        settings: Settings,
        bucket: str,
        *,
        timeout_s: float = TIMEOUT_SECONDS,
        read_seconds: float = READ_SECONDS,
    ):
        self._client = Client(settings, bucket, timeout_s=timeout_s, read_seconds=read_seconds)
        self.counters: Counters = self._client.counters

    def uri(self, key: str) -> str:
        """Return `s3://bucket/key`."""
        return f"s3://{self._client.bucket}/{key}"

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole."""
        view = flat(data)
        tries = self._client.tries()
        headers = {**condition(if_none_match, if_match), **checksum(view)}
        try:
            answer = self._client.call(
                "put", "PUT", check_key(key), drained, headers=headers, body=view, tries=tries
            )
        except Refused as refused:
            if refused.status == 412 and tries.is_ambiguous:
                # The try whose answer was lost may be what stands there now.
                etag = self._same(key, view)
                if etag:
                    return etag
            raise self._refused(refused, key, if_match) from None
        return answer.get("ETag", "")

    def open_multipart(self, key: str, size: int) -> S3Multipart:
        """Begin an object in parts."""
        headers = {"x-amz-checksum-algorithm": "CRC32C"} if HAS_CRC32C else {}
        query, tries = {"uploads": ""}, self._client.tries()
        page = self._xml(
            "create", "POST", check_key(key), query=query, headers=headers, body=b"", tries=tries
        )
        upload_id = page.findtext("UploadId") or ""
        return S3Multipart(
            self._client, self, key, upload_id, size, may_have_twin=tries.is_ambiguous
        )

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload."""
        try:
            self._client.call(
                "abort", "DELETE", check_key(key), drained, query={"uploadId": upload_id}
            )
        except Refused as refused:
            error = self._client.error(refused, key)
            if not isinstance(error, ObjectMissing):
                raise error from None

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the uploads of a key; MinIO lists them by exact key only."""
        page = self._xml("list", "GET", "", query={"uploads": "", "prefix": check_key(key)})
        return [
            Upload(item.findtext("UploadId") or "", moment(item.findtext("Initiated")))
            for item in page.findall("Upload")
            if item.findtext("Key") == key
        ]

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` from an object; a broken read is taken up where it broke."""
        view = target.cast("B")
        if not view.nbytes:
            found = self.head(key)
            if etag and found.etag != etag:
                raise self._changed(key, etag)
            return
        read = RangedRead(self._client, check_key(key), offset, view, etag)
        try:
            self._client.call("get", "GET", key, read.take, headers=read.headers)
        except Refused as refused:
            if refused.status == 412:
                raise self._changed(key, read.etag) from None
            if refused.status == 416:
                raise read.short() from None
            raise self._client.error(refused, key) from None

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole object."""

        def take(line: Line, answer: Answer, deadline: float) -> tuple[bytes, str]:
            size = int(answer.headers.get("Content-Length", "0"))
            if size > limit:
                raise ObjectTooLarge(
                    f"{self._client.place(key)} must be at most {limit} bytes here, got {size}"
                )
            data = line.read_all(answer, limit, deadline)
            if data is None or len(data) != size:
                raise Transient("IncompleteRead", "the answer ended early")
            self.counters.moved(received=size)
            return data, answer.headers.get("ETag", "")

        try:
            return self._client.call("get", "GET", check_key(key), take)
        except Refused as refused:
            raise self._client.error(refused, key) from None

    def head(self, key: str) -> Stat:
        """Return the facts of an object."""
        try:
            headers = self._client.call("head", "HEAD", check_key(key), drained)
        except Refused as refused:
            raise self._client.error(refused, key) from None
        modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
        return Stat(key, int(headers["Content-Length"]), headers.get("ETag", ""), modified)

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every object below a folder."""
        for page in self._pages(inside(folder), ""):
            yield from objects(page)

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder."""
        direct = Folder([], [])
        for page in self._pages(inside(folder), "/"):
            direct.objects.extend(objects(page))
            for item in page.findall("CommonPrefixes"):
                direct.folders.append(unquote_plus(item.findtext("Prefix") or "").rstrip("/"))
        direct.folders.sort()  # the server sorts them with their slash
        return direct

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, up to 1,000 per request."""
        waiting = iter(keys)
        while batch := list(islice(waiting, _DELETE_KEYS)):
            names = "".join(f"<Object><Key>{escape(check_key(k))}</Key></Object>" for k in batch)
            body = f"<Delete><Quiet>true</Quiet>{names}</Delete>".encode()
            md5 = hashlib.md5(body, usedforsecurity=False).digest()
            self._xml(
                "delete",
                "POST",
                "",
                query={"delete": ""},
                headers={"content-md5": base64.b64encode(md5).decode()},
                body=body,
            )

    def tidy(self, folder: str) -> None:
        """A bucket has no folders."""

    def now(self) -> float:
        """Return the time of the server."""
        return self._client.now()

    def close(self) -> None:
        """Close idle connections."""
        self._client.pool.close()

    def _pages(self, prefix: str, delimiter: str) -> Iterator[ElementTree.Element]:
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url", "max-keys": "1000"}
        if delimiter:
            query["delimiter"] = delimiter
        while True:
            page = self._xml("list", "GET", "", query=query)
            yield page
            token = page.findtext("NextContinuationToken")
            if page.findtext("IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token

    def _xml(self, kind: str, method: str, key: str, **options: Any) -> ElementTree.Element:
        """Send a request and return its answer, a document without name spaces."""
        body = options.pop("body", None)
        view = None if body is None else memoryview(body)
        try:
            return self._client.call(kind, method, key, document, body=view, **options)
        except Refused as refused:
            raise self._client.error(refused, key) from None

    def _same(self, key: str, view: memoryview) -> str:
        """Return the entity tag of an object that has exactly these bytes, else ""."""
        try:
            found, etag = self.get(key, view.nbytes)
        except (ObjectMissing, ObjectTooLarge):
            return ""
        return etag if found == view else ""

    def _refused(self, refused: Refused, key: str, if_match: str) -> Exception:
        if refused.status != 412:
            return self._client.error(refused, key)
        if if_match:
            return self._changed(key, if_match)
        return ObjectExists(f"{self._client.place(key)} must not exist yet, but does")

    def _changed(self, key: str, etag: str) -> ObjectChanged:
        return ObjectChanged(
            f"{self._client.place(key)} must be the object {etag}, but is another; read it again"
        )


class S3Multipart:
    """An object of `S3Storage` that is being written."""

    def __init__(
        self,
        client: Client,
        storage: S3Storage,
        key: str,
        upload_id: str,
        size: int,
        *,
        may_have_twin: bool,
    ):
        self.key = key
        self.upload_id = upload_id
        self.part_bytes = part_bytes(size)
        self.may_have_twin = may_have_twin
        self._client = client
        self._storage = storage
        self._parts: dict[int, tuple[str, str]] = {}

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write one part."""
        view = flat(data)
        checked = checksum(view, crc32c)
        query = {"partNumber": str(number), "uploadId": self.upload_id}
        try:
            answer = self._client.call(
                "part", "PUT", self.key, drained, query=query, headers=checked, body=view
            )
        except Refused as refused:
            raise self._client.error(refused, self.key) from None
        self._parts[number] = (answer.get("ETag", ""), next(iter(checked.values()), ""))

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Make the object visible."""
        tries = self._client.tries()
        try:
            page = self._client.call(
                "complete",
                "POST",
                self.key,
                document,
                query={"uploadId": self.upload_id},
                headers=condition(if_none_match, if_match),
                body=memoryview(self._manifest()),
                tries=tries,
            )
        except Refused as refused:
            etag = self._completed(refused, tries)
            if etag:
                return etag
            raise self._storage._refused(refused, self.key, if_match) from None
        return page.findtext("ETag") or ""

    def abort(self) -> None:
        """Drop all parts."""
        self._storage.abort_upload(self.key, self.upload_id)

    def _manifest(self) -> bytes:
        parts = []
        for number, (etag, crc32c) in sorted(self._parts.items()):
            crc = f"<ChecksumCRC32C>{crc32c}</ChecksumCRC32C>" if crc32c else ""
            parts.append(
                f"<Part><PartNumber>{number}</PartNumber><ETag>{escape(etag)}</ETag>{crc}</Part>"
            )
        return f"<CompleteMultipartUpload>{''.join(parts)}</CompleteMultipartUpload>".encode()

    def _completed(self, refused: Refused, tries: Tries) -> str:
        """Return the entity tag if an earlier try has completed this upload, else ""."""
        if refused.code != "NoSuchUpload" and not (refused.status == 412 and tries.is_ambiguous):
            return ""
        try:
            digests = [binascii.unhexlify(etag.strip('"')) for _, (etag, _) in self._sorted()]
            found = self._storage.head(self.key).etag
        except (ObjectMissing, ValueError):
            return ""
        whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
        return found if found.strip('"') == f"{whole}-{len(digests)}" else ""

    def _sorted(self) -> list[tuple[int, tuple[str, str]]]:
        return sorted(self._parts.items())
