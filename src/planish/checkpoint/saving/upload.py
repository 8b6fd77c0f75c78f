"""Writes the objects of one rank: parts in flight from several threads, without torch.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (split upload).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from planish.base.errors import StoreError
from planish.checkpoint.commit.journal import Journal
from planish.checkpoint.format.metafile import BLOCK, DEFAULT_CHECKSUM, block_crcs, joined_crc
from planish.checkpoint.watch.monitor import Recorder, Timing
from planish.store import SINGLE_PUT_BYTES, Multipart, Store, abort_lost_uploads

Source = Callable[[int, int, int], memoryview]
"""`source(file, start, stop)` returns these bytes of object number `file`; several threads call it.
The memory is valid until the same thread calls again."""


@dataclass(frozen=True)
class FileUpload:
    """One object to write."""

    key: str
    """Full key in the store."""
    size: int
    state: str
    """Role and kind, for timings."""
    start: int = 0
    """First byte in the staging buffer."""


@dataclass(frozen=True)
class FileResult:
    """One object that has been written."""

    key: str
    size: int
    algorithm: str
    crcs: tuple[int, ...]
    """Checksum of each block of 1 MiB."""


class Cancelled(Exception):
    """The save was cancelled; nothing more is to be written."""


@dataclass
class _File:
    """An object whose upload is under way."""

    upload: FileUpload
    parts: Multipart | None
    left: int
    crcs: np.ndarray[tuple[int], np.dtype[np.uint32]]
    crc_seconds: float = 0.0
    started: float = 0.0
    """Start of the first part, seconds since 1970; 0 before it."""


@dataclass
class _Run:
    """State that the threads of one call share."""

    storage: Store
    files: list[_File]
    source: Source
    recorder: Recorder
    stop: threading.Event
    tasks: Iterator[tuple[int, int, int, int]]
    pace: float
    hurry: threading.Event
    begun: float = field(default_factory=time.monotonic)
    handed_out: int = 0
    """Bytes of all parts that a thread has taken."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    error: BaseException | None = None


def upload_files(
    storage: Store,
    files: Sequence[FileUpload],
    source: Source,
    *,
    journal: Journal,
    recorder: Recorder,
    stop: threading.Event,
    num_threads: int,
    in_turns: bool = False,
    pace_s: float = 0.0,
    hurry: threading.Event | None = None,
) -> list[FileResult]:
    """Write all objects under write-once keys, or raise; `Cancelled` once `stop` is set.

    Args:
        storage: Store that gets the files.
        files: Files to write.
        source: Source of their bytes.
        journal: Journal of this process, which names the large files; gets their upload ids.
        recorder: Gets the stages `serialise` (checksums) and `upload` of each file.
        stop: Setting it ends the upload.
        num_threads: Requests in flight.
        in_turns: Interleave neighbouring files of one state: part 1 of each, then part 2 of each.
            Otherwise all parts of one file come before the next file.
        pace_s: Seconds over which the starts of the parts are spread.
        hurry: Setting it ends the pace; a caller that sets `stop` must set `hurry`, too.
    """
    states = [_File(file, None, 1, np.zeros(-(-file.size // BLOCK), np.uint32)) for file in files]
    retries = Counter(storage.retries)
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
        run = _Run(storage, states, source, recorder, stop, tasks, pace, hurry or stop)
        threads = [
            threading.Thread(target=_work, args=(run,), name="upload", daemon=True)
            for _ in range(min(num_threads, sum(state.left for state in states)))
        ]
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
    abort_lost_uploads(storage, begun)  # last: by now few requests can still be under way
    recorder.retried("upload", retries, storage.retries)
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
        run = [0]  # by file: number of its run of neighbours of one state
        for file, following in pairwise(files):
            run.append(run[-1] + (file.upload.state != following.upload.state))
        tasks.sort(key=lambda task: (run[task[0]], task[1], task[0]))
    return tasks


def _work(run: _Run) -> None:
    """Write one part after the other until none is left, or an error occurs in any thread."""
    try:
        while not run.stop.is_set() and run.error is None:
            with run.lock:
                task = next(run.tasks, None)
                due = run.begun + run.pace * run.handed_out
                run.handed_out += 0 if task is None else task[3] - task[2]
            if task is None:
                return
            run.hurry.wait(max(0.0, due - time.monotonic()))
            if run.stop.is_set():
                return
            _write_part(run, *task)
    except BaseException as error:
        with run.lock:
            run.error = run.error or error


def _write_part(run: _Run, index: int, number: int, start: int, stop: int) -> None:
    file = run.files[index]
    data = run.source(index, start, stop)
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
        # The CRC-32C of the blocks gives that of the part, by which the server checks it.
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
    begin = file.started
    for stage, end in (("serialise", begin + file.crc_seconds), ("upload", time.time())):
        run.recorder.add(Timing(0, "save", upload.state, stage, begin, end, upload.size, name))


@dataclass(frozen=True)
class UploadJob:
    """All objects that one rank writes in one save; sent to the uploading process as JSON."""

    rank: int
    uri: str
    path: str
    attempt: str
    files: Sequence[FileUpload]
    num_threads: int = 4
    timeout_s: float = 1800.0
    pace_s: float = 0.0


def run_job(
    job: UploadJob,
    storage: Store,
    memory: memoryview,
    stop: threading.Event,
    hurry: threading.Event,
) -> tuple[list[FileResult], list[Timing]]:
    """Write the files of a job under a journal of this rank; return their results and timings."""

    def source(file: int, start: int, end: int) -> memoryview:
        first = job.files[file].start
        return memory[first + start : first + end]

    recorder = Recorder(job.rank, "save")
    journal = Journal(storage, job.path, job.attempt, name=f"{job.rank:05d}")
    try:
        journal.begin([file.key for file in job.files if is_large(file.size)])
        journal.keep()
        written = upload_files(
            storage,
            job.files,
            source,
            journal=journal,
            recorder=recorder,
            stop=stop,
            num_threads=job.num_threads,
            pace_s=job.pace_s,
            hurry=hurry,
        )
    finally:
        journal.close()
    return written, recorder.timeline().records
