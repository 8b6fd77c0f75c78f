"""Second part of a save, during training: write, gather on rank 0, commit or abort for all ranks.

It runs on a background thread with its own connections. A failure of one rank becomes `SaveFailed`
on every rank, and nothing is visible. The caller has a `SaveHandle` meanwhile.
`engine.SaveEngine.save` calls the steps in order.

Source: ByteCheckpoint, arXiv 2407.20143, section 5.2 (integrity barrier off the training thread).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from planish.checkpoint.ranks.messages import joined_error
from planish.checkpoint.saving.agree import Agreed, SaveOptions
from planish.checkpoint.saving.staging import SharedBuffer, StagingPool
from planish.checkpoint.saving.upload import UploadJob
from planish.checkpoint.saving.uploader import Uploader
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.monitor import CheckpointInfo, Recorder, Timeline, Timing
from planish.store import Store

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""Longest wait of a rank for the others at the end of a save, once it knows the outcome."""

AfterCommit = Callable[[Store, str], None]
"""Rank 0 calls it with the store and the checkpoint's key before the handle resolves."""


class SaveHandle:
    """Handle of a save under way; each rank has one, and all have the same outcome."""

    def __init__(self, uri: str, *, skipped: str = "") -> None:
        self.uri = uri
        self.skipped = skipped
        """Reason for a skipped save (`inflight="skip"`), empty otherwise."""
        self.stall_seconds = 0.0
        """Seconds for which the call blocked its caller."""
        self._is_cancelled = False
        self._done = threading.Event()
        self._outcome: CheckpointInfo | BaseException | None = None
        if skipped:
            self._end(
                SaveFailed(
                    f"`{uri}` was not saved, as asked by `inflight='skip'`: {skipped}; save less "
                    "often, or use `inflight='wait'`"
                )
            )

    def done(self) -> bool:
        """Return whether the save has been committed or has failed."""
        return self._done.is_set()

    def wait_done(self, timeout: float | None = None) -> bool:
        """Wait until the save has committed or failed; return False after `timeout` seconds."""
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> CheckpointInfo:
        """Wait for the commit and return the checkpoint.

        Raises:
            TimeoutError: neither committed nor failed within `timeout` seconds; the save goes on.
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
        """Ask all ranks to cancel the save; no effect once this rank has uploaded its objects."""
        self._is_cancelled = True

    def _end(self, outcome: CheckpointInfo | BaseException) -> None:
        self._outcome = outcome
        self._done.set()


@dataclass
class Save:
    """One rank's state of a save after the agreement."""

    options: SaveOptions
    call: Control
    """The operation, over the background connection."""
    agreed: Agreed
    storage: Store
    path: str
    handle: SaveHandle
    recorder: Recorder
    after_commit: AfterCommit | None
    buffer: SharedBuffer | None = None
    thread_storage: Store | None = None
    """Store to which a thread of this process writes; None if the uploading process writes."""
    job: UploadJob | None = None
    failure: BaseException | None = None
    """Error of this rank while it staged."""
    journal: Journal | None = None
    """Journal of the coordinator, on rank 0 once the attempt is announced."""
    replaces: str = ""
    """Entity tag of the COMMIT that stood at the path, on rank 0; empty if there was none."""
    others: list[Timing] = field(default_factory=list)
    """Timings of the other ranks, on rank 0."""

    def check(self) -> None:
        """Raise if this save has failed, was cancelled, or is over its time limit, on any rank."""
        if self.failure is not None:
            raise self.failure
        if self.handle._is_cancelled:
            raise SaveFailed("the save was cancelled")
        self.call.check()
        if not self.call.remaining_s:
            raise SaveFailed(
                "the upload must end within `timeout_s`, but has not; is the store slow?"
            )


def write(save: Save, uploader: Uploader) -> bytes:
    """Write this rank's objects; return its results for rank 0. An error is raised on all ranks.

    Rank 0 first refuses a path that has a checkpoint (unless `overwrite`), and begins its journal.
    """
    call = save.call
    try:
        if call.rank == 0:
            _announce(save)
        save.check()
        assert save.job is not None
        assert save.buffer is not None
        call.note(f"uploading for {save.options.uri}")
        written = uploader.upload(save.job, save.buffer, save.thread_storage, save.check)
        call.note(f"uploaded for {save.options.uri}")
    except BaseException as error:
        try:
            call.check()
        except Exception as earlier:  # the first failure of any rank is the reason
            reason = earlier
        else:
            reason = joined_error({call.rank: _reason(call.rank, error)}, call.size)
            with contextlib.suppress(PeerLost):
                call.abort(reason)
        uploader.give_up()
        raise reason from error
    save.recorder.extend(Timing(*row) for row in written["timings"])
    message = {
        "files": written["files"],
        "claims": [small.claim for small in save.agreed.small],
        "timings": [dataclasses.astuple(row) for row in save.recorder.timeline().records],
    }
    return json.dumps(message).encode()


def _announce(save: Save) -> None:
    save.replaces = standing(save.storage, save.path)
    if save.replaces and not save.options.overwrite:
        commit = read_commit(save.storage, save.path)
        if commit is not None:
            raise CheckpointExists(
                f"`{save.options.uri}` must be free, but has step {commit.step} committed; choose "
                "another path, or `overwrite=True`"
            )
    save.journal = Journal(save.storage, save.path, save.agreed.attempt)
    save.journal.begin()
    save.journal.keep()


def _reason(rank: int, error: BaseException) -> Exception:
    if isinstance(error, CheckpointExists):
        return error
    kind = "" if isinstance(error, SaveFailed) else f"{type(error).__name__}: "
    text = f"{kind}{error}".removesuffix(": ")
    return SaveFailed(f"rank {rank} could not do its part: {text}", per_rank={rank: text})


def commit(save: Save, gathered: Sequence[bytes]) -> bytes:
    """Make the checkpoint visible, on rank 0; return its `CheckpointInfo` as JSON for all ranks."""
    results = [json.loads(part) for part in gathered]
    records = [Timing(*row) for result in results for row in result["timings"]]
    # Rank 0's records are not final yet: the stages `meta` and `commit` are still to come.
    save.others = [record for record in records if record.rank != save.call.rank]
    options, journal = save.options, save.journal
    assert journal is not None
    try:
        with save.recorder.stage("meta"):
            meta = _metadata(save, results)
            data = metafile.encode(meta)
        with save.recorder.stage("commit", num_bytes=len(data)):
            made = publish(
                save.storage,
                save.path,
                save.agreed.attempt,
                data,
                dict(zip(meta.files.keys, meta.files.sizes, strict=True)),
                step=options.step,
                roles=save.agreed.roles,
                run_id=options.run_id,
                tags=options.tags,
                replaces=save.replaces,
                journal=journal,
            )
    except CheckpointError:
        raise
    except Exception as error:
        raise _reason(0, error) from error
    try:
        # The checkpoint exists, even if one of these calls fails.
        monitor.publish_commit(made.step, made.created_at)
        if save.call.size > 1:
            monitor.warn_of_stragglers(Timeline(records))
        everything = Timeline(save.recorder.timeline().records + save.others)
        monitor.store_timings(save.storage, save.path, made.attempt, everything)
        if save.after_commit is not None:
            save.after_commit(save.storage, save.path)
    except Exception:
        logger.exception(telemetry.event("after_commit_failed", uri=options.uri))
    return json.dumps(_info(save, made)).encode()


def _metadata(save: Save, results: Sequence[Mapping[str, Any]]) -> Metadata:
    """Return the global metadata: those of the plan, with file checksums and small objects."""
    whole = save.agreed.whole
    assert whole is not None, "rank 0 keeps the plan of all ranks"
    options = save.options
    header = {**options.header, "step": options.step, "roles": list(save.agreed.roles)}
    if save.agreed.facts:
        header["facts"] = save.agreed.facts
    meta = whole.metadata(header)
    rows = {key: row for row, key in enumerate(meta.files.keys)}
    start = len(join(attempt_folder(save.path, save.agreed.attempt), ""))
    written: dict[int, list[Claim]] = {}
    for rank, result in enumerate(results):
        claims = {claim[0]: Claim(*claim) for claim in result["claims"]}
        for full, size, algorithm, checksums in result["files"]:
            key = full[start:]
            crcs = np.array(checksums, np.uint32)
            if key in claims:
                meta.files.add(key, size, algorithm=algorithm, crcs=crcs)
                written.setdefault(rank, []).append(claims[key])
            else:
                row = rows[key]
                meta.files.sizes[row], meta.files.algorithms[row] = size, algorithm
                meta.files.crcs[row] = crcs
    meta.objects.update(list_objects(written))
    return meta


def _info(save: Save, made: Commit) -> dict[str, Any]:
    return {
        "uri": save.options.uri,
        "step": made.step,
        "attempt": made.attempt,
        "sha256": made.meta_sha256,
        "num_bytes": made.total_bytes,
        "layout": str(save.options.header.get("layout", "")),
        "roles": made.roles,
    }


def end(save: Save, act: Callable[[], CheckpointInfo], pool: StagingPool) -> None:
    """Run `act`, clean up, and resolve the handle with the result or the error of `act`."""
    try:
        try:
            info = act()
        except PeerLost as error:
            info = _seen_in_store(save, error)
    except BaseException as error:
        # The join has a limit: a store that does not answer must not hide the error.
        clearing = threading.Thread(target=_clear, args=(save,), name="clear", daemon=True)
        clearing.start()
        clearing.join(max(save.call.remaining_s, 2 * LEAVE_SECONDS))
        monitor.publish_failure("save", error)
        _release(save, pool)
        save.handle._end(error)
        return
    _release(save, pool)
    with save.recorder.stage("barrier"):
        save.call.leave_together("end", LEAVE_SECONDS)
    own = save.recorder.timeline()
    monitor.publish(own, save.call.rank)
    save.handle._end(dataclasses.replace(info, timings=Timeline(own.records + save.others)))


def _release(save: Save, pool: StagingPool) -> None:
    if save.buffer is not None:
        pool.release(save.buffer)
        save.buffer = None


def _seen_in_store(save: Save, error: PeerLost) -> CheckpointInfo:
    """Read the outcome of a save from COMMIT in the store, when the coordinator is gone."""
    found = None
    with contextlib.suppress(StoreError, CheckpointError):
        found = read_commit(save.storage, save.path)
    if found is not None and found.attempt == save.agreed.attempt:
        return CheckpointInfo(**_info(save, found))
    raise SaveFailed(
        f"rank 0 must live until the save is committed, but: {error}", per_rank={0: str(error)}
    ) from error


def _clear(save: Save) -> None:
    """Remove the objects of a failed save, once all ranks have stopped writing."""
    save.call.leave_together("end", LEAVE_SECONDS)
    if save.journal is not None:
        save.journal.close()
    if save.call.rank != 0:
        return
    try:
        discard(save.storage, save.path, save.agreed.attempt)
    except Exception as error:
        # A later `gc` finds the attempt by its age.
        logger.warning(
            telemetry.event("attempt_not_cleared", uri=save.options.uri, reason=str(error))
        )
