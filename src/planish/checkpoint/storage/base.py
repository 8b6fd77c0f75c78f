"""The Storage protocol: objects under keys, written whole, in parts, or on a condition.

A key is relative to the bucket (or the root folder) and has no empty, `.` or `..` segment. A folder
is a prefix of keys that ends before a slash; only a file system keeps real folders.
Nothing here knows checkpoints.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

from planish.base import telemetry
from planish.base.errors import StoreError, StoreMisconfigured
from planish.store.base import file_uri, parse_uri

logger = logging.getLogger(__name__)

Buffer: TypeAlias = bytes | bytearray | memoryview

PART_BYTES = 16 << 20
"""Parts of a large object have at least this size, the last one excepted."""
SINGLE_PUT_BYTES = 8 << 20
"""Smaller objects are better written by one request."""
_MAX_PARTS = 9_000
TIMEOUT_SECONDS = 1800.0
"""No call goes on for longer, tries and waits included."""


def part_bytes(size: int) -> int:
    """Return the size of the parts of an object of `size` bytes: at most 9,000 of whole MiB.

    Example:
        >>> part_bytes(1 << 30) >> 20, part_bytes(1 << 40) >> 20
        (16, 117)
    """
    least = -(-size // _MAX_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


class Stat(NamedTuple):
    """What a store knows of an object.

    Example:
        >>> Stat("runs/a/COMMIT", 412, '"9f0c"', 1.7e9).size
        412
    """

    key: str
    size: int
    """Bytes."""
    etag: str
    """Changes whenever the object is written; for `if_match` and `etag`. Otherwise opaque."""
    modified: float
    """When it was written, seconds since 1970 by the clock of the store."""


class Upload(NamedTuple):
    """A write in parts that is not completed."""

    upload_id: str
    started: float
    """Seconds since 1970 by the clock of the store."""


class Folder(NamedTuple):
    """The direct content of a folder."""

    objects: list[Stat]
    """Ascending by key."""
    folders: list[str]
    """Keys without a slash at the end, ascending."""


@dataclass
class Counters:
    """Requests sent and bytes moved; any thread may add.

    Example:
        >>> c = Counters(); c.add("put", sent=3); c.total(), c.requests["put"], c.bytes_out
        (1, 1, 3)
    """

    requests: Counter[str] = field(default_factory=Counter)
    """By kind: put, get, head, list, delete, create, part, complete, abort; each try counts."""
    retries: Counter[str] = field(default_factory=Counter)
    """Tries that were not the first, by the reason (an HTTP status or the name of an error)."""
    bytes_out: int = 0
    bytes_in: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(self, kind: str, *, sent: int = 0, received: int = 0) -> None:
        """Count one request of a kind and the bytes of its bodies."""
        with self._lock:
            self.requests[kind] += 1
            self.bytes_out += sent
            self.bytes_in += received

    def moved(self, *, sent: int = 0, received: int = 0) -> None:
        """Count bytes of a request that has been counted before."""
        with self._lock:
            self.bytes_out += sent
            self.bytes_in += received

    def retried(self, reason: str) -> None:
        """Count a try that follows a failed one."""
        with self._lock:
            self.retries[reason] += 1

    def total(self) -> int:
        """Return the number of requests of all kinds."""
        with self._lock:
            return sum(self.requests.values())


class Multipart(Protocol):
    """An object that is being written in parts; visible to nobody until `complete`.

    `write` may be called from several threads, for different parts.
    """

    key: str
    upload_id: str
    """With the key, all that another process needs to abort this upload."""
    part_bytes: int
    """Size of every part but the last."""
    may_have_twin: bool
    """Whether a try to begin it, whose answer was lost, may have begun another upload."""

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write part `number` (from 1); the same bytes may be written again.

        A caller that has the CRC-32C of the part saves the storage from computing it.
        """

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Make the object visible as a whole and return its entity tag.

        Raises:
            ObjectExists: `if_none_match` and there is an object.
            ObjectChanged: the object is not the one of `if_match`.
            ObjectMissing: `if_match` and there is no object, or the upload was aborted.
        """

    def abort(self) -> None:
        """Drop all parts; an upload that is completed or gone is no error."""


class Storage(Protocol):
    """Objects of one bucket, one file system or one named memory.

    Every method may raise `AccessRefused`, `StoreMisconfigured` (both at once) or
    `StoreUnavailable` (after retries). Methods may be called from any thread.
    """

    counters: Counters

    def uri(self, key: str) -> str:
        """Return `key` as a user writes it."""

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole and return its entity tag.

        Args:
            key: where.
            data: contiguous bytes; not copied and not to be changed meanwhile.
            if_none_match: only if there is no object yet.
            if_match: only over the object with this entity tag.

        Raises:
            ObjectExists: `if_none_match` and there is an object, which is not what an earlier try
                of this call wrote.
            ObjectChanged: the object is not the one of `if_match`.
            ObjectMissing: `if_match` and there is no object.
        """

    def open_multipart(self, key: str, size: int) -> Multipart:
        """Begin an object of `size` bytes in parts."""

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop the upload that another process began; one that is gone is no error."""

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the unfinished writes of exactly this key that the store remembers."""

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` with the bytes from `offset`; with `etag` only from that object.

        Raises:
            ObjectMissing: there is none.
            ObjectChanged: another object lies there than `etag` says, or it was replaced meanwhile.
            StoreError: the object ends before `target` is full.
        """

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole object of at most `limit` bytes and its entity tag.

        Raises:
            ObjectMissing: there is none.
            ObjectTooLarge: it has more bytes.
        """

    def head(self, key: str) -> Stat:
        """Return what the store knows of an object, `ObjectMissing` if there is none."""

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every object below a folder (empty: all), at any depth, ascending by key."""

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder; an absent folder is empty."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent ones are no error."""

    def tidy(self, folder: str) -> None:
        """Remove what a file system keeps of a folder whose objects are gone.

        That is unfinished writes and empty folders at and below `folder`, and then the folder that
        holds it, if it is empty. Only for folders that nobody writes to any more.
        """

    def now(self) -> float:
        """Return the time by the clock that `Stat.modified` uses, seconds since 1970."""

    def close(self) -> None:
        """Drop idle connections; the storage may still be used."""


def upload(storage: Storage, key: str, data: Buffer) -> str:
    """Write an object of any size from one thread and return its entity tag."""
    view = memoryview(data).cast("B")
    if view.nbytes < SINGLE_PUT_BYTES:
        return storage.put(key, view)
    parts = storage.open_multipart(key, view.nbytes)
    try:
        for number, start in enumerate(range(0, view.nbytes, parts.part_bytes), 1):
            parts.write(number, view[start : start + parts.part_bytes])
        etag = parts.complete()
    except BaseException:
        parts.abort()
        raise
    drop_twins(storage, [parts])
    return etag


def drop_twins(storage: Storage, written: Iterable[Multipart]) -> None:
    """Abort what lost tries to begin `written` have begun; for keys that have one writer only."""
    for parts in written:
        if not parts.may_have_twin:
            continue
        try:
            for found in storage.open_uploads(parts.key):
                if found.upload_id != parts.upload_id:
                    storage.abort_upload(parts.key, found.upload_id)
        except StoreError as error:
            # The object is whole; what is left costs room until the store forgets it.
            logger.warning("%s", telemetry.event("upload_left", key=parts.key, reason=str(error)))


def check_key(key: str) -> str:
    """Return `key` if it can be one everywhere.

    Raises:
        StoreMisconfigured: empty, absolute, more than 1,024 bytes, with a control character or a
            segment that is empty, `.` or `..`.
    """
    bad = any(part in {"", ".", ".."} for part in key.split("/"))
    if bad or len(key.encode("utf-8", "surrogatepass")) > 1024 or not _is_printable(key):
        raise StoreMisconfigured(
            "a key must be at most 1,024 bytes without empty, `.` or `..` segments or control "
            f"characters, got {key[:200]!r}; rename the folder"
        )
    return key


def _is_printable(key: str) -> bool:
    return all(" " <= char != "\x7f" and not "\ud800" <= char <= "\udfff" for char in key)


def inside(folder: str) -> str:
    """Return what all keys below a folder begin with."""
    return f"{check_key(folder)}/" if folder else ""


def uri_of(place: str) -> str:
    """Return the URI of a place, which may be an absolute path.

    Example:
        >>> uri_of("/runs/7"), uri_of("s3://runs/7")
        ('file:///runs/7', 's3://runs/7')
    """
    return file_uri(place) if place.startswith("/") else place


def open_storage(uri: str, *, timeout_s: float = TIMEOUT_SECONDS) -> tuple[Storage, str]:
    """Return the storage of a URI and the key that the URI names in it.

    Args:
        uri: `s3://bucket/key`, `file:///folder`, an absolute path, or `mem://name/key` (of this
            process, for tests).
        timeout_s: no single call of the storage goes on for longer.

    Example:
        >>> storage, key = open_storage("mem://tests/run/step-7")
        >>> storage.uri(key)
        'mem://tests/run/step-7'

    Raises:
        StoreMisconfigured: an unknown scheme, a malformed URI, or no credentials.
    """
    uri = uri_of(uri)
    if uri.startswith("mem://"):
        from planish.checkpoint.storage.mem import named

        name, _, key = uri[6:].partition("/")
        key = key.rstrip("/")
        return named(name), check_key(key) if key else ""
    try:
        address = parse_uri(uri)
    except ValueError as error:
        raise StoreMisconfigured(f"{error}; `mem://` and absolute paths are also taken") from None
    if address.key:
        check_key(address.key)
    if address.scheme == "file":
        from planish.checkpoint.storage.localfs import LocalStorage

        return LocalStorage("/"), address.key
    module = importlib.import_module("planish.checkpoint.storage.s3")
    return module.connect(address.bucket, timeout_s=timeout_s), address.key
