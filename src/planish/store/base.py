"""The Store protocol, and how objects are named: by a key in a store, or by a URI.

Objects are written whole, in parts, or on a condition. A key is relative to the bucket (or the root
folder) and has no empty, `.` or `..` segment. A folder is a prefix of keys that ends before a
slash; only a file system keeps real folders. This module does not depend on records, checkpoints or
any server.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias
from urllib.parse import quote_from_bytes, unquote

from planish.base.errors import StoreMisconfigured
from planish.base.telemetry import redact

STORES: dict[str, str] = {
    "file": "planish.store.file:connect",
    "s3": "planish.store.s3:connect",
}
"""Scheme to `module:function`, imported on first use; see `planish.store.open_store`."""

_FORBIDDEN_IN_URI = re.compile(r"[\x00-\x1f\x7f#\\]")
_LIKE_A_URI = re.compile(r"[a-z0-9]+:/")
"""Start of a URI that may lack a slash, as `s3:/`."""
_PLAIN_IN_URI = "/:@!$&'()*+,;="
"""Characters that stay unescaped in a URI, beside letters, digits and `_.-~`."""

Buffer: TypeAlias = bytes | bytearray | memoryview

PART_BYTES = 16 << 20
"""Least size of the parts of a large object, except the last one."""
SINGLE_PUT_BYTES = 8 << 20
"""Objects below this size are written by one request."""
_MAX_PARTS = 9_000
TIMEOUT_SECONDS = 1800.0
"""Limit of a request in seconds, including all tries and waits."""


def part_bytes(size: int) -> int:
    """Return the part size for an object of `size` bytes: whole MiB, at most 9,000 parts.

    Example:
        >>> part_bytes(1 << 30) >> 20, part_bytes(1 << 40) >> 20
        (16, 117)
    """
    least = -(-size // _MAX_PARTS)
    return max(PART_BYTES, -(-least // (1 << 20)) << 20)


class Stat(NamedTuple):
    """Metadata of an object in a store."""

    key: str
    size: int
    etag: str
    """Entity tag for `if_match` and `etag`: it changes with every write and is otherwise opaque."""
    modified: float
    """Time of the write, seconds since 1970 by the clock of the store."""


class Upload(NamedTuple):
    """A write in parts that is not completed."""

    upload_id: str
    started: float
    """Start of the write, seconds since 1970 by the clock of the store."""


class Folder(NamedTuple):
    """The direct content of a folder."""

    objects: list[Stat]
    """Ascending by key."""
    folders: list[str]
    """Keys without a slash at the end, ascending."""


class Multipart(Protocol):
    """An object that is written in parts; no reader sees it before `complete`.

    `write` may be called from several threads, for different parts.
    """

    key: str
    upload_id: str
    """Another process can abort this upload with this id and the key."""
    part_bytes: int
    """Size of every part but the last."""
    may_be_begun_twice: bool
    """True if a start request without an answer may have left a second upload."""

    def write(self, number: int, data: Buffer, crc32c: int | None = None) -> None:
        """Write part `number` (from 1); the same bytes may be written again.

        A caller may pass the CRC-32C of the part; otherwise the store computes it.
        """

    def complete(self, *, if_none_match: bool = False, if_match: str = "") -> str:
        """Make the object visible as a whole and return its entity tag.

        Raises:
            ObjectExists: `if_none_match` is set and an object exists.
            ObjectChanged: the object does not have the tag `if_match`.
            ObjectMissing: `if_match` is set and no object exists, or the upload was aborted.
        """

    def abort(self) -> None:
        """Drop all parts; a completed or absent upload is no error."""


class Store(Protocol):
    """Objects of one bucket or one file system.

    Every method may raise `AccessRefused`, `StoreMisconfigured` (both at once) or
    `StoreUnavailable` (after retries). Methods may be called from any thread.
    """

    retries: Counter[str]
    """Retries by reason (an HTTP status or the name of an error)."""
    in_memory: bool
    """True if the objects are in the memory of this process, invisible to other processes."""

    def uri(self, key: str) -> str:
        """Return the URI of `key` in the form that a user writes."""

    def put(
        self, key: str, data: Buffer, *, if_none_match: bool = False, if_match: str = ""
    ) -> str:
        """Write an object as a whole and return its entity tag; readers see all of it or nothing.

        Args:
            key: key of the object.
            data: contiguous bytes; they are not copied and must not change during the call.
            if_none_match: write only if no object exists.
            if_match: write only over the object with this entity tag.

        Raises:
            ObjectExists: `if_none_match` is set and an object exists that no earlier try of this
                                call wrote.
            ObjectChanged: the object does not have the tag `if_match`.
            ObjectMissing: `if_match` is set and no object exists.
        """

    def open_multipart(self, key: str, size: int) -> Multipart:
        """Start to write an object of `size` bytes in parts."""

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop the upload of another process; an absent upload is no error."""

    def open_uploads(self, key: str) -> list[Upload]:
        """Return the unfinished uploads of exactly this key."""

    def get_into(self, key: str, offset: int, target: memoryview, *, etag: str = "") -> None:
        """Fill `target` with the bytes from `offset`; with `etag` only from the object of this tag.

        Raises:
            ObjectMissing: there is none.
            ObjectChanged: the object does not have this `etag`, or was replaced meanwhile.
            StoreError: the object ends before `target` is full.
        """

    def read(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """Return at most `length` bytes from byte `start`; beyond the end there are none.

        Raises:
            ObjectMissing: there is no object.
            ObjectChanged: it was replaced meanwhile.
        """

    def get(self, key: str, limit: int) -> tuple[bytes, str]:
        """Return a whole object of at most `limit` bytes and its entity tag.

        Raises:
            ObjectMissing: there is none.
            ObjectTooLarge: it has more bytes.
        """

    def head(self, key: str) -> Stat:
        """Return the metadata of an object, `ObjectMissing` if there is none."""

    def list(self, folder: str) -> Iterator[Stat]:
        """Yield every object below a folder (empty: all), at any depth, ascending by key."""

    def folder(self, folder: str) -> Folder:
        """Return the direct content of a folder; an absent folder is empty."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects; absent ones are no error."""

    def delete_exact(self, key: str, etag: str) -> bool:
        """Remove an object if it has this entity tag, and return whether it had.

        An object with another tag is kept, even if it is new. A bucket keeps a mark until `tidy`.
        """

    def tidy(self, folder: str) -> None:
        """Remove what a store keeps of a folder after its objects are deleted.

        A bucket keeps marks of `delete_exact`. A file system keeps unfinished writes and empty
        folders at and below `folder`; its parent folder is removed too if it is empty. Call this
        only for folders to which nobody writes any more.
        """

    def now(self) -> float:
        """Return the time by the clock that `Stat.modified` uses, seconds since 1970."""


def check_key(key: str, *, is_file: bool = False) -> str:
    """Return `key` if every store accepts it, or raise StoreMisconfigured.

    Only files of this machine may have names with lone surrogates.
    """
    faulty = any(part in {"", ".", ".."} for part in key.split("/"))
    faulty |= len(key.encode("utf-8", "surrogatepass")) > 1024
    faulty |= any(char < " " or char == "\x7f" for char in key)
    if faulty or (not is_file and any("\ud800" <= char <= "\udfff" for char in key)):
        raise StoreMisconfigured(
            "a key must be at most 1,024 bytes without empty, `.` or `..` segments or control "
            f"characters, got {key[:200]!r}; rename the folder"
        )
    return key


def key_prefix(folder: str, *, is_file: bool = False) -> str:
    """Return the prefix of all keys below a folder."""
    return f"{check_key(folder, is_file=is_file)}/" if folder else ""


@dataclass(frozen=True)
class Address:
    """A URI in parts."""

    scheme: str
    """Key of `STORES`."""
    bucket: str
    """Empty for `file`."""
    key: str
    """Path without slashes at either end, decoded; may be empty for the root of a bucket."""


def parse_uri(uri: str) -> Address:
    """Split a store URI; refuse one that could leave its root or is ambiguous.

    The path of a `file` URI may be percent-encoded; the key of an S3 URI is never decoded.

    Example:
        >>> parse_uri("s3://runs/a/b/").key, parse_uri("file:///a%20b").key
        ('a/b', 'a b')

    Raises:
        StoreMisconfigured: unknown scheme, empty bucket, relative file path, a segment `.`, `..`
            or empty, `#`, a backslash or a control character.
    """
    shown = redact(uri)
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in STORES:
        raise StoreMisconfigured(
            f"a store URI must begin with one of {[f'{s}://' for s in sorted(STORES)]}, got "
            f"{shown!r}"
        )
    forbidden = _FORBIDDEN_IN_URI.search(rest)
    if scheme == "file":
        rest = file_path(uri)
        # An encoded `#` is part of the path; a plain one would start a digest.
        forbidden = forbidden or _FORBIDDEN_IN_URI.search(rest.replace("#", ""))
    bucket, _, key = rest.partition("/")
    if scheme == "file" and (bucket or not rest):
        raise StoreMisconfigured(
            f"a file URI must be absolute (`file:///folder`, three slashes), got {shown!r}"
        )
    if scheme != "file" and not bucket:
        raise StoreMisconfigured(
            f"an {scheme} URI must name a bucket (`{scheme}://bucket/...`), got {shown!r}"
        )
    key = key[:-1] if key.endswith("/") else key
    if forbidden:
        raise StoreMisconfigured(
            f"a store URI must not hold {forbidden[0]!r}, got {shown!r}; rename the folder"
        )
    faulty = [part for part in key.split("/") if part in {"", ".", ".."}] if key else []
    if faulty or bucket in {".", ".."}:
        raise StoreMisconfigured(
            f"a store URI must have no empty, `.` or `..` segment, got {shown!r}; "
            "write the path in full"
        )
    return Address(scheme, bucket, key)


def file_uri(path: str | Path) -> str:
    """Return the URI of a file or folder of this machine, percent-encoded where needed.

    Example:
        >>> file_uri("/a b/c=1")
        'file:///a%20b/c=1'
    """
    return "file://" + quote_from_bytes(os.fsencode(Path(path).absolute()), safe=_PLAIN_IN_URI)


def file_path(uri: str) -> str:
    """Return the path of a `file` URI.

    Example:
        >>> file_path("file:///a%20b/c=1")
        '/a b/c=1'
    """
    return unquote(uri.removeprefix("file://"), errors="surrogateescape")


def uri_of(place: str) -> str:
    """Return the URI of a place, which may be a path, absolute or from the working directory.

    An empty text, or one like a misspelt URI, is returned unchanged: `parse_uri` refuses it.

    Example:
        >>> uri_of("/runs/7"), uri_of("s3://runs/7"), uri_of("s3:/runs/7")
        ('file:///runs/7', 's3://runs/7', 's3:/runs/7')
    """
    is_path = place and "://" not in place and not _LIKE_A_URI.match(place)
    return file_uri(os.path.abspath(place)) if is_path else place


def normal_uri(place: str) -> str:
    """Return the canonical form of a store URI, without a slash at its end.

    Args:
        place: URI or path, as for `uri_of`.

    Example:
        >>> normal_uri("file:///a b/"), normal_uri("/a/../b c"), normal_uri("s3://b/a b/")
        ('file:///a%20b', 'file:///b%20c', 's3://b/a b')

    Raises:
        StoreMisconfigured: the URI is malformed or its scheme unknown.
    """
    place = uri_of(place)
    address = parse_uri(place)
    return file_uri(f"/{address.key}") if address.scheme == "file" else place.rstrip("/")


def normal_pin(text: str) -> str:
    """Return the canonical form of a URI with or without a digest, which is kept unchanged.

    Example:
        >>> normal_pin("/runs/a b#sha256=00")
        'file:///runs/a%20b#sha256=00'
    """
    place, mark, digest = text.partition("#")
    return f"{normal_uri(place)}{mark}{digest}"
