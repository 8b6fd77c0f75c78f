"""URIs of objects: how they are split, refused and spelled."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote_from_bytes, unquote

from planish.base.errors import StoreMisconfigured

STORES: dict[str, str] = {
    "file": "planish.store.file:connect",
    "s3": "planish.store.s3:connect",
}
"""Scheme to `module:function`, imported on first use; see `planish.store.open_store`."""

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f#\\]")
_PLAIN = "/:@!$&'()*+,;="
"""Characters of a path that its URI holds as they are, beside letters, digits and `_.-~`."""


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
        StoreMisconfigured: unknown scheme, empty bucket, relative file path, a segment `.`, `..`
            or empty, `#`, a backslash or a control character.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme not in STORES:
        raise StoreMisconfigured(
            f"a store URI must begin with one of {[f'{s}://' for s in sorted(STORES)]}, got {uri!r}"
        )
    forbidden = _FORBIDDEN.search(rest)
    if scheme == "file":
        rest = file_path(uri)
        # An encoded `#` is a letter of the path; a plain one would begin a digest.
        forbidden = forbidden or _FORBIDDEN.search(rest.replace("#", ""))
    bucket, _, key = rest.partition("/")
    if scheme == "file" and (bucket or not rest):
        raise StoreMisconfigured(
            f"a file URI must be absolute (`file:///folder`, three slashes), got {uri!r}"
        )
    if scheme != "file" and not bucket:
        raise StoreMisconfigured(
            f"an {scheme} URI must name a bucket (`{scheme}://bucket/...`), got {uri!r}"
        )
    key = key[:-1] if key.endswith("/") else key
    if forbidden:
        raise StoreMisconfigured(
            f"a store URI must not hold {forbidden[0]!r}, got {uri!r}; rename the folder"
        )
    faulty = [part for part in key.split("/") if part in {"", ".", ".."}] if key else []
    if faulty or bucket in {".", ".."}:
        raise StoreMisconfigured(
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


def uri_of(place: str) -> str:
    """Return the URI of a place, which may be an absolute path.

    Example:
        >>> uri_of("/runs/7"), uri_of("s3://runs/7")
        ('file:///runs/7', 's3://runs/7')
    """
    return file_uri(place) if place.startswith("/") else place


def normal_uri(uri: str) -> str:
    """Return the one spelling of a store URI, without a slash at its end.

    Example:
        >>> normal_uri("file:///a b/"), normal_uri("file:///a%20b"), normal_uri("s3://b/a b/")
        ('file:///a%20b', 'file:///a%20b', 's3://b/a b')

    Raises:
        StoreMisconfigured: the URI is malformed or its scheme unknown.
    """
    address = parse_uri(uri)
    return file_uri(f"/{address.key}") if address.scheme == "file" else uri.rstrip("/")
