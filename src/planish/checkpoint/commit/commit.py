"""COMMIT: the one object that makes a checkpoint exist, and how it comes into being.

The commit is written as an upload of one part which the coordinator's journal has announced, so
that completing it is the single step that makes the checkpoint visible, and aborting it makes
that step impossible for ever. A process that was paused for hours can not do harm by resuming.
Nothing here knows tensors.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from dataclasses import replace

from planish.base import telemetry
from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointIncomplete,
    ConfigError,
    ObjectExists,
    ObjectMissing,
    SaveFailed,
    StoreError,
)
from planish.checkpoint.commit.journal import (
    COMMIT,
    COORDINATOR,
    Journal,
    attempt_folder,
    fence,
    join,
    new_attempt,
)
from planish.checkpoint.commit.record import (
    MAX_COMMIT_BYTES,
    MAX_META_BYTES,
    META_KEY,
    Commit,
    Facts,
    read_commit,
    read_meta,
    require_commit,
)
from planish.checkpoint.storage.base import Storage, upload

__all__ = [
    "COMMIT",
    "Commit",
    "Facts",
    "LATEST",
    "discard",
    "new_attempt",
    "publish",
    "read_commit",
    "read_meta",
    "require_commit",
    "standing",
]

logger = logging.getLogger(__name__)

LATEST = "LATEST"
"""A hint for people beside the checkpoints; nothing here believes it."""


def standing(storage: Storage, path: str) -> str:
    """Return the entity tag of what is committed at a path, "" for nothing; read no content."""
    try:
        return storage.head(join(path, COMMIT)).etag
    except ObjectMissing:
        return ""


def publish(
    storage: Storage,
    path: str,
    attempt: str,
    meta: bytes,
    facts: Facts,
    *,
    overwrite: bool = False,
    replaces: str | None = None,
    journal: Journal | None = None,
) -> Commit:
    """Make an attempt, all of whose objects are written, the checkpoint at `path`.

    Args:
        storage: where.
        path: key of the checkpoint's folder.
        attempt: whose objects are meant.
        meta: bytes of the global metadata.
        facts: what the commit says; every file is checked to be there with its size.
        overwrite: replace a committed checkpoint.
        replaces: `standing()` at the start of the save, with `overwrite`; None reads it now.
        journal: the coordinator's, begun before anybody wrote data; None begins one now, which
            suffices where no collection can run meanwhile.

    Returns:
        What is committed now.

    Raises:
        CheckpointExists: another attempt has committed first; this one is garbage.
        CheckpointIncomplete: an object is missing or has another size.
        SaveFailed: the attempt was cleared away.
        StoreUnavailable: the store can not be asked whether it is committed; it may be.
    """
    if replaces is None:
        replaces = standing(storage, path) if overwrite else ""
    if journal is None:
        journal = Journal(storage, path, attempt)
        journal.begin()
    folder = attempt_folder(path, attempt)
    digest = _put_meta(storage, join(folder, META_KEY), meta)
    journals = _check_objects(storage, folder, facts, journal)
    sizes = [len(meta), *facts.files.values()]
    commit = Commit(
        attempt=attempt,
        meta_key=f"a-{attempt}/{META_KEY}",
        meta_size=len(meta),
        meta_sha256=digest,
        n_objects=len(sizes),
        total_bytes=sum(sizes),
        step=facts.step,
        roles=tuple(facts.roles),
        created_at=round(storage.now(), 3),
        run_id=facts.run_id,
        tags=dict(facts.tags),
    )
    etag = _commit(storage, path, commit, replaces, journal)
    journal.close()
    _settle(storage, path, commit, journals)
    return replace(commit, etag=etag)


def _put_meta(storage: Storage, key: str, meta: bytes) -> str:
    """Write the metadata and read it back; return its digest."""
    with contextlib.suppress(ObjectExists):  # an earlier call wrote it; the digest decides
        if len(meta) < (8 << 20):
            storage.put(key, meta, if_none_match=True)
        else:
            upload(storage, key, meta)
    digest = hashlib.sha256(meta).hexdigest()
    found, _ = storage.get(key, MAX_META_BYTES)
    if hashlib.sha256(found).hexdigest() != digest:
        raise CheckpointCorrupt(
            f"`{storage.uri(key)}` must come back as it was written (SHA-256 {digest}), but has "
            "changed on the way; save again",
            file=META_KEY,
        )
    return digest


def _check_objects(storage: Storage, folder: str, facts: Facts, journal: Journal) -> list[str]:
    """Check the attempt's objects by one listing; return the keys of its journals."""
    start = join(folder, "")
    found = {stat.key[len(start) :]: stat.size for stat in storage.list(folder)}
    faults = [
        f"{name} (must have {size} bytes, got {found.get(name, 'none')})"
        for name, size in facts.files.items()
        if found.get(name) != size
    ]
    if faults:
        journal.refresh()  # raises if the attempt was cleared away: that is why then
        raise CheckpointIncomplete(
            f"`{storage.uri(folder)}` must hold all objects of the save, but {len(faults)} differ: "
            + ", ".join(faults[:5])
        )
    return [start + name for name in found if name.startswith("journal/")]


def _commit(storage: Storage, path: str, commit: Commit, replaces: str, journal: Journal) -> str:
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
        # Whatever was answered or lost: once the upload is gone, what COMMIT says is final.
        parts.abort()
        found = read_commit(storage, path)
        if found is not None and found.attempt == commit.attempt:
            return found.etag
        raise _not_committed(storage, path, found, replaces, error) from error
    except BaseException:
        with contextlib.suppress(StoreError):
            parts.abort()
        raise


def _not_committed(
    storage: Storage, path: str, found: Commit | None, replaces: str, error: StoreError
) -> CheckpointError:
    """Tell by what stands there why an attempt is not the checkpoint and never will be."""
    place = storage.uri(path)
    if found is None or found.etag == replaces:
        return SaveFailed(f"`{place}` could not be committed, nothing has changed there: {error}")
    return CheckpointExists(
        f"`{place}` must not be committed by anybody else meanwhile, but attempt {found.attempt} "
        f"of step {found.step} was; choose another path, or `overwrite=True`"
    )


def _settle(storage: Storage, path: str, commit: Commit, journals: list[str]) -> None:
    """Write the hint and remove the journals; a checkpoint without these is as good."""
    root, _, name = path.rpartition("/")
    hint = {"path": name, "attempt": commit.attempt, "step": commit.step}
    try:
        storage.delete(journals)
        if name:
            storage.put(join(root, LATEST), json.dumps(hint).encode())
    except StoreError as error:
        logger.warning("%s", telemetry.event("not_settled", path=path, reason=str(error)))


def discard(storage: Storage, path: str, attempt: str) -> bool:
    """Clear an attempt away, unless it is or has become the checkpoint at its path.

    Safe at any time and from any process: the attempt is fenced first, and from then on can not
    be committed. May be repeated after any failure.

    Returns:
        Whether it is gone; False when COMMIT names it.

    Raises:
        SaveFailed: its owner keeps writing.
        CheckpointCorrupt: COMMIT can not be read, so that nothing may be removed.
    """
    for key, upload_id in fence(storage, path, attempt):
        storage.abort_upload(key, upload_id)
    commit = read_commit(storage, path)
    folder = attempt_folder(path, attempt)
    journals = join(folder, "journal/")
    found = [stat.key for stat in storage.list(folder)]
    if commit is not None and commit.attempt == attempt:
        storage.delete([key for key in found if key.startswith(journals)])
        return False
    data = [key for key in found if not key.startswith(journals)]
    meta = join(folder, "meta/")
    decider = f"{journals}{COORDINATOR}.json"
    for keys in (
        [key for key in data if key.startswith(meta)],
        [key for key in data if not key.startswith(meta)],
        [key for key in found if key.startswith(journals) and key != decider],
        [decider],
    ):
        if keys:
            storage.delete(keys)
    storage.tidy(folder)
    return True
