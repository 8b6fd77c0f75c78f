"""Saving: agree, stage, return; the rest goes on behind training.

`SaveEngine` keeps what is worth keeping between saves: the ranks' control connection, the plans,
two warm staging buffers, the uploading process. In order, a save passes through `agree` (what each
rank writes), `staging` (copy to host memory), `uploader` (write to the store), `finish` (commit).

Source: ByteCheckpoint, arXiv 2407.20143, sections 3.3 and 4.2.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from planish.base import telemetry
from planish.base.errors import SaveFailed
from planish.checkpoint.format.items import LocalItem
from planish.checkpoint.ranks.control import Control, close_controls, control_of
from planish.checkpoint.save.agree import (
    Local,
    Offer,
    Planner,
    Prepared,
    Roles,
    SaveOptions,
    Skipped,
    count_nonfinite,
)
from planish.checkpoint.save.finish import AfterCommit, Early, Pending, SaveHandle, finish
from planish.checkpoint.save.staging import (
    PATIENCE_SECONDS,
    DirectSource,
    LazyCopies,
    SharedBuffer,
    Stager,
    StagingPool,
    is_written_in_step,
)
from planish.checkpoint.save.upload import (
    FileUpload,
    ReusedMemory,
    ThreadUploader,
    UploadJob,
    UploadResult,
    is_large,
    run_job,
)
from planish.checkpoint.save.uploader import ProcessUploader, store_settings
from planish.checkpoint.watch.monitor import Recorder
from planish.store import Store, open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

INLINE_BYTES = 8 << 20
"""Smaller shares of a rank are written by threads of the trainer itself."""
NUM_THREADS = 4
"""Store requests in flight per rank, at most."""
MOST_INFLIGHT = 2
"""Saves under way at once: one per staging buffer."""

Written = Callable[[LocalItem], bool]
"""Whether an item changes in `optimizer.step()` only."""

_engines: list[SaveEngine] = []


def default_engine(group: ProcessGroup | None = None) -> SaveEngine:
    """Return the engine that a process group keeps, made at the first call: then a collective."""
    control = control_of(group)
    _engines[:] = [engine for engine in _engines if not engine.is_closed]
    for engine in _engines:
        if engine.control is control:
            return engine
    _engines.append(SaveEngine(control))
    return _engines[-1]


def close_engines() -> None:
    """Close every engine of this process, waiting for the saves under way."""
    while _engines:
        _engines.pop().close()
    close_controls()


class SaveEngine:
    """Saves of one process group; every method that saves is a collective.

    Example:
        >>> engine = SaveEngine(Control.single())
        >>> engine.close()
    """

    def __init__(self, control: Control, *, num_threads: int = 0) -> None:
        """Keep nothing yet; `num_threads` 0 chooses by the cores of the machine."""
        self.control = control
        self.planner = Planner()
        self.pool = StagingPool(on_free=self._forget)
        self.uploader = ProcessUploader()
        local = control.hosts.count(control.hosts[control.rank])
        share = -(-(os.cpu_count() or 1) // local)
        self._num_threads = num_threads or max(1, min(NUM_THREADS, share))
        self._patience_s = 0.0 if share > NUM_THREADS else PATIENCE_SECONDS
        self._host = socket.gethostname()
        self._number = 0
        self._inflight: deque[SaveHandle] = deque()
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lazy = LazyCopies()
        self._storages: dict[tuple[str, float], Store] = {}
        """Kept while the settings of the store stay the same."""
        self._settings: dict[str, str] = {}
        self.is_closed = False
        atexit.register(self.close)

    def warmup(self, num_bytes: int) -> None:
        """Start the uploading process and touch the staging memory ahead of the first save.

        Args:
            num_bytes: What this rank is going to write in each save.
        """
        self.uploader.start()
        self.pool.warm(num_bytes)

    def save(
        self,
        roles: Callable[[], Roles] | Roles,
        options: SaveOptions,
        *,
        storage: Store | None = None,
        after_commit: AfterCommit | None = None,
        is_written_in_step: Written = is_written_in_step,
    ) -> SaveHandle:
        """Save the state of all ranks; a collective of the calling threads.

        Args:
            roles: Role to what its adapter found; or a function that returns that, whose error
                is raised on all ranks.
            options: How.
            storage: Use this instead of the one of the URI.
            after_commit: Called on rank 0 in the background once the checkpoint is visible.
            is_written_in_step: With `snapshot="lazy"`: which items change in
                `optimizer.step()` alone; others are copied before the call returns.

        Returns:
            A handle; finished already if `options.is_async` is false.

        Raises:
            PlanMismatch: the ranks do not save the same.
            LayoutMismatch: their shares make no whole.
            PeerLost: rank 0 has ended.
            SaveFailed: no room for a further save (`inflight="raise"`), or a rank failed
                (`is_async=False`).
        """
        assert not self.is_closed, "the engine is closed"
        began = time.perf_counter()
        try:
            save = self._agree(roles, options, storage, after_commit)
        except Skipped as skipped:
            logger.warning(telemetry.event("save_skipped", uri=options.uri, reason=skipped))
            return SaveHandle(options.uri, skipped=str(skipped))
        self._number += 1
        handle = save.handle
        if options.is_async:
            try:
                self._start(save, storage, is_written_in_step)
            finally:
                self._enqueue(save)
            handle.stall_seconds = time.perf_counter() - began
            telemetry.observe("planish_checkpoint_stall_seconds", handle.stall_seconds)
        else:
            self.wait()
            self._start_direct(save)
            finish(save)
            handle.stall_seconds = time.perf_counter() - began
            handle.result()
        return handle

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is under way; returns whether that is so. Raises nothing."""
        limit = None if timeout is None else time.monotonic() + timeout
        while self._inflight:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not self._inflight[0].wait_done(left):
                return False
            self._inflight.popleft()
        return True

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way, then give back memory, process and connections.

        Args:
            timeout: Saves that go on for longer are cancelled, seconds.
        """
        if self.is_closed:
            return
        if not self.wait(timeout):
            for handle in list(self._inflight):
                handle.cancel()
            self.wait(30.0)
        self.is_closed = True
        atexit.unregister(self.close)
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(10.0)
        self._lazy.close()
        self.uploader.close()
        self.pool.close()
        self.control.close()

    def _agree(
        self,
        roles: Callable[[], Roles] | Roles,
        options: SaveOptions,
        storage: Store | None,
        after_commit: AfterCommit | None,
    ) -> Pending:
        """Agree with the other ranks on what each of them writes; nothing is staged yet.

        Raises:
            Skipped: there is no room, and none is waited for.
        """
        settings = store_settings()
        if settings != self._settings:
            self._storages.clear()
            self._settings = settings
        place, path = open_store(options.uri, timeout_s=options.timeout_s)
        kept = options.uri.removesuffix(path), options.timeout_s
        place = self._storages.setdefault(kept, place)
        recorder = Recorder(self.control.rank, "save", self._host)
        call = self.control.call(f"save {options.uri} step {options.step}", options.timeout_s)
        busy = self._is_busy() and options.inflight != "wait"
        early = None
        try:
            with recorder.stage("plan"):
                offer = self.planner.offer(
                    call, lambda: self._collect(roles, options), options, busy=busy
                )
            if options.is_async and options.snapshot == "copy":
                early = self._stage_early(call, offer, recorder)
            with recorder.stage("plan"):
                agreed = self.planner.settle(call, offer, options)
            if options.scan:
                count_nonfinite(agreed.items)
        except BaseException:
            if early is not None:
                self.pool.release(early.buffer)
            raise
        if early is not None and agreed.prepared is not offer.likely:
            self.pool.release(early.buffer)
            early = None
        return Pending(
            options=options,
            call=call.twin(missing=SaveFailed),
            agreed=agreed,
            storage=storage or place,
            path=path,
            handle=SaveHandle(options.uri),
            recorder=recorder,
            upload=UploadResult,
            give_up=lambda: None,
            release=lambda: self.pool.release(early.buffer) if early else None,
            after_commit=after_commit,
            early=early,
        )

    def _collect(self, roles: Callable[[], Roles] | Roles, options: SaveOptions) -> Local:
        """Wait for room, if asked to, and return what this rank brings."""
        limit = time.monotonic() + options.timeout_s
        while options.inflight == "wait" and self._is_busy():
            oldest = self._inflight[0]
            if not oldest.wait_done(max(0.0, limit - time.monotonic())):
                raise SaveFailed(
                    f"an earlier save of `{oldest.uri}` must end within {options.timeout_s} s to "
                    "make room, but has not"
                )
        return self.planner.collect(self.control.rank, roles, options)

    def _is_busy(self) -> bool:
        """Return whether there is no room for a further save."""
        while self._inflight and self._inflight[0].done():
            self._inflight.popleft()
        return len(self._inflight) >= (1 if self.pool.limit == 1 else MOST_INFLIGHT)

    def _stage_early(self, call: Control, offer: Offer, recorder: Recorder) -> Early | None:
        """Copy by the plan of the last save while the verdict travels, if there is room.

        What fails here is tried again once all ranks have settled the plan; they get that error.
        """
        if offer.likely is None or offer.local is None:
            return None
        size, began = offer.likely.layout.size, time.monotonic()
        buffer = self.pool.acquire(size, 0.0)
        if buffer is None:
            return None
        try:
            with recorder.stage("stage", num_bytes=size):
                self._stager(offer.likely, buffer).copy(offer.local.items, lambda _: None)
        except BaseException as error:
            self.pool.release(buffer)
            if isinstance(error, Exception):
                return None
            call.give_up(error)
            raise
        return Early(buffer, time.monotonic() - began)

    def _stager(self, prepared: Prepared, buffer: SharedBuffer) -> Stager:
        if buffer.number not in prepared.stagers:
            prepared.stagers[buffer.number] = Stager(prepared.plan, buffer, self._patience_s)
        return prepared.stagers[buffer.number]

    def _start(self, save: Pending, storage: Store | None, written: Written) -> None:
        """Hand the upload over and stage; an error becomes the outcome of the save.

        An interrupt does too, so that the save gives back what it holds, and is raised as well.
        """
        number, early = self._number, save.early
        size = save.agreed.prepared.layout.size
        inline = storage is not None or save.storage.in_memory
        small = inline or size < INLINE_BYTES
        uploader = ThreadUploader(save.storage) if small else self.uploader
        try:
            job = self._job(save, number)
            buffer = early.buffer if early else self.pool.acquire(size, save.call.remaining_s)
            if buffer is None:
                raise SaveFailed("a staging buffer must become free within `timeout_s`")
            save.release = lambda: self.pool.release(buffer)
            save.give_up = lambda: uploader.give_up(number)
            if isinstance(uploader, ThreadUploader):
                uploader.submit(job, buffer.view)
            else:
                uploader.start()
                uploader.submit(job, buffer)
            began = time.monotonic() - (early.seconds if early else 0.0)

            def progress(value: int) -> None:
                # Other ranks of this machine copy a little longer; an upload would slow them.
                spent = time.monotonic() - began if self._patience_s else 0.0
                uploader.staged(number, value, min(self._patience_s, 2 * spent))

            if early is not None:
                progress(size)
                save.handle._staged.set()
            else:
                self._stage(save, buffer, written, progress)
        except BaseException as error:
            save.failure = error
            if not isinstance(error, Exception):
                raise
            return
        deadline = time.monotonic() + save.call.remaining_s

        def uploaded() -> UploadResult:
            result = uploader.wait(number, deadline, save.check)
            save.recorder.extend(result.timings)
            return result

        save.upload = uploaded
        save.handle._cancel = save.cancel

    def _stage(
        self,
        save: Pending,
        buffer: SharedBuffer,
        written: Written,
        progress: Callable[[int], None],
    ) -> None:
        """Copy everything, or, with `snapshot="lazy"`, begin to copy what the step writes."""
        agreed, handle = save.agreed, save.handle
        stager = self._stager(agreed.prepared, buffer)
        size = agreed.prepared.layout.size
        if save.options.snapshot == "copy":
            with save.recorder.stage("stage", num_bytes=size):
                stager.copy(agreed.items, progress)
            handle._staged.set()
            return
        late = {i for i, item in enumerate(agreed.items) if written(item)}
        with save.recorder.stage("stage", num_bytes=size):
            stager.copy(agreed.items, lambda _: None, lambda i: i not in late)

        items, free, copying = agreed.items, save.release, threading.Lock()

        def copy_rest() -> None:
            with copying, save.recorder.stage("stage"):
                if save.failure is None:
                    stager.copy(items, lambda _: None, lambda i: i in late)

        def release() -> None:
            # If the save has failed elsewhere, nothing may be copied to memory of the next save.
            with copying:
                save.failure = save.failure or SaveFailed("the save has ended")
                free()

        save.release = release

        def done(error: BaseException | None) -> None:
            save.failure = save.failure or error
            handle._staged.set()
            progress(size)

        self._lazy.begin([agreed.items[i] for i in sorted(late)], copy_rest, done)

    def _start_direct(self, save: Pending) -> None:
        """Prepare to write from the tensors themselves, on this thread and a few others."""
        agreed = save.agreed
        job = self._job(save, self._number)
        blobs = [small.data for small in agreed.small]
        source = ReusedMemory(DirectSource(agreed.prepared.plan, agreed.items, blobs).fill)
        if self.control.rank == 0:
            save.large_keys = tuple(file.key for file in job.files if is_large(file.size))

        def uploaded() -> UploadResult:
            # The coordinator's journal serves its own objects too.
            result = run_job(job, save.storage, source, threading.Event(), save.journal)
            save.recorder.extend(result.timings)
            return result

        save.upload = uploaded

    def _job(self, save: Pending, number: int) -> UploadJob:
        agreed, folder = save.agreed, save.folder
        # Role and kind of a planned file are the name of its folder.
        files = [
            FileUpload(f"{folder}/{file.key}", file.size, file.key.split("/")[1])
            for file in agreed.prepared.plan.files
        ]
        files += [FileUpload(f"{folder}/{o.key}", len(o.data), o.state) for o in agreed.small]
        return UploadJob(
            number=number,
            rank=self.control.rank,
            uri=save.options.uri,
            path=save.path,
            attempt=agreed.attempt,
            files=tuple(files),
            starts=agreed.prepared.layout.starts,
            blobs=tuple(small.data for small in agreed.small),
            num_threads=self._num_threads,
            timeout_s=save.options.timeout_s,
            pace_s=save.options.pace_s if save.options.is_async else 0.0,
        )

    def _enqueue(self, save: Pending) -> None:
        """Leave the rest of a save to the background thread."""
        self._inflight.append(save.handle)
        telemetry.set_level("planish_checkpoint_inflight_saves", len(self._inflight))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="saves", daemon=True)
            self._thread.start()
        if save.agreed.prepared.layout.size >= INLINE_BYTES:
            # The second buffer, while nobody waits for it.
            self._queue.put(self.pool.warm_one_more)
        self._queue.put(lambda: finish(save))

    def _work(self) -> None:
        while (task := self._queue.get()) is not None:
            task()
            del task
            left = sum(not handle.done() for handle in list(self._inflight))
            telemetry.set_level("planish_checkpoint_inflight_saves", left)

    def _forget(self, buffer: SharedBuffer) -> None:
        """Drop what refers to a buffer that is given back."""
        self.planner.forget_buffer(buffer.number)
        self.uploader.drop(buffer)
