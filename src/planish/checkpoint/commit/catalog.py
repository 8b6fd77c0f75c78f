"""Catalog of the checkpoints below a root, and removal of old ones and of leftovers.

A checkpoint is a folder with a COMMIT: the root itself, or a folder at most two levels below it. A
removal deletes COMMIT first, and fences an attempt before it deletes its data, so that no save can
commit to missing bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from planish.base import telemetry
from planish.base.errors import CheckpointCorrupt, CheckpointExists, ConfigError, SaveFailed
from planish.checkpoint.commit.commit import (
    LATEST,
    Commit,
    discard,
    read_commit,
    require_commit,
)
from planish.checkpoint.commit.journal import (
    COMMIT,
    announced,
    attempt_folder,
    is_attempt,
    join,
    started,
)
from planish.store import Folder, Store

logger = logging.getLogger(__name__)

GRACE_SECONDS = 86400.0
_DEPTH = 2
_THREADS = 8


class Entry(NamedTuple):
    """A committed checkpoint."""

    path: str
    uri: str
    commit: Commit

    @property
    def step(self) -> int:
        """Training step of the save."""
        return self.commit.step

    @property
    def pin(self) -> str:
        """Pin: `<uri>#sha256=<digest>`."""
        return f"{self.uri}#sha256={self.commit.meta_sha256}"

    @property
    def order(self) -> tuple[int, str]:
        """Sort key: the step, then the attempt, which begins with its time."""
        return self.commit.step, self.commit.attempt


class CatalogVerdict(NamedTuple):
    """Decision on a checkpoint or a leftover, and its reason."""

    key: str
    """Folder of the checkpoint or the attempt, or `key@upload-id` of an upload."""
    action: Literal["keep", "delete"]
    reason: str


class _Place(NamedTuple):
    """A folder that holds a commit or attempts."""

    path: str
    content: Folder

    def attempts(self) -> list[str]:
        names = [folder.rpartition("/")[2] for folder in self.content.folders]
        return [name[2:] for name in names if name.startswith("a-") and is_attempt(name[2:])]

    def commit_modified(self) -> float | None:
        name = join(self.path, COMMIT)
        return next((stat.modified for stat in self.content.objects if stat.key == name), None)


def _places(storage: Store, root: str) -> list[_Place]:
    """Return every folder with a commit or attempts, at most `_DEPTH` levels below `root`."""
    places: list[_Place] = []
    level = [root]
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in range(_DEPTH + 1):
            contents = pool.map(storage.folder, level)
            looked_at = [_Place(*pair) for pair in zip(level, contents, strict=True)]
            level = []
            for place in looked_at:
                if place.commit_modified() is not None or place.attempts():
                    places.append(place)
                else:
                    level += place.content.folders
    return places


def list_checkpoints(storage: Store, root: str) -> list[Entry]:
    """Return the committed checkpoints at and below `root`, oldest step first.

    A checkpoint with a damaged COMMIT is left out, with a warning.
    """
    places = _places(storage, root)
    committed = [place.path for place in places if place.commit_modified() is not None]

    def read(path: str) -> Commit | None:
        try:
            return read_commit(storage, path)
        except CheckpointCorrupt as error:
            logger.warning("%s", telemetry.event("commit_unreadable", path=path, reason=str(error)))
            return None

    with ThreadPoolExecutor(_THREADS) as pool:
        entries = [
            Entry(path, storage.uri(path), commit)
            for path, commit in zip(committed, pool.map(read, committed), strict=True)
            if commit is not None
        ]
    return sorted(entries, key=lambda entry: entry.order)


def latest(storage: Store, root: str) -> Entry | None:
    """Return the checkpoint of the highest step at and below `root`, None if there is none."""
    entries = list_checkpoints(storage, root)
    return entries[-1] if entries else None


def info(storage: Store, path: str) -> Entry:
    """Return the checkpoint at a path; raises `CheckpointNotFound` if none is committed there."""
    return Entry(path, storage.uri(path), require_commit(storage, path))


def delete(storage: Store, path: str) -> None:
    """Remove the checkpoint at a path; the first request makes it invisible.

    Raises `CheckpointExists`, and removes nothing, if a save has replaced it meanwhile.
    """
    commit = require_commit(storage, path)
    if not _remove(storage, path, commit):
        raise CheckpointExists(
            f"`{storage.uri(path)}` must hold step {commit.step} until it is removed, but another "
            "save has replaced it; remove that one if it is to go too"
        )


def _remove(storage: Store, path: str, commit: Commit) -> bool:
    is_gone = storage.delete_exact(join(path, COMMIT), commit.etag)
    return is_gone and discard(storage, path, commit.attempt)


def retain(
    storage: Store,
    root: str,
    *,
    keep_last: int = 3,
    keep_every: int = 0,
    pins: Iterable[int | str] = (),
    dry_run: bool = False,
) -> list[CatalogVerdict]:
    """Remove the checkpoints at and below `root` that no rule keeps.

    These stay: the newest `keep_last`; steps that are multiples of `keep_every` (0: no such rule);
    `pins`, which are steps, keys or URIs of folders. `dry_run` only returns the verdicts.

    Returns:
        A verdict for each checkpoint, newest first.
    """
    if keep_last < 1 or keep_every < 0:
        raise ConfigError(
            "`keep_last` must be at least 1 and `keep_every` at least 0, "
            f"got {keep_last} and {keep_every}"
        )
    pinned = {p if isinstance(p, int) else p.partition("#")[0].rstrip("/") for p in pins}
    verdicts = []
    for number, entry in enumerate(reversed(list_checkpoints(storage, root))):
        verdict = CatalogVerdict(entry.path, "delete", f"step {entry.step}: no rule keeps it")
        reason = ""
        if number < keep_last:
            reason = f"one of the newest {keep_last}"
        elif keep_every and entry.step % keep_every == 0:
            reason = f"step {entry.step}, every {keep_every}"
        elif pinned & {entry.step, entry.path, entry.uri}:
            reason = "pinned"
        elif not dry_run and not _remove(storage, entry.path, entry.commit):
            reason = "another save has replaced it"
        verdicts.append(CatalogVerdict(entry.path, "keep", reason) if reason else verdict)
    return verdicts


def gc(
    storage: Store, root: str, *, grace_s: float = GRACE_SECONDS, dry_run: bool = False
) -> list[CatalogVerdict]:
    """Remove the leftovers of saves, retention and crashes at and below `root`.

    It may run beside saves and loads, and again after a kill at any time. An attempt that was
    written to, or replaced, within `grace_s` seconds stays. If that is less than the duration of a
    save or load, this save or load may fail, but never gives a wrong result. Return a verdict for
    each attempt, and for each upload of a COMMIT or LATEST.
    """
    verdicts: list[CatalogVerdict] = []
    places = _places(storage, root)
    for place in places:
        verdicts += _collect_place(storage, place, grace_s, dry_run)
    for folder in {root, *(place.path.rpartition("/")[0] for place in places)}:
        verdicts += _collect_uploads(storage, None, join(folder, LATEST), grace_s, dry_run)
    return verdicts


def _collect_place(
    storage: Store, place: _Place, grace_s: float, dry_run: bool
) -> list[CatalogVerdict]:
    try:
        commit = read_commit(storage, place.path)
    except CheckpointCorrupt as error:
        return [CatalogVerdict(place.path, "keep", f"nothing is safe to remove: {error}")]
    verdicts: list[CatalogVerdict] = []
    for attempt in place.attempts():
        verdict = _judge(storage, place, attempt, commit, grace_s)
        if verdict.action == "delete" and not dry_run:
            try:
                discard(storage, place.path, attempt)
            except SaveFailed as error:
                verdict = CatalogVerdict(verdict.key, "keep", str(error))
        verdicts.append(verdict)
    return verdicts + _collect_uploads(storage, place, join(place.path, COMMIT), grace_s, dry_run)


def _judge(
    storage: Store, place: _Place, attempt: str, commit: Commit | None, grace_s: float
) -> CatalogVerdict:
    """Return the verdict on an attempt, or on journals that its commit should have removed."""
    folder = attempt_folder(place.path, attempt)
    objects = list(storage.list(folder))
    now = storage.now()
    if commit is not None and commit.attempt == attempt:
        start = join(folder, "journal/")
        journals = [stat.modified for stat in objects if stat.key.startswith(start)]
        if journals and max(0.0, now - max(journals)) >= grace_s:
            return CatalogVerdict(start + "*", "delete", "journals of a save that is committed")
        return CatalogVerdict(folder, "keep", f"committed as step {commit.step}")
    # The age counts from the last write or the replacement, so readers also get `grace_s`.
    touched = [stat.modified for stat in objects]
    touched += [started(attempt), place.commit_modified() or 0.0]
    age = max(0.0, now - max(touched))  # the store's clock may have a resolution of 1 s
    if age < grace_s:
        return CatalogVerdict(
            folder, "keep", f"written or replaced {age:.0f} s ago, less than {grace_s}"
        )
    size = sum(stat.size for stat in objects)
    return CatalogVerdict(
        folder, "delete", f"not committed, idle for {age:.0f} s, {len(objects)} objects, {size} B"
    )


def _collect_uploads(
    storage: Store, place: _Place | None, key: str, grace_s: float, dry_run: bool
) -> list[CatalogVerdict]:
    """Abort old uploads of one key that no journal names, because their process died early."""
    uploads = storage.open_uploads(key)
    if not uploads:
        return []
    named: set[str] = set()
    if place is not None:
        for attempt in place.attempts():
            named |= {upload for _, upload in announced(storage, place.path, attempt)}
    verdicts = []
    for upload in uploads:
        name = f"{key}@{upload.upload_id}"
        age = max(0.0, storage.now() - upload.started)
        verdict = CatalogVerdict(name, "keep", f"an upload begun {age:.0f} s ago")
        if upload.upload_id not in named and age >= grace_s:
            reason = f"an upload that no journal names, begun {age:.0f} s ago"
            verdict = CatalogVerdict(name, "delete", reason)
            if not dry_run:
                storage.abort_upload(key, upload.upload_id)
        verdicts.append(verdict)
    return verdicts
