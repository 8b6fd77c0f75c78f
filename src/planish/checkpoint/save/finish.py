"""The part of a save after staging: every rank's result to rank 0, then commit or abort for all.

Runs on a background thread (or the caller's, if it waits anyway) and talks over connections of its
own. Whatever goes wrong on one rank becomes `SaveFailed` on every rank, and nothing is visible.
`SaveHandle` is what the caller holds meanwhile.

Source: ByteCheckpoint, arXiv 2407.20143, section 5.2 (integrity barrier off the training thread).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planish.base import telemetry
from planish.base.errors import CheckpointError, CheckpointExists, PeerLost, SaveFailed, StoreError
from planish.checkpoint.commit.commit import Commit, discard, publish, read_commit, standing
from planish.checkpoint.commit.journal import Journal, attempt_folder, join
from planish.checkpoint.format import metafile
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.small_objects import Claim, list_objects
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.ranks.messages import EVERYONE, decode_errors, encode_errors, joined_error
from planish.checkpoint.save.agree import Agreed, SaveOptions
from planish.checkpoint.save.staging import SharedBuffer
from planish.checkpoint.save.upload import Cancelled, UploadResult
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.monitor import CheckpointInfo, Recorder, Timeline, Timing
from planish.store import Store

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""How long ranks wait for each other at the end, beyond what the outcome needs."""

AfterCommit = Callable[[Store, str], None]
"""Called on rank 0 with the storage and the key of the checkpoint before its handle resolves."""


class SaveHandle:
    """A save under way; one on every rank, all ending alike.

    Example:
        >>> handle = SaveHandle("/runs/step-1")
        >>> handle.done()
        False
    """

    def __init__(self, uri: str, *, skipped: str = "") -> None:
        """Follow a save; `skipped` says why it will not happen."""
        self.uri = uri
        self.skipped = skipped
        """Why the save was left out (`inflight="skip"`), empty otherwise."""
        self.stall_seconds = 0.0
        """How long the call held up its caller."""
        self._staged, self._done = threading.Event(), threading.Event()
        self._outcome: CheckpointInfo | BaseException | None = None
        self._cancel: Callable[[], None] = lambda: None
        if skipped:
            self._end(
                SaveFailed(
                    f"`{uri}` was not saved, as asked by `inflight='skip'`: {skipped}; save less "
                    "often, or use `inflight='wait'`"
                )
            )

    def staged(self) -> bool:
        """Return whether the state may be changed."""
        return self._staged.is_set()

    def wait_staged(self, timeout: float | None = None) -> bool:
        """Wait until the state may be changed; returns whether it may."""
        return self._staged.wait(timeout)

    def done(self) -> bool:
        """Return whether the save has been committed or has failed."""
        return self._done.is_set()

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait for the end, whatever it is; returns whether it has come."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Return what was committed, waiting for it.

        Args:
            timeout: Limit on the wait in seconds; the save goes on.

        Raises:
            TimeoutError: neither committed nor failed within `timeout`.
            SaveFailed: a rank failed, or the save was cancelled or skipped; nothing is visible.
            CheckpointExists: something else is committed there.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"the save of `{self.uri}` must end within {timeout} s, but goes on")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def cancel(self) -> None:
        """Ask all ranks to give the save up; too late, it is committed all the same."""
        self._cancel()

    def _end(self, outcome: CheckpointInfo | BaseException) -> None:
        self._outcome = outcome
        self._staged.set()
        self._done.set()


@dataclass(frozen=True)
class Early:
    """A buffer that has been filled before all ranks have settled the plan."""

    buffer: SharedBuffer
    seconds: float
    """What filling it has taken."""


@dataclass
class Pending:
    """A save that is agreed on and on its way."""

    options: SaveOptions
    call: Control
    """The operation, over the background connection."""
    agreed: Agreed
    storage: Store
    path: str
    handle: SaveHandle
    recorder: Recorder
    upload: Callable[[], UploadResult]
    """Waits for this rank's objects to be written."""
    give_up: Callable[[], None]
    """Ends the upload, if it goes on, and returns when nothing more is written."""
    release: Callable[[], None]
    """Gives the staging memory back."""
    after_commit: AfterCommit | None = None
    journal: Journal | None = None
    """The coordinator's, once it is begun."""
    replaces: str = ""
    """Entity tag of what is committed at the path, empty for nothing."""
    large_keys: tuple[str, ...] = ()
    """What rank 0 writes in parts under the coordinator's journal."""
    early: Early | None = None
    """What this rank has staged already."""
    failure: BaseException | None = None
    """What happened to this rank outside of the upload."""

    @property
    def folder(self) -> str:
        """Key of the attempt's folder."""
        return attempt_folder(self.path, self.agreed.attempt)

    def check(self) -> None:
        """Raise if this save has been given up, here or elsewhere."""
        if self.failure is not None:
            raise self.failure
        self.call.check()

    def let_go(self) -> None:
        """Give staging memory back, and keep nothing of the state alive."""
        self.release()
        # These refer back to this object; tensors would live until the garbage collector comes.
        self.upload, self.give_up, self.release = UploadResult, _nothing, _nothing
        self.handle._cancel = _nothing
        self.agreed.items, self.agreed.small, self.after_commit = [], [], None

    def cancel(self) -> None:
        """Give the save up on all ranks."""
        self.failure = self.failure or SaveFailed("the save was cancelled")


def _nothing() -> None:
    return None


def finish(save: Pending) -> None:
    """Bring a save to its end, which its handle then gives."""
    recorder = save.recorder
    try:
        info = _run(save)
    except BaseException as error:
        # A store that does not answer must not keep the error from the caller.
        clearing = threading.Thread(target=_clear, args=(save,), name="clear", daemon=True)
        clearing.start()
        clearing.join(max(save.call.remaining_s, 2 * LEAVE_SECONDS))
        monitor.publish_failure("save", error)
        save.handle._end(error)
        return
    finally:
        save.let_go()
    with recorder.stage("barrier"):
        save.call.leave_together("end", LEAVE_SECONDS)
    own = recorder.timeline()
    monitor.publish(own, recorder.rank)
    # This rank's records in full, and what others have sent.
    others = [record for record in info.timings.records if record.rank != recorder.rank]
    save.handle._end(dataclasses.replace(info, timings=Timeline(own.records + others)))


def _run(save: Pending) -> CheckpointInfo:
    """Upload, let rank 0 commit, and return what all ranks are told of it."""
    try:
        result = _upload(save)
        message = {
            "files": [dataclasses.astuple(file) for file in result.files],
            "claims": [small.claim() for small in save.agreed.small],
            "timings": [dataclasses.astuple(row) for row in save.recorder.timeline().records],
        }
        gathered = save.call.gather(json.dumps(message).encode(), "results")
        reply, timeline = None, Timeline()
        if gathered is not None:
            reply, timeline = _commit(save, gathered)
        reply = save.call.broadcast(reply, "outcome")
    except PeerLost as error:
        # The coordinator is gone: the store itself knows how the save has ended.
        commit = None
        with contextlib.suppress(StoreError, CheckpointError):
            commit = read_commit(save.storage, save.path)
        if commit is not None and commit.attempt == save.agreed.attempt:
            return CheckpointInfo(**_info(save, commit))
        raise SaveFailed(
            f"rank 0 must live until the save is committed, but: {error}", per_rank={0: str(error)}
        ) from error
    outcome = json.loads(reply)
    if outcome["errors"]:
        raise joined_error(decode_errors(outcome["errors"].encode()), save.call.size)
    info = outcome["info"]
    return CheckpointInfo(**{**info, "roles": tuple(info["roles"])}, timings=timeline)


def _upload(save: Pending) -> UploadResult:
    """Write this rank's objects; an error here ends the save on all ranks.

    Rank 0 first refuses a path that is taken, and announces the attempt.
    """
    call = save.call
    try:
        if call.rank == 0:
            save.replaces = standing(save.storage, save.path)
            if save.replaces and not save.options.overwrite:
                commit = read_commit(save.storage, save.path)
                taken = f"step {commit.step}" if commit is not None else "a checkpoint"
                raise CheckpointExists(
                    f"`{save.options.uri}` must be free, but has {taken} committed; choose another "
                    "path, or `overwrite=True`"
                )
            save.journal = Journal(save.storage, save.path, save.agreed.attempt)
            save.journal.begin(save.large_keys)
            save.journal.keep()
        if save.failure is not None:
            raise save.failure
        call.note(f"uploading for {save.options.uri}")
        result = save.upload()
        call.note(f"uploaded for {save.options.uri}")
        return result
    except BaseException as error:
        try:
            call.check()
        except Exception as earlier:  # who failed first is the reason
            reason = earlier
        else:
            reason = joined_error({call.rank: _reason(call.rank, error)}, call.size)
            with contextlib.suppress(PeerLost):
                call.abort(reason)
        save.give_up()
        raise reason from error


def _reason(rank: int, error: BaseException) -> Exception:
    if isinstance(error, CheckpointExists):
        return error
    if isinstance(error, Cancelled):
        error = SaveFailed("the save was cancelled")
    kind = "" if isinstance(error, SaveFailed) else f"{type(error).__name__}: "
    text = f"{kind}{error}".removesuffix(": ")
    return SaveFailed(f"rank {rank} could not do its part: {text}", per_rank={rank: text})


def _commit(save: Pending, gathered: Sequence[bytes]) -> tuple[bytes, Timeline]:
    """Make the checkpoint visible; returns what all ranks are told, and all records."""
    results = [json.loads(part) for part in gathered]
    timeline = Timeline([Timing(*row) for result in results for row in result["timings"]])
    options = save.options
    try:
        with save.recorder.stage("meta"):
            meta = build_metadata(save, results)
            data = metafile.encode(meta)
        with save.recorder.stage("commit", num_bytes=len(data)):
            sizes = dict(zip(meta.files.keys, meta.files.sizes, strict=True))
            commit = publish(
                save.storage,
                save.path,
                save.agreed.attempt,
                data,
                sizes,
                step=options.step,
                roles=save.agreed.roles,
                run_id=options.run_id,
                tags=options.tags,
                overwrite=options.overwrite,
                replaces=save.replaces,
                journal=save.journal,
            )
    except Exception as error:
        reason = error if isinstance(error, CheckpointError) else _reason(0, error)
        text = encode_errors({EVERYONE: reason}).decode()
        return json.dumps({"errors": text, "info": {}}).encode(), timeline
    try:
        # The checkpoint exists, whatever becomes of this.
        monitor.publish_commit(commit.step, commit.created_at)
        # Rank 0's own have grown since it sent them to itself.
        others = [record for record in timeline.records if record.rank != save.call.rank]
        everything = Timeline(save.recorder.timeline().records + others)
        if save.call.size > 1:
            monitor.warn_of_stragglers(timeline)
        monitor.store_timings(save.storage, save.path, commit.attempt, everything)
        if save.after_commit is not None:
            save.after_commit(save.storage, save.path)
    except Exception:
        logger.exception(telemetry.event("after_commit_failed", uri=save.options.uri))
    return json.dumps({"errors": "", "info": _info(save, commit)}).encode(), timeline


def build_metadata(save: Pending, results: Sequence[Mapping[str, Any]]) -> Metadata:
    """Return the global metadata: the plan's, with checksums and small objects.

    Raises:
        SaveFailed: a rank has not written what was planned.
    """
    whole = save.agreed.prepared.whole
    assert whole is not None, "rank 0 keeps the plan of all ranks"
    options = save.options
    header = {**options.header, "step": options.step, "roles": list(save.agreed.roles)}
    if save.agreed.facts:
        header["facts"] = save.agreed.facts
    meta = whole.metadata(header)
    rows = {key: row for row, key in enumerate(meta.files.keys)}
    start = len(join(save.folder, ""))
    missing = set(rows)
    written: dict[int, list[Claim]] = {}
    for rank, result in enumerate(results):
        claims = {claim[0]: Claim(*claim) for claim in result["claims"]}
        for full, size, algorithm, checksums in result["files"]:
            key = full[start:]
            crcs = np.array(checksums, np.uint32)
            if key in claims:
                meta.files.add(key, size, algorithm=algorithm, crcs=crcs)
                written.setdefault(rank, []).append(claims[key])
                continue
            row = rows[key]
            missing.discard(key)
            meta.files.sizes[row], meta.files.algorithms[row] = size, algorithm
            meta.files.crcs[row] = crcs
    if missing:
        raise SaveFailed(f"every planned object must be written, but {sorted(missing)[:5]} are not")
    meta.objects.update(list_objects(written))
    return meta


def _info(save: Pending, commit: Commit) -> dict[str, Any]:
    """Return the fields of `CheckpointInfo` that all ranks are told."""
    return {
        "uri": save.options.uri,
        "step": commit.step,
        "attempt": commit.attempt,
        "sha256": commit.meta_sha256,
        "num_bytes": commit.total_bytes,
        "layout": str(save.options.header.get("layout", "")),
        "roles": commit.roles,
    }


def _clear(save: Pending) -> None:
    """Remove what a failed save has written, once all ranks have stopped writing."""
    save.call.leave_together("end", LEAVE_SECONDS)
    if save.journal is not None:
        save.journal.close()
    if save.call.rank != 0:
        return
    try:
        discard(save.storage, save.path, save.agreed.attempt)
    except Exception as error:
        # A collection finds it later by its age.
        logger.warning(
            telemetry.event("attempt_not_cleared", uri=save.options.uri, reason=str(error))
        )
