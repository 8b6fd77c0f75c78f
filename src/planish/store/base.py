"""Bytes by URI: the Store protocol, the rules for URIs and the table of schemes.

Knows neither records nor any server; a store's own file does.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import quote_from_bytes, unquote

from planish.base.errors import ConfigError

STORES: dict[str, str] = {
    "file": "planish.store.file:FileStore",
    "s3": "planish.store.s3:S3Store",
}
"""Scheme to `module:class`; a class is built without arguments and imported on first use."""

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f#\\]")
_PLAIN = "/:@!$&'()*+,;="
"""Characters of a path that its URI holds as they are, beside letters, digits and `_.-~`."""


class Store(Protocol):
    """Objects of bytes under URIs of one scheme.

    Every method may raise `AccessRefused`, `StoreUnavailable` (after retries) or `ConfigError`
    (a URI that can not be). Reads of an absent object raise `ObjectMissing`.
    """

    def read(self, uri: str, start: int = 0, length: int | None = None) -> bytes:
        """Return at most `length` bytes from byte `start`; beyond the end there are none."""

    def write(self, uri: str, data: bytes) -> None:
        """Put an object in place as a whole: readers see the old bytes or all of the new."""

    def create(self, uri: str, data: bytes) -> None:
        """Write an object only if there is none yet; raises `ObjectExists` otherwise."""

    def write_file(self, uri: str, path: Path) -> None:
        """Write an object from a local file of any size, as a whole."""

    def read_file(self, uri: str, path: Path) -> None:
        """Copy an object of any size to a local file."""

    def size(self, uri: str) -> int:
        """Return the number of bytes of an object."""

    def exists(self, uri: str) -> bool:
        """Return whether there is an object."""

    def list(self, prefix_uri: str) -> list[str]:
        """Return the URIs of all objects below the folder `prefix_uri`, sorted."""

    def delete(self, uri: str) -> None:
        """Remove an object; an absent one is no error."""

    def local_path(self, uri: str) -> Path | None:
        """Return where the object or folder lies on this machine, None when it does not."""


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
    """Split a store URI, refusing what could leave its root or mean two things.

    The path of a `file` URI may be percent-encoded; a key of a bucket is taken as it is.

    Example:
        >>> parse_uri("s3://runs/a/b/").key, parse_uri("file:///a%20b").key
        ('a/b', 'a b')

    Raises:
        ConfigError: unknown scheme, empty bucket, relative file path, a segment `.`, `..` or
            empty, `#`, a backslash or a control character.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in STORES:
        raise ConfigError(
            f"a store URI must begin with one of {[f'{s}://' for s in sorted(STORES)]}, got {uri!r}"
        )
    found = _FORBIDDEN.search(rest)
    if scheme == "file":
        rest = file_path(uri)
        # An encoded `#` is a letter of the path; a plain one would begin a digest.
        found = found or _FORBIDDEN.search(rest.replace("#", ""))
    bucket, _, key = rest.partition("/")
    if scheme == "file" and (bucket or not rest):
        raise ConfigError(
            f"a file URI must be absolute (`file:///folder`, three slashes), got {uri!r}"
        )
    if scheme != "file" and not bucket:
        raise ConfigError(
            f"an {scheme} URI must name a bucket (`{scheme}://bucket/...`), got {uri!r}"
        )
    key = key[:-1] if key.endswith("/") else key
    if found:
        raise ConfigError(f"a store URI must not hold {found[0]!r}, got {uri!r}; rename the folder")
    bad = [part for part in key.split("/") if part in {"", ".", ".."}] if key else []
    if bad or bucket in {".", ".."}:
        raise ConfigError(
            f"a store URI must have no empty, `.` or `..` segment, got {uri!r}; "
            "write the path in full"
        )
    return Address(scheme, bucket, key)


def file_uri(path: str | Path) -> str:
    """Return the URI of a file or folder of this machine, percent-encoded where it must be.

    Example:
        >>> file_uri("/a b/c=1")
        'file:///a%20b/c=1'
    """
    return "file://" + quote_from_bytes(os.fsencode(Path(path).absolute()), safe=_PLAIN)


def file_path(uri: str) -> str:
    """Return the path that a `file` URI names.

    Example:
        >>> file_path("file:///a%20b/c=1")
        '/a b/c=1'
    """
    return unquote(uri.removeprefix("file://"), errors="surrogateescape")


def normal_uri(uri: str) -> str:
    """Return the one spelling of a store URI, without a slash at its end.

    Example:
        >>> normal_uri("file:///a b/"), normal_uri("file:///a%20b"), normal_uri("s3://b/a b/")
        ('file:///a%20b', 'file:///a%20b', 's3://b/a b')

    Raises:
        ConfigError: the URI is malformed or its scheme unknown.
    """
    address = parse_uri(uri)
    return file_uri(f"/{address.key}") if address.scheme == "file" else uri.rstrip("/")


_opened: dict[str, Store] = {}


def open_store(uri: str) -> Store:
    """Return the store that holds `uri`; one per scheme and process.

    Raises:
        ConfigError: the URI is malformed or its scheme unknown.
    """
    scheme = parse_uri(uri).scheme
    if scheme not in _opened:
        module, _, name = STORES[scheme].partition(":")
        _opened[scheme] = getattr(importlib.import_module(module), name)()
    return _opened[scheme]
