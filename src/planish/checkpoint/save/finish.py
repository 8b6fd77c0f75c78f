"""The part of a save after staging: every rank's result to rank 0, then commit or abort for all.

Runs on a background thread (or the caller's, if it waits anyway) and talks over connections of its
own. Whatever goes wrong on one rank becomes `SaveFailed` on every rank, and nothing is visible.

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
from planish.checkpoint.commit.commit import Commit, Facts, discard, publish, read_commit, standing
from planish.checkpoint.commit.journal import Journal, attempt_folder, join
from planish.checkpoint.format import metafile
from planish.checkpoint.format.records import Metadata
from planish.checkpoint.format.small_objects import Claim, list_objects
from planish.checkpoint.ranks import control_errors
from planish.checkpoint.ranks.coordination import Control
from planish.checkpoint.save.agree import Agreed
from planish.checkpoint.save.handle import SaveHandle
from planish.checkpoint.save.host_memory import SharedBuffer
from planish.checkpoint.save.options import SaveOptions
from planish.checkpoint.save.upload import Cancelled
from planish.checkpoint.save.upload_job import UploadResult
from planish.checkpoint.storage.base import Storage
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.timings import CheckpointInfo, Recorder, Timeline, Timing

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 5.0
"""How long ranks wait for each other at the end, beyond what the outcome needs."""

AfterCommit = Callable[[Storage, str], None]
"""Called on rank 0 with the storage and the key of the checkpoint before its handle resolves."""


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
    storage: Storage
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
    """The coordinator's, where it has been begun already."""
    replaces: str = ""
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
    """Bring a save to its end; its handle tells which."""
    recorder = save.recorder
    try:
        done = _run(save)
    except BaseException as error:
        # A store that does not answer must not keep the error from the caller.
        settling = threading.Thread(target=_settle, args=(save,), name="settle", daemon=True)
        settling.start()
        settling.join(max(save.call.remaining_s, 2 * LEAVE_SECONDS))
        monitor.publish_failure("save", error)
        save.handle._fail(error)
        return
    finally:
        save.let_go()
    with recorder.stage("barrier"):
        save.call.leave_together("end", LEAVE_SECONDS)
    timeline = recorder.timeline()
    monitor.publish(timeline, recorder.rank)
    save.handle._finish(dataclasses.replace(done, timings=_all_timings(done, timeline)))


def _all_timings(info: CheckpointInfo, own: Timeline) -> Timeline:
    """Return this rank's records in full, and what others have sent."""
    rank = own.records[0].rank if own.records else 0
    return Timeline(own.records + [r for r in info.timings.records if r.rank != rank])


def _run(save: Pending) -> CheckpointInfo:
    try:
        result = _upload(save)
        claims = [one.claim() for one in save.agreed.small]
        message = _encode_result(result, claims, save.recorder.timeline())
        gathered = save.call.gather(message, "results")
        reply, timeline = None, Timeline()
        if gathered is not None:
            reply, timeline = _commit(save, gathered)
        reply = save.call.broadcast(reply, "outcome")
    except PeerLost as error:
        return _look(save, error)
    found = json.loads(reply)
    if found["errors"]:
        raise control_errors.joined(control_errors.decode(found["errors"].encode()), save.call.size)
    return CheckpointInfo(**_fields(found["info"]), timings=timeline)


def _fields(info: dict[str, Any]) -> dict[str, Any]:
    return {**info, "roles": tuple(info["roles"])}


def _upload(save: Pending) -> UploadResult:
    """Write this rank's objects; an error here ends the save on all ranks."""
    call = save.call
    try:
        if call.rank == 0:
            _begin(save)
        call.note(f"uploading for {save.options.uri}")
        result = save.upload()
        call.note(f"uploaded for {save.options.uri}")
        return result
    except BaseException as error:
        reason = _blame(call, error)
        save.give_up()
        raise reason from error


def _blame(call: Control, error: BaseException) -> Exception:
    """Return why the save ends, and tell the others; who failed first is the reason."""
    try:
        call.check()
    except Exception as found:
        return found
    reason = control_errors.joined({call.rank: _reason(call.rank, error)}, call.size)
    with contextlib.suppress(PeerLost):
        call.abort(reason)
    return reason


def _reason(rank: int, error: BaseException) -> Exception:
    if isinstance(error, CheckpointExists):
        return error
    if isinstance(error, Cancelled):
        error = SaveFailed("the save was cancelled")
    kind = "" if isinstance(error, SaveFailed) else f"{type(error).__name__}: "
    told = f"{kind}{error}".removesuffix(": ")
    return SaveFailed(f"rank {rank} could not do its part: {told}", per_rank={rank: told})


def _begin(save: Pending) -> None:
    """Look what stands at the path, and announce the attempt, unless that is done."""
    save.replaces = standing(save.storage, save.path)
    if save.replaces and not save.options.overwrite:
        found = read_commit(save.storage, save.path)
        told = f"step {found.step}" if found is not None else "a checkpoint"
        raise CheckpointExists(
            f"`{save.options.uri}` must be free, but has {told} committed; choose another path, "
            "or `overwrite=True`"
        )
    if save.journal is None:
        save.journal = Journal(save.storage, save.path, save.agreed.attempt)
        save.journal.begin(save.large_keys)
        save.journal.keep()


def _encode_result(result: UploadResult, claims: Sequence[Claim], timeline: Timeline) -> bytes:
    return json.dumps(
        {
            "files": [dataclasses.astuple(file) for file in result.files],
            "claims": claims,
            "timings": [dataclasses.astuple(record) for record in timeline.records],
        }
    ).encode()


def _commit(save: Pending, gathered: Sequence[bytes]) -> tuple[bytes, Timeline]:
    """Make the checkpoint visible; returns what all ranks are told, and all records."""
    results = [json.loads(part) for part in gathered]
    timeline = Timeline([Timing(*row) for result in results for row in result["timings"]])
    try:
        with save.recorder.stage("meta"):
            meta = build_metadata(save, results)
            data = metafile.encode(meta)
        with save.recorder.stage("commit", num_bytes=len(data)):
            commit = _publish(save, meta, data)
        _after(save, commit, timeline)
    except Exception as error:
        reason = error if isinstance(error, CheckpointError) else _reason(0, error)
        told = control_errors.encode({control_errors.EVERYONE: reason}).decode()
        return json.dumps({"errors": told, "info": {}}).encode(), timeline
    info = _info(save, commit)
    del info["timings"], info["facts"]
    return json.dumps({"errors": "", "info": info}).encode(), timeline


def _publish(save: Pending, meta: Metadata, data: bytes) -> Commit:
    options = save.options
    files = dict(zip(meta.files.keys, meta.files.sizes, strict=True))
    facts = Facts(options.step, save.agreed.roles, files, options.run_id, dict(options.tags))
    return publish(
        save.storage,
        save.path,
        save.agreed.attempt,
        data,
        facts,
        overwrite=options.overwrite,
        replaces=save.replaces,
        journal=save.journal,
    )


def _after(save: Pending, commit: Commit, timeline: Timeline) -> None:
    """Do what follows a commit; the checkpoint exists whatever becomes of this."""
    try:
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


def _info(save: Pending, commit: Commit) -> dict[str, Any]:
    info = CheckpointInfo(
        uri=save.options.uri,
        step=commit.step,
        attempt=commit.attempt,
        sha256=commit.meta_sha256,
        num_bytes=commit.total_bytes,
        layout=str(save.options.header.get("layout", "")),
        roles=commit.roles,
    )
    return {f.name: getattr(info, f.name) for f in dataclasses.fields(info)}


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
        for full, size, algorithm, crcs in result["files"]:
            key = full[start:]
            checked = np.array(crcs, np.uint32)
            if key in claims:
                meta.files.add(key, size, algorithm=algorithm, crcs=checked)
                written.setdefault(rank, []).append(claims[key])
                continue
            row = rows[key]
            missing.discard(key)
            meta.files.sizes[row], meta.files.algorithms[row] = size, algorithm
            meta.files.crcs[row] = checked
    if missing:
        raise SaveFailed(f"every planned object must be written, but {sorted(missing)[:5]} are not")
    meta.objects.update(list_objects(written))
    return meta


def _look(save: Pending, error: PeerLost) -> CheckpointInfo:
    """Tell from the store itself how a save ended whose coordinator is gone."""
    try:
        commit = read_commit(save.storage, save.path)
    except (StoreError, CheckpointError):
        commit = None
    if commit is not None and commit.attempt == save.agreed.attempt:
        return CheckpointInfo(**_info(save, commit))
    raise SaveFailed(
        f"rank 0 must live until the save is committed, but: {error}", per_rank={0: str(error)}
    ) from error


def _settle(save: Pending) -> None:
    """Clear away what a failed save has written, once all ranks have stopped writing."""
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
