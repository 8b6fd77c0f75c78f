"""COMMIT, the object that makes a checkpoint exist: its format, its writes and its reads.

The coordinator writes it as an upload of one part that its journal announces. To complete the
upload is the single step that makes the checkpoint visible; after an abort this step is impossible.
Therefore a process that resumes after hours of pause can do no harm.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from planish.base import telemetry
from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointNotFound,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    SaveFailed,
    StoreError,
)
from planish.checkpoint.commit.journal import (
    COMMIT,
    COORDINATOR,
    Journal,
    attempt_folder,
    fence,
    is_attempt,
    join,
)
from planish.store import Store, tag, upload

logger = logging.getLogger(__name__)

LATEST = "LATEST"
"""Name of a hint for people beside the checkpoints; no code reads it."""
FORMAT = 2
"""Format of a checkpoint that is written; 1 and 2 are read."""
META_KEY = "meta/global.bin"
MAX_COMMIT_BYTES = 1 << 20
MAX_META_BYTES = 4 << 30
_CHECKSUM = "crc32"


@dataclass(frozen=True)
class Commit:
    """The content of COMMIT."""

    attempt: str
    meta_key: str
    """Key of the metadata, relative to the checkpoint's folder."""
    meta_size: int
    meta_sha256: str
    n_objects: int
    """Number of objects of the attempt, the metadata included."""
    total_bytes: int
    """Sum of their sizes."""
    step: int
    roles: tuple[str, ...] = ()
    created_at: float = 0.0
    """Seconds since 1970 by the clock of the store."""
    run_id: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    format: int = FORMAT
    etag: str = field(default="", compare=False)
    """Entity tag of COMMIT as it was read; not stored in it."""

    def encode(self) -> bytes:
        """Return JSON, with a checksum of all fields as the last one."""
        names = [name for name in self.__dataclass_fields__ if name != "etag"]
        fields = {name: getattr(self, name) for name in names}
        return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1).encode()

    @staticmethod
    def decode(data: bytes, *, etag: str = "", uri: str = COMMIT) -> Commit:
        """Parse a commit; `CheckpointCorrupt` if a field is invalid or the format is newer."""
        try:
            known = _fields_of(data)
        except _Fault as fault:
            raise CheckpointCorrupt(f"`{uri}` must {fault}", file=COMMIT) from None
        known["roles"] = tuple(known["roles"])
        known["created_at"] = float(known["created_at"])
        return Commit(**known, etag=etag)


class _Fault(ValueError):
    """Bytes are no commit; the text says what it must be."""


def _fields_of(data: bytes) -> dict[str, Any]:
    """Return the checked fields of a commit; raises `_Fault`."""
    try:
        fields = json.loads(data.decode(), parse_constant=lambda _: math.nan)
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise _Fault(f"be a JSON object, got {data[:40]!r}")
    written = fields.get("format")
    if type(written) is not int or not 1 <= written <= FORMAT:
        is_newer = type(written) is int and written > FORMAT
        by = "a newer version; read it with that version" if is_newer else "something else"
        seen = str(written)[:40]
        raise _Fault(f"be of format 1 to {FORMAT}, got {seen!r}: written by {by}")
    faults = [name for name, check in _CHECKS.items() if not check(fields.get(name))]
    if not faults and fields["meta_key"] != f"a-{fields['attempt']}/{META_KEY}":
        faults = ["meta_key"]
    if faults:
        seen_values = {name: str(fields.get(name))[:80] for name in faults}
        raise _Fault(f"be a commit, got {seen_values}")
    known = {name: fields[name] for name in (*_CHECKS, "format")}
    stated = fields.get(_CHECKSUM)
    if stated != _checksum(known):
        text = str(stated)[:20]
        raise _Fault(f"have the {_CHECKSUM} that it states, {text}, but has been changed")
    return known


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


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


def read_commit(storage: Store, path: str) -> Commit | None:
    """Return the commit at a path, None if there is none; `CheckpointCorrupt` if it is damaged."""
    key = join(path, COMMIT)
    try:
        data, etag = storage.get(key, MAX_COMMIT_BYTES)
    except ObjectMissing:
        return None
    except ObjectTooLarge as error:
        raise CheckpointCorrupt(str(error), file=COMMIT) from None
    return Commit.decode(data, etag=etag, uri=storage.uri(key))


def require_commit(storage: Store, path: str) -> Commit:
    """Return the commit at a path; raises `CheckpointNotFound` if there is none."""
    commit = read_commit(storage, path)
    if commit is None:
        raise CheckpointNotFound(
            f"`{storage.uri(path)}` must hold a committed checkpoint, but has no {COMMIT}; "
            "correct the path, or wait until the save has ended"
        )
    return commit


def read_meta(storage: Store, path: str, commit: Commit) -> bytes:
    """Return the metadata that a commit names; `CheckpointIncomplete` or `CheckpointCorrupt`."""
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
    digest = hashlib.sha256(data).hexdigest()
    if digest != commit.meta_sha256:
        raise CheckpointCorrupt(
            f"`{storage.uri(key)}` must have SHA-256 {commit.meta_sha256}, got {digest}",
            file=commit.meta_key,
        )
    return data


def standing(storage: Store, path: str) -> str:
    """Return the entity tag of COMMIT at a path, "" if there is none."""
    return tag(storage, join(path, COMMIT))


def publish(
    storage: Store,
    path: str,
    attempt: str,
    meta: bytes,
    files: Mapping[str, int],
    *,
    step: int,
    roles: Sequence[str],
    run_id: str = "",
    tags: Mapping[str, str] | None = None,
    replaces: str = "",
    journal: Journal,
    is_newest: bool = True,
) -> Commit:
    """Make an attempt the checkpoint at `path`; all its objects except the metadata are written.

    Args:
        files: key, relative to the attempt's folder, -> size in bytes, for all objects except the
            metadata; all are checked.
        replaces: entity tag, from `standing()`, of the COMMIT to replace; empty if there was none.
        journal: journal of the coordinator, which exists since before any data was written.
        is_newest: True if `LATEST` should name this checkpoint.

    Raises:
        CheckpointExists: another attempt has committed first; this one is garbage.
        CheckpointIncomplete: an object is missing or has another size.
        SaveFailed: the attempt was cleared away.
        StoreUnavailable: the store does not answer; the attempt may be committed or not.
    """
    folder = attempt_folder(path, attempt)
    digest = _put_meta(storage, join(folder, META_KEY), meta)
    journals = _check_objects(storage, folder, files, journal)
    sizes = [len(meta), *files.values()]
    commit = Commit(
        attempt=attempt,
        meta_key=f"a-{attempt}/{META_KEY}",
        meta_size=len(meta),
        meta_sha256=digest,
        n_objects=len(sizes),
        total_bytes=sum(sizes),
        step=step,
        roles=tuple(roles),
        created_at=round(storage.now(), 3),
        run_id=run_id,
        tags=dict(tags or {}),
    )
    etag = _commit(storage, path, commit, replaces, journal)
    journal.close()
    _tidy(storage, path, commit, journals, is_newest=is_newest)
    return replace(commit, etag=etag)


def _put_meta(storage: Store, key: str, meta: bytes) -> str:
    """Write the metadata and read it back; return its digest."""
    with contextlib.suppress(ObjectExists):  # an earlier call wrote it; the digest decides
        if len(meta) < (8 << 20):
            storage.put(key, meta, if_none_match=True)
        else:
            upload(storage, key, meta)
    digest = hashlib.sha256(meta).hexdigest()
    read_back, _ = storage.get(key, MAX_META_BYTES)
    if hashlib.sha256(read_back).hexdigest() != digest:
        raise CheckpointCorrupt(
            f"`{storage.uri(key)}` must come back as it was written (SHA-256 {digest}), but has "
            "changed on the way; save again",
            file=META_KEY,
        )
    return digest


def _check_objects(
    storage: Store, folder: str, files: Mapping[str, int], journal: Journal
) -> list[str]:
    """Check the attempt's objects by one listing; return the keys of its journals."""
    start = join(folder, "")
    sizes = {stat.key[len(start) :]: stat.size for stat in storage.list(folder)}
    faults = [
        f"{name} (must have {size} bytes, got {sizes.get(name, 'none')})"
        for name, size in files.items()
        if sizes.get(name) != size
    ]
    if faults:
        journal.refresh()  # raises SaveFailed if a collection has removed the objects
        raise CheckpointIncomplete(
            f"`{storage.uri(folder)}` must hold all objects of the save, but {len(faults)} differ: "
            + ", ".join(faults[:5])
        )
    return [start + name for name in sizes if name.startswith("journal/")]


def _commit(storage: Store, path: str, commit: Commit, replaces: str, journal: Journal) -> str:
    body = commit.encode()
    if len(body) > MAX_COMMIT_BYTES:
        raise ConfigError(
            f"`tags` must fit into a commit of {MAX_COMMIT_BYTES} bytes, got {len(body)}"
        )
    parts = storage.open_multipart(join(path, COMMIT), len(body))
    try:
        parts.write(1, body)
        journal.add([(parts.key, parts.upload_id)])
        return parts.complete(if_none_match=not replaces, if_match=replaces)
    except StoreError as error:
        # After the abort nothing can complete the upload, so COMMIT decides the outcome.
        parts.abort()
        standing = read_commit(storage, path)
        if standing is not None and standing.attempt == commit.attempt:
            return standing.etag
        place = storage.uri(path)
        if standing is None or standing.etag == replaces:
            raise SaveFailed(
                f"`{place}` could not be committed, nothing has changed there: {error}"
            ) from error
        raise CheckpointExists(
            f"`{place}` must not be committed by anybody else meanwhile, but attempt "
            f"{standing.attempt} of step {standing.step} was; choose another path, or "
            "`overwrite=True`"
        ) from error
    except BaseException:
        with contextlib.suppress(StoreError):
            parts.abort()
        raise


def _tidy(
    storage: Store, path: str, commit: Commit, journals: list[str], *, is_newest: bool
) -> None:
    """Write the hint and remove the journals; the checkpoint is valid even if this fails."""
    root, _, name = path.rpartition("/")
    hint = {"path": name, "attempt": commit.attempt, "step": commit.step}
    try:
        storage.delete(journals)
        if name and is_newest:
            storage.put(join(root, LATEST), json.dumps(hint).encode())
    except StoreError as error:
        logger.warning("%s", telemetry.event("not_settled", path=path, reason=str(error)))


def discard(storage: Store, path: str, attempt: str) -> bool:
    """Remove an attempt; return False if it is the checkpoint at its path, which stays.

    Any process may call it at any time, also repeatedly: a fence first makes sure that the attempt
    can not be committed any more. Raises `SaveFailed` if the owner keeps writing, and
    `CheckpointCorrupt`, without removing anything, if COMMIT can not be read.
    """
    for key, upload_id in fence(storage, path, attempt):
        storage.abort_upload(key, upload_id)
    commit = read_commit(storage, path)
    folder = attempt_folder(path, attempt)
    journals = join(folder, "journal/")
    objects = [stat.key for stat in storage.list(folder)]
    if commit is not None and commit.attempt == attempt:
        storage.delete([key for key in objects if key.startswith(journals)])
        return False
    data = [key for key in objects if not key.startswith(journals)]
    meta = join(folder, "meta/")
    decider = f"{journals}{COORDINATOR}.json"
    for keys in (
        [key for key in data if key.startswith(meta)],
        [key for key in data if not key.startswith(meta)],
        [key for key in objects if key.startswith(journals) and key != decider],
        [decider],
    ):
        if keys:
            storage.delete(keys)
    storage.tidy(folder)
    return True
