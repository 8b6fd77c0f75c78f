"""The content of COMMIT: its record, and reading what a path holds without trusting it."""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
    ObjectMissing,
    ObjectTooLarge,
)
from planish.checkpoint.commit.journal import COMMIT, is_attempt, join
from planish.checkpoint.storage.base import Storage

FORMAT = 1
META_KEY = "meta/global.bin"
MAX_COMMIT_BYTES = 1 << 20
MAX_META_BYTES = 4 << 30
_MAX_COUNT = 1 << 62


@dataclass(frozen=True)
class Facts:
    """What a commit says of a checkpoint besides where its metadata lies.

    Example:
        >>> Facts(step=100, roles=("main",), files={"data/main.model/00000-0.safetensors": 8}).step
        100
    """

    step: int
    roles: tuple[str, ...]
    files: Mapping[str, int]
    """Every object but the metadata, relative to the attempt's folder, and its size in bytes."""
    run_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    """The content of COMMIT.

    Example:
        >>> commit = Commit("0" * 26, "a-" + "0" * 26 + "/meta/global.bin", 9, "0" * 64, 2, 90, 7)
        >>> Commit.decode(commit.encode()) == commit
        True
    """

    attempt: str
    meta_key: str
    """Where the metadata lies, relative to the checkpoint's folder."""
    meta_size: int
    meta_sha256: str
    n_objects: int
    """Objects of the attempt, the metadata included."""
    total_bytes: int
    """Their sizes summed."""
    step: int
    roles: tuple[str, ...] = ()
    created_at: float = 0.0
    """Seconds since 1970 by the clock of the store."""
    run_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT
    etag: str = field(default="", compare=False)
    """Entity tag of the object that this was read from; not stored."""

    def encode(self) -> bytes:
        """Return JSON, with a checksum of all fields as the last one."""
        names = [name for name in self.__dataclass_fields__ if name != "etag"]
        fields = {name: getattr(self, name) for name in names}
        return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1).encode()

    @staticmethod
    def decode(data: bytes, *, etag: str = "", uri: str = COMMIT) -> Commit:
        """Read a commit; anything odd is refused.

        Raises:
            CheckpointCorrupt: not a commit, or one of a newer version.
        """
        found = _parse(data, uri)
        written = found.get("format")
        if type(written) is not int or written != FORMAT:
            by = "by a newer version; read it with that version"
            raise CheckpointCorrupt(
                f"`{uri}` must be of format {FORMAT}, got {str(written)[:40]!r}: written "
                + (by if type(written) is int and written > FORMAT else "by something else"),
                file=COMMIT,
            )
        faults = [name for name, check in _CHECKS.items() if not check(found.get(name))]
        if not faults and found["meta_key"] != f"a-{found['attempt']}/{META_KEY}":
            faults = ["meta_key"]
        if faults:
            seen = {name: str(found.get(name))[:80] for name in faults}
            raise CheckpointCorrupt(f"`{uri}` must be a commit, got {seen}", file=COMMIT)
        known: dict[str, Any] = {name: found[name] for name in _CHECKS}
        if found.get(_CHECKSUM) != _checksum({**known, "format": FORMAT}):
            raise CheckpointCorrupt(
                f"`{uri}` must have the {_CHECKSUM} that it tells, "
                f"{str(found.get(_CHECKSUM))[:20]}, but has been changed",
                file=COMMIT,
            )
        known["roles"] = tuple(known["roles"])
        known["created_at"] = float(known["created_at"])
        return Commit(**known, format=FORMAT, etag=etag)


_CHECKSUM = "crc32"


def _checksum(fields: Mapping[str, Any]) -> int:
    """Return a CRC-32 of the fields, which are what JSON gives back."""
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "attempt": is_attempt,
    "meta_key": _is_text,
    "meta_size": lambda value: _is_count(value) and value <= MAX_META_BYTES,
    "meta_sha256": lambda value: (
        _is_text(value) and len(value) == 64 and not set(value) - set("0123456789abcdef")
    ),
    "n_objects": _is_count,
    "total_bytes": _is_count,
    "step": _is_count,
    "roles": lambda value: isinstance(value, list) and all(map(_is_text, value)),
    "created_at": lambda value: type(value) in {int, float} and abs(value) < 1e15,
    "run_id": _is_text,
    "tags": lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
}


def _parse(data: bytes, uri: str) -> dict[str, Any]:
    try:
        found = json.loads(data.decode(), parse_constant=lambda _: math.nan)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CheckpointCorrupt(f"`{uri}` must be a JSON object, got {data[:40]!r}", file=COMMIT)
    return found


def read_commit(storage: Storage, path: str) -> Commit | None:
    """Return what is committed at a path, None if nothing is.

    Raises:
        CheckpointCorrupt: there is an object, but not a commit that this version can read.
    """
    key = join(path, COMMIT)
    try:
        data, etag = storage.get(key, MAX_COMMIT_BYTES)
    except ObjectMissing:
        return None
    except ObjectTooLarge as error:
        raise CheckpointCorrupt(str(error), file=COMMIT) from None
    return Commit.decode(data, etag=etag, uri=storage.uri(key))


def require_commit(storage: Storage, path: str) -> Commit:
    """Return what is committed at a path.

    Raises:
        CheckpointNotFound: nothing is.
        CheckpointCorrupt: see `read_commit`.
    """
    commit = read_commit(storage, path)
    if commit is None:
        raise CheckpointNotFound(
            f"`{storage.uri(path)}` must hold a committed checkpoint, but has no {COMMIT}; "
            "correct the path, or wait until the save has ended"
        )
    return commit


def read_meta(storage: Storage, path: str, commit: Commit) -> bytes:
    """Return the metadata that a commit names, its digest checked.

    Raises:
        CheckpointIncomplete: it is missing or has another size.
        CheckpointCorrupt: its SHA-256 differs.
    """
    key = join(path, commit.meta_key)
    try:
        data, _ = storage.get(key, commit.meta_size)
    except ObjectMissing:
        raise CheckpointIncomplete(
            f"`{storage.uri(key)}` must exist, since {COMMIT} names it, but does not"
        ) from None
    except ObjectTooLarge as error:
        raise CheckpointCorrupt(str(error), file=commit.meta_key) from None
    if len(data) != commit.meta_size:
        raise CheckpointIncomplete(
            f"`{storage.uri(key)}` must have {commit.meta_size} bytes, got {len(data)}"
        )
    found = hashlib.sha256(data).hexdigest()
    if found != commit.meta_sha256:
        raise CheckpointCorrupt(
            f"`{storage.uri(key)}` must have SHA-256 {commit.meta_sha256}, got {found}",
            file=commit.meta_key,
        )
    return data
