"""Engine of saves: agree, stage, return; then write and commit while training goes on.

Between saves `SaveEngine` keeps the ranks' control connection, the plans, two warm staging buffers
and the uploading process.

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 and 4.2.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from planish.base import telemetry
from planish.base.errors import SaveFailed
from planish.checkpoint.commit.journal import attempt_folder
from planish.checkpoint.ranks.control import Control, control_of
from planish.checkpoint.saving.agree import Planner, Roles, SaveOptions, Skipped
from planish.checkpoint.saving.finish import AfterCommit, Save, SaveHandle, commit, end, write
from planish.checkpoint.saving.staging import StagingPool, copy_tensors
from planish.checkpoint.saving.upload import FileUpload, UploadJob
from planish.checkpoint.saving.uploader import Uploader
from planish.checkpoint.watch.monitor import CheckpointInfo, Recorder
from planish.store import Store, open_store, uri_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

INLINE_BYTES = 8 << 20
"""Staged bytes below which a thread of the trainer uploads, not a process."""
NUM_THREADS = 4
"""Store requests in flight per rank, at most."""

_engines: dict[Control, SaveEngine] = {}


def default_engine(group: ProcessGroup | None = None) -> SaveEngine:
    """Return the engine of a process group; the first call makes it and is a collective."""
    control = control_of(group)
    if control not in _engines:
        _engines[control] = SaveEngine(control)
    return _engines[control]


class SaveEngine:
    """Saves of one process group."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.planner = Planner()
        self.pool = StagingPool()
        self.uploader = Uploader()
        local = control.hosts.count(control.hosts[control.rank])
        share = -(-(os.cpu_count() or 1) // local)
        self._num_threads = max(1, min(NUM_THREADS, share))
        self._inflight: deque[SaveHandle] = deque()
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_closed = False
        atexit.register(self.close)

    def save(
        self,
        roles: Callable[[], Roles] | Roles,
        options: SaveOptions,
        *,
        storage: Store | None = None,
        after_commit: AfterCommit | None = None,
    ) -> SaveHandle:
        """Save the state of all ranks; a collective of the calling threads.

        `roles` maps a role to the result of its adapter, or is a function that returns this map;
        an error in it is raised on all ranks. A background thread of rank 0 calls `after_commit`
        once the checkpoint is visible.

        Returns:
            A handle; its save has ended if `options.is_async` is false. For errors see `api.save`.
        """
        began = time.perf_counter()
        options = replace(options, uri=uri_of(options.uri))
        place, path = open_store(options.uri, timeout_s=options.timeout_s)
        recorder = Recorder(self.control.rank, "save", socket.gethostname())
        call = self.control.call(f"save {options.uri} step {options.step}", options.timeout_s)
        busy = self._is_busy() and options.inflight != "wait"

        def collect() -> Roles:
            self._make_room(options)
            return roles() if callable(roles) else roles

        # On the caller's thread: all ranks agree on who writes what, and each copies its part.
        try:
            with recorder.stage("plan"):
                agreed = self.planner.agree(call, collect, options, busy=busy)
        except Skipped as skipped:
            logger.warning(telemetry.event("save_skipped", uri=options.uri, reason=skipped))
            return SaveHandle(options.uri, skipped=str(skipped))
        behind, handle = call.twin(missing=SaveFailed), SaveHandle(options.uri)
        save = Save(options, behind, agreed, storage or place, path, handle, recorder, after_commit)

        # On the background thread: write, gather the results, commit, broadcast the outcome.
        def finish() -> CheckpointInfo:
            written = write(save, self.uploader)
            gathered = behind.gather(written, "results")
            told = json.loads(behind.decide(lambda: commit(save, gathered or ()), "outcome"))
            return CheckpointInfo(**{**told, "roles": tuple(told["roles"])})

        try:
            self._stage(save, is_reachable=storage is None)
        except BaseException as error:
            # The error becomes the outcome of the save; an interrupt is also raised here.
            save.failure = error
            if not isinstance(error, Exception):
                raise
        finally:
            self._inflight.append(handle)
            telemetry.set_level("planish_checkpoint_inflight_saves", len(self._inflight))
            self._later(lambda: end(save, finish, self.pool))
        handle.stall_seconds = time.perf_counter() - began
        if options.is_async:
            telemetry.observe("planish_checkpoint_stall_seconds", handle.stall_seconds)
            return handle
        try:
            handle.result()
        finally:
            handle.cancel()  # where the wait was interrupted
        handle.stall_seconds = time.perf_counter() - began
        return handle

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is under way; return False after `timeout` seconds. Raises nothing."""
        limit = None if timeout is None else time.monotonic() + timeout
        while self._inflight:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not self._inflight[0].wait_done(left):
                return False
            self._inflight.popleft()
        return True

    def close(self, timeout: float | None = None) -> None:
        """Wait for the saves under way, then free the memory, the process and the connections.

        `close` cancels saves that go on for longer than `timeout` seconds.
        """
        if self.is_closed:
            return
        if not self.wait(timeout):
            for handle in list(self._inflight):
                handle.cancel()
            self.wait(30.0)
        self.is_closed = True
        _engines.pop(self.control, None)
        atexit.unregister(self.close)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)
        self.uploader.close()
        self.pool.close()
        self.control.close()

    def _make_room(self, options: SaveOptions) -> None:
        limit = time.monotonic() + options.timeout_s
        while options.inflight == "wait" and self._is_busy():
            oldest = self._inflight[0]
            if not oldest.wait_done(max(0.0, limit - time.monotonic())):
                raise SaveFailed(
                    f"an earlier save of `{oldest.uri}` must end within {options.timeout_s} s to "
                    "make room, but has not"
                )

    def _is_busy(self) -> bool:
        """Return whether the saves under way use all staging buffers."""
        while self._inflight and self._inflight[0].done():
            self._inflight.popleft()
        return len(self._inflight) >= self.pool.limit

    def _stage(self, save: Save, *, is_reachable: bool) -> None:
        """Copy all objects of this rank into one buffer: planned files, then small objects.

        `is_reachable` is True if another process can open the store by the URI.
        """
        options, agreed = save.options, save.agreed
        plan, small = agreed.plan, agreed.small
        # Small objects vary in size; their room is a power of two, so that buffers fit again.
        room = 1 << sum(len(one.data) for one in small).bit_length()
        size = plan.size + room
        if size >= INLINE_BYTES and is_reachable and not save.storage.in_memory:
            self._later(self.uploader.start)  # while this thread copies
        else:
            save.thread_storage = save.storage
        buffer = save.buffer = self.pool.acquire(size, save.call.remaining_s)
        with save.recorder.stage("stage", num_bytes=size):
            copy_tensors(plan, agreed.items, buffer)
            folder = attempt_folder(save.path, agreed.attempt)
            # The name of a planned file's folder is its role and kind.
            files = [
                FileUpload(f"{folder}/{file.key}", file.size, file.key.split("/")[1], start)
                for file, start in zip(plan.files, plan.starts, strict=True)
            ]
            start = plan.size
            for claim, data in small:
                buffer.view[start : start + len(data)] = data
                files.append(FileUpload(f"{folder}/{claim.key}", len(data), claim.state, start))
                start += len(data)
        agreed.items = []  # drop the references to the state's tensors
        save.job = UploadJob(
            rank=self.control.rank,
            uri=options.uri,
            path=save.path,
            attempt=agreed.attempt,
            files=files,
            num_threads=self._num_threads,
            timeout_s=options.timeout_s,
            pace_s=options.pace_s if options.is_async else 0.0,
        )
        if options.is_async and save.thread_storage is None:
            self._later(self.pool.warm_one_more)  # in the background, before the next save

    def _later(self, task: Callable[[], object]) -> None:
        """Queue a task for the background thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="saves", daemon=True)
            self._thread.start()
        self._queue.put(task)

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception(telemetry.event("task_behind_training_failed"))
            del task
            left = sum(not handle.done() for handle in list(self._inflight))
            telemetry.set_level("planish_checkpoint_inflight_saves", left)
