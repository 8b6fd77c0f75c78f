"""What S3 requests carry and their answers say: ranges, conditions, checksums, documents."""

from __future__ import annotations

import base64
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from datetime import datetime
from urllib.parse import unquote_plus

import google_crc32c
import numpy as np

from planish.base.errors import StoreError
from planish.checkpoint.storage.base import Buffer, Stat
from planish.checkpoint.storage.retries import Transient
from planish.checkpoint.storage.s3_client import Client, Refused
from planish.checkpoint.storage.wire import Answer, Line
from planish.store.retry import passes

_PAGE_BYTES = 16 << 20
HAS_CRC32C = google_crc32c.implementation == "c"


class RangedRead:
    """A ranged read that remembers how far it came."""

    def __init__(self, client: Client, key: str, offset: int, view: memoryview, etag: str):
        self.etag = etag
        self._client = client
        self._key = key
        self._offset = offset
        self._view = view
        self._done = 0

    def headers(self) -> dict[str, str]:
        """Ask for what is missing, of the object that the first answer came from."""
        first, last = self._offset + self._done, self._offset + self._view.nbytes - 1
        return {"range": f"bytes={first}-{last}", **condition(False, self.etag)}

    def take(self, line: Line, answer: Answer, deadline: float) -> None:
        """Read what came."""
        left = self._view.nbytes - self._done
        first = self._offset + self._done
        span = answer.headers.get("Content-Range", "")
        if not span.startswith(f"bytes {first}-"):
            raise StoreError(
                f"{self._client.place(self._key)} must be read from byte {first}, but the server "
                f"answers HTTP {answer.status} with the range {span!r}"
            )
        if answer.length is None or answer.length < left:
            raise self.short()
        self.etag = self.etag or answer.headers.get("ETag", "")
        count = line.read_into(answer, self._view[self._done :], deadline)
        self._client.counters.moved(received=count)
        self._done += count
        if count < left:
            raise Transient("IncompleteRead", "the answer ended early")

    def short(self) -> StoreError:
        """Return the error of an object that ends too early."""
        wanted = self._offset + self._view.nbytes
        return StoreError(f"{self._client.place(self._key)} must have {wanted} bytes, got fewer")


def flat(data: Buffer) -> memoryview:
    """Return contiguous bytes as bytes, not copied."""
    return memoryview(data).cast("B")


def condition(if_none_match: bool, if_match: str) -> dict[str, str]:
    """Return the headers of a condition."""
    if if_none_match:
        return {"if-none-match": "*"}
    return {"if-match": if_match} if if_match else {}


def checksum(view: memoryview, crc32c: int | None = None) -> dict[str, str]:
    """Return the header by which the server checks a body, if that costs little or is known."""
    if crc32c is not None:
        crc = crc32c
    elif not HAS_CRC32C:
        return {}
    else:
        crc = google_crc32c.extend(0, np.frombuffer(view, np.uint8)) if view.nbytes else 0
    return {"x-amz-checksum-crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode()}


def document(line: Line, answer: Answer, deadline: float) -> ElementTree.Element:
    """Return an answer that is a document, without name spaces."""
    data = line.read_all(answer, _PAGE_BYTES, deadline)
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
            raise Transient(code, f"the server answers {code}")
        raise Refused(200, code, failed.findtext("Message") or "", "")
    return root


def objects(page: ElementTree.Element) -> Iterator[Stat]:
    """Yield what a page of a listing names."""
    for item in page.findall("Contents"):
        key = unquote_plus(item.findtext("Key") or "")
        if key and not key.endswith("/"):
            size = int(item.findtext("Size") or "0")
            modified = moment(item.findtext("LastModified"))
            yield Stat(key, size, item.findtext("ETag") or "", modified)


def moment(text: str | None) -> float:
    """Return seconds since 1970."""
    return datetime.fromisoformat(
        (text or "1970-01-01T00:00:00Z").replace("Z", "+00:00")
    ).timestamp()
