"""Writes the objects of one rank: parts in flight from several threads, as soon as staged.

`upload_files` is the work, an `UploadJob` all that one rank writes in one save. Small jobs, and
storages that only this process can reach, are done by `ThreadUploader`; the others by the process
of `uploader`, which runs the same job. Deliberately without torch.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (split upload, overlapped with staging).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import numpy as np

from planish.base.errors import SaveFailed, StoreError
from planish.checkpoint.commit.journal import Journal
from planish.checkpoint.format.metafile import BLOCK, DEFAULT_CHECKSUM, block_crcs, joined_crc
from planish.checkpoint.watch.monitor import Recorder, Timing
from planish.store import (
    SINGLE_PUT_BYTES,
    Multipart,
    Store,
    abort_lost_uploads,
    open_store,
)

GIVE_UP_SECONDS = 15.0
"""How long a request under way is waited for when a job is given up."""


@dataclass(frozen=True)
class FileUpload:
    """One object to write.

    Example:
        >>> FileUpload("run/step-1/a-X/data/main.model/00000-0.safetensors", 8, "main.model").size
        8
    """

    key: str
    """Full key in the storage."""
    size: int
    """Bytes."""
    state: str
    """Role and kind, for the timings."""


@dataclass(frozen=True)
class FileResult:
    """One object that has been written."""

    key: str
    """Full key in the storage."""
    size: int
    """Bytes."""
    algorithm: str
    """Name of the checksum."""
    crcs: tuple[int, ...]
    """Checksum of each block of 1 MiB."""


class Cancelled(Exception):
    """The save has been given up; nothing more is to be written."""


class ByteSource(Protocol):
    """Where the bytes of the objects come from; called from several threads."""

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes of object number `file`, waiting until they are there.

        The memory may be used until the same thread reads again.
        """


class BytesInPlace:
    """How many bytes of a buffer are in place; grows from 0.

    Example:
        >>> progress = BytesInPlace()
        >>> progress.advance(10)
        >>> progress.wait(10, threading.Event())
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._value = 0

    def advance(self, value: int) -> None:
        """Record that the first `value` bytes are in place."""
        with self._changed:
            self._value = max(self._value, value)
            self._changed.notify_all()

    def wait(self, value: int, stop: threading.Event) -> None:
        """Return when `value` bytes are in place.

        Raises:
            Cancelled: `stop` was set first.
        """
        with self._changed:
            while self._value < value:
                if stop.is_set():
                    raise Cancelled
                self._changed.wait(0.2)


class BufferSource:
    """Objects that lie in one buffer, then objects given as bytes."""

    def __init__(
        self,
        view: memoryview,
        starts: Sequence[int],
        blobs: Sequence[bytes],
        progress: BytesInPlace,
        stop: threading.Event,
    ) -> None:
        """Read file i from `view[starts[i]:]`, the files after those from `blobs`."""
        self._view, self._starts, self._progress = view, starts, progress
        self._blobs, self._stop = blobs, stop

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes of an object; see `ByteSource`."""
        if file >= len(self._starts):
            return memoryview(self._blobs[file - len(self._starts)])[start:stop]
        base = self._starts[file]
        self._progress.wait(base + stop, self._stop)
        return self._view[base + start : base + stop]


class ReusedMemory:
    """One piece of memory per thread, for objects that have to be put together first."""

    def __init__(self, fill: Callable[[int, int, int, memoryview], None]) -> None:
        """Take `fill(file, start, stop, memory)`, which writes the bytes asked for."""
        self._fill, self._own = fill, threading.local()

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes of an object; see `ByteSource`."""
        memory: bytearray | None = getattr(self._own, "memory", None)
        if memory is None or len(memory) < stop - start:
            self._own.memory = memory = bytearray(stop - start)
        view = memoryview(memory)[: stop - start]
        self._fill(file, start, stop, view)
        return view


@dataclass
class _File:
    """An object on its way."""

    upload: FileUpload
    parts: Multipart | None
    left: int
    """Parts that are not written yet."""
    crcs: np.ndarray[tuple[int], np.dtype[np.uint32]]
    crc_seconds: float = 0.0
    started: float = 0.0
    """Seconds since 1970, 0 before the first part."""


@dataclass
class _Run:
    """What the threads of one call share."""

    storage: Store
    files: list[_File]
    source: ByteSource
    recorder: Recorder
    stop: threading.Event
    tasks: Iterator[tuple[int, int, int, int]]
    pace: float = 0.0
    """Seconds for each byte."""
    begun: float = field(default_factory=time.monotonic)
    handed_out: int = 0
    """Bytes whose part some thread has taken."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: BaseException | None = None


def upload_files(
    storage: Store,
    files: Sequence[FileUpload],
    source: ByteSource,
    *,
    journal: Journal,
    recorder: Recorder,
    stop: threading.Event,
    num_threads: int,
    in_turns: bool = False,
    pace_s: float = 0.0,
) -> list[FileResult]:
    """Write objects under write-once keys; all of them or an error.

    Args:
        storage: Where.
        files: What, in the order in which their bytes become available.
        source: The bytes.
        journal: This process's, begun with the keys of large files; the uploads are added to it.
        recorder: Gets the stages `serialise` (checksums) and `upload` of each file.
        stop: Setting it ends the upload with `Cancelled`.
        num_threads: Requests in flight.
        in_turns: Write a part of each neighbouring file of one state, then the next part of each,
            in place of one file after the other.
        pace_s: Begin the last part so many seconds after the first, those between in proportion.

    Raises:
        StoreError: the store refused or did not answer within its retries.
        Cancelled: `stop` was set.
    """
    states = [_File(file, None, 1, np.zeros(-(-file.size // BLOCK), np.uint32)) for file in files]
    retries = Counter(storage.counters.retries)
    try:
        for state in states:
            if is_large(state.upload.size):
                state.parts = storage.open_multipart(state.upload.key, state.upload.size)
                state.left = -(-state.upload.size // state.parts.part_bytes)
        begun = [state.parts for state in states if state.parts is not None]
        if begun:
            journal.add((parts.key, parts.upload_id) for parts in begun)
        tasks = iter(_tasks(states, in_turns))
        pace = pace_s / max(1, sum(file.size for file in files))
        run = _Run(storage, states, source, recorder, stop, tasks, pace)
        threads = [
            threading.Thread(target=_work, args=(run,), name="upload", daemon=True)
            for _ in range(min(num_threads, sum(state.left for state in states)))
        ]
        if len(threads) <= 1:
            _work(run)
        else:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        if run.error is not None:
            raise run.error
        if stop.is_set():
            raise Cancelled
    except BaseException:
        for state in states:
            if state.parts is not None:
                with contextlib.suppress(StoreError):
                    state.parts.abort()
        raise
    abort_lost_uploads(storage, begun)  # at the end: the later, the less can still be on its way
    recorder.retried("upload", retries, storage.counters.retries)
    return [
        FileResult(s.upload.key, s.upload.size, DEFAULT_CHECKSUM, tuple(s.crcs.tolist()))
        for s in states
    ]


def is_large(size: int) -> bool:
    """Return whether an object of `size` bytes is written in parts."""
    return size >= SINGLE_PUT_BYTES


def _tasks(files: Sequence[_File], in_turns: bool) -> list[tuple[int, int, int, int]]:
    """Return (file, number of the part, first byte, one past the last) in the order of writing."""
    tasks = []
    for index, file in enumerate(files):
        step = file.parts.part_bytes if file.parts else max(1, file.upload.size)
        for number, start in enumerate(range(0, max(1, file.upload.size), step), 1):
            tasks.append((index, number, start, min(file.upload.size, start + step)))
    if in_turns:
        run = [0]  # by file: which run of neighbours of one state it belongs to
        for file, following in pairwise(files):
            run.append(run[-1] + (file.upload.state != following.upload.state))
        tasks.sort(key=lambda task: (run[task[0]], task[1], task[0]))
    return tasks


def _work(run: _Run) -> None:
    """Write one part after the other until there is none left, or an error."""
    try:
        while not run.stop.is_set() and run.error is None:
            with run.lock:
                task = next(run.tasks, None)
                due = run.begun + run.pace * run.handed_out
                run.handed_out += 0 if task is None else task[3] - task[2]
            if task is None or run.stop.wait(max(0.0, due - time.monotonic())):
                return
            _write_part(run, *task)
    except BaseException as error:
        with run.lock:
            run.error = run.error or error


def _write_part(run: _Run, index: int, number: int, start: int, stop: int) -> None:
    file = run.files[index]
    data = run.source.read(index, start, stop)
    began = time.perf_counter()
    crcs = block_crcs(data)
    spent = time.perf_counter() - began
    with run.lock:
        file.crcs[start // BLOCK : start // BLOCK + len(crcs)] = crcs
        file.crc_seconds += spent
        file.started = file.started or time.time() - spent
    if file.parts is None:
        run.storage.put(file.upload.key, data)
    else:
        # The server checks the part by what has been computed already.
        file.parts.write(
            number, data, joined_crc(crcs, data) if DEFAULT_CHECKSUM == "crc32c" else None
        )
    with run.lock:
        file.left -= 1
        if file.left:
            return
    if file.parts is not None:
        file.parts.complete()
        file.parts = None
    upload, name = file.upload, file.upload.key.rpartition("/a-")[2].partition("/")[2]
    for stage, end in (("serialise", file.started + file.crc_seconds), ("upload", time.time())):
        run.recorder.add(
            Timing(
                run.recorder.rank,
                "save",
                upload.state,
                stage,
                file.started,
                end,
                upload.size,
                name,
            )
        )


@dataclass(frozen=True)
class UploadJob:
    """All that one rank writes in one save."""

    number: int
    """Counts the saves of this process."""
    rank: int
    uri: str
    """Of the checkpoint, as the caller named it."""
    path: str
    """Its key in the storage."""
    attempt: str
    files: tuple[FileUpload, ...]
    """First those in the buffer, then the small ones."""
    starts: tuple[int, ...]
    """Where the files of the buffer begin in it."""
    blobs: tuple[bytes, ...] = field(default=(), repr=False)
    """Content of the small files."""
    num_threads: int = 4
    timeout_s: float = 1800.0
    """Limit on every store request."""
    pace_s: float = 0.0
    """See `upload_files`."""


@dataclass(frozen=True)
class UploadResult:
    """What a job has written."""

    files: tuple[FileResult, ...] = ()
    timings: tuple[Timing, ...] = ()


def run_job(
    job: UploadJob,
    storage: Store,
    source: ByteSource,
    stop: threading.Event,
    journal: Journal | None = None,
) -> UploadResult:
    """Do a job: journal, objects, timings.

    Args:
        job: What to write.
        storage: Where.
        source: The bytes, of all files of the job.
        stop: Setting it ends the job with `Cancelled`.
        journal: One that is begun already; None: one of this rank's own.

    Raises:
        SaveFailed: the attempt was cleared away meanwhile.
        StoreError: see `upload_files`.
    """
    recorder = Recorder(job.rank, "save")
    own = Journal(storage, job.path, job.attempt, name=f"{job.rank:05d}")
    try:
        if journal is None:
            own.begin([file.key for file in job.files if is_large(file.size)])
            own.keep()
        files = upload_files(
            storage,
            job.files,
            source,
            journal=journal or own,
            recorder=recorder,
            stop=stop,
            num_threads=job.num_threads,
            pace_s=job.pace_s,
        )
    finally:
        own.close()
    return UploadResult(tuple(files), tuple(recorder.timeline().records))


class RunningJob:
    """A job that a thread of this process does."""

    def __init__(
        self,
        job: UploadJob,
        view: memoryview,
        storage: Callable[[], Store],
        on_end: Callable[[RunningJob], None] = lambda _: None,
    ) -> None:
        """Prepare the thread; its files lie in `view`, and `on_end` is its last call."""
        self.job, self.progress, self.stop = job, BytesInPlace(), threading.Event()
        self.result: UploadResult | None = None
        self.error: BaseException | None = None
        source = BufferSource(view, job.starts, job.blobs, self.progress, self.stop)
        self.thread = threading.Thread(
            target=self._run, args=(source, storage, on_end), name="upload-job", daemon=True
        )

    def _run(
        self,
        source: BufferSource,
        storage: Callable[[], Store],
        on_end: Callable[[RunningJob], None],
    ) -> None:
        try:
            self.result = run_job(self.job, storage(), source, self.stop)
        except BaseException as error:
            self.error = error
        on_end(self)


class ThreadUploader:
    """Does jobs in threads of this process; for small states and storages of this process.

    Example:
        >>> ThreadUploader(None).cancel(1)
    """

    def __init__(self, storage: Store | None) -> None:
        """Write to `storage`; None opens that of each job's URI."""
        self._storage = storage
        self._jobs: dict[int, RunningJob] = {}

    def submit(self, job: UploadJob, view: memoryview) -> None:
        """Take a job whose buffer is `view`; `wait` begins it, so that staging is not slowed."""
        self._jobs[job.number] = RunningJob(
            job, view, lambda: self._storage or open_store(job.uri)[0]
        )

    def staged(self, number: int, value: int, after_s: float = 0.0) -> None:
        """Tell a job how many bytes of its buffer are in place; small jobs begin at once."""
        if number in self._jobs:
            self._jobs[number].progress.advance(value)

    def cancel(self, number: int) -> None:
        """Ask a job to end; `wait` still has to be called."""
        if number in self._jobs:
            self._jobs[number].stop.set()

    def give_up(self, number: int) -> None:
        """Cancel a job and wait for its end."""
        running = self._jobs.pop(number, None)
        if running is not None:
            running.stop.set()
            if running.thread.is_alive():
                running.thread.join(GIVE_UP_SECONDS)

    def wait(self, number: int, deadline: float, check: Callable[[], None]) -> UploadResult:
        """Do a job and return what it has written, calling `check` several times a second.

        After an error the job goes on until `give_up`.

        Raises:
            SaveFailed: it took longer than until `deadline` (`time.monotonic`).
        """
        running = self._jobs[number]
        running.thread.start()
        while running.thread.is_alive():
            running.thread.join(0.2)
            check()
            if time.monotonic() > deadline:
                raise SaveFailed("the upload must end within `timeout_s`, but has not")
        del self._jobs[number]
        if running.error is not None:
            raise running.error
        assert running.result is not None
        return running.result
