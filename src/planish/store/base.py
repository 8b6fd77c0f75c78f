"""Bytes by URI: the Store protocol, the rules for URIs and the table of schemes.

Knows neither records nor any server; a store's own file does.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from planish.errors import ConfigError

STORES: dict[str, str] = {
    "file": "planish.store.file:FileStore",
    "s3": "planish.store.s3:S3Store",
}
"""Scheme to `module:class`; a class is built without arguments and imported on first use."""

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f#\\]")


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
    """Path without slashes at either end; may be empty for the root of a bucket."""


def parse_uri(uri: str) -> Address:
    """Split a store URI, refusing what could leave its root or mean two things.

    Example:
        >>> parse_uri("s3://runs/a/b/").key
        'a/b'

    Raises:
        ConfigError: unknown scheme, empty bucket, relative file path, a segment `.`, `..` or
            empty, `#`, a backslash or a control character.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in STORES:
        raise ConfigError(
            f"a store URI must begin with one of {[f'{s}://' for s in sorted(STORES)]}, got {uri!r}"
        )
    bucket, _, key = rest.partition("/")
    if scheme == "file":
        if bucket or not rest:
            raise ConfigError(
                f"a file URI must be absolute (`file:///folder`, three slashes), got {uri!r}"
            )
    elif not bucket:
        raise ConfigError(
            f"an {scheme} URI must name a bucket (`{scheme}://bucket/...`), got {uri!r}"
        )
    key = key[:-1] if key.endswith("/") else key
    found = _FORBIDDEN.search(rest)
    if found:
        raise ConfigError(f"a store URI must not hold {found[0]!r}, got {uri!r}; rename the folder")
    bad = [part for part in key.split("/") if part in {"", ".", ".."}] if key else []
    if bad or bucket in {".", ".."}:
        raise ConfigError(
            f"a store URI must have no empty, `.` or `..` segment, got {uri!r}; "
            "write the path in full"
        )
    return Address(scheme, bucket, key)


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
