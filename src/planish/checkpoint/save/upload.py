"""Writes the objects of one rank: parts in flight from several threads, as soon as staged.

Runs in the uploading process and, for small or unshareable states, in the trainer itself.
Deliberately without torch.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (split upload, overlapped with staging).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from planish.base.errors import StoreError
from planish.checkpoint.commit.journal import Journal
from planish.checkpoint.format.integrity import DEFAULT, block_crcs, joined_crc
from planish.checkpoint.storage.base import SINGLE_PUT_BYTES, Multipart, Storage, drop_twins
from planish.checkpoint.watch.timings import Recorder, Timing

BLOCK = 1 << 20
"""Bytes that share a checksum."""


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


class Source(Protocol):
    """Where the bytes of the objects come from; called from several threads."""

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes of object number `file`, waiting until they are there.

        The memory may be used until the same thread reads again.
        """


class Progress:
    """How many bytes of a buffer are in place; grows from 0.

    Example:
        >>> progress = Progress()
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
        progress: Progress,
        stop: threading.Event,
    ) -> None:
        """Read file i from `view[starts[i]:]`, the files after those from `blobs`."""
        self._view, self._starts, self._progress = view, starts, progress
        self._blobs, self._stop = blobs, stop

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes of an object; see `Source`."""
        if file >= len(self._starts):
            return memoryview(self._blobs[file - len(self._starts)])[start:stop]
        base = self._starts[file]
        self._progress.wait(base + stop, self._stop)
        return self._view[base + start : base + stop]


@dataclass
class _File:
    """An object on its way."""

    upload: FileUpload
    parts: Multipart | None
    left: int
    crcs: np.ndarray[tuple[int], np.dtype[np.uint32]]
    crc_seconds: float = 0.0
    started: float = 0.0


@dataclass
class _Run:
    """What the threads of one call share."""

    storage: Storage
    files: list[_File]
    source: Source
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
    storage: Storage,
    files: Sequence[FileUpload],
    source: Source,
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
        journal: This process's, begun with the keys of large files; hears of the uploads.
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
        tasks = _turns(states) if in_turns else _tasks(states)
        pace = pace_s / max(1, sum(file.size for file in files))
        run = _Run(storage, states, source, recorder, stop, tasks, pace)
        _work_in_threads(run, min(num_threads, sum(state.left for state in states)))
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
    drop_twins(storage, begun)  # at the end: the later, the less can still be on its way
    recorder.retried("upload", retries, storage.counters.retries)
    return [
        FileResult(s.upload.key, s.upload.size, DEFAULT, tuple(s.crcs.tolist())) for s in states
    ]


def is_large(size: int) -> bool:
    """Return whether an object of `size` bytes is written in parts."""
    return size >= SINGLE_PUT_BYTES


def _tasks(files: Sequence[_File]) -> Iterator[tuple[int, int, int, int]]:
    """Yield (file, number of the part, first byte, one past the last) in the order of staging."""
    for index, file in enumerate(files):
        step = file.parts.part_bytes if file.parts else max(1, file.upload.size)
        for number, start in enumerate(range(0, max(1, file.upload.size), step), 1):
            yield index, number, start, min(file.upload.size, start + step)


def _turns(files: Sequence[_File]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the same tasks, those of neighbouring files of one state by their part numbers."""
    states = [file.upload.state for file in files]
    begin = 0
    for end in range(1, len(files) + 1):
        if end < len(files) and states[end] == states[begin]:
            continue
        found = [
            (index + begin, n, start, stop) for index, n, start, stop in _tasks(files[begin:end])
        ]
        yield from sorted(found, key=lambda task: (task[1], task[0]))
        begin = end


def _work_in_threads(run: _Run, num_threads: int) -> None:
    if num_threads <= 1:
        _work(run)
        return
    threads = [
        threading.Thread(target=_work, args=(run,), name="upload", daemon=True)
        for _ in range(num_threads)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _work(run: _Run) -> None:
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
        file.parts.write(number, data, joined_crc(crcs, data) if DEFAULT == "crc32c" else None)
    with run.lock:
        file.left -= 1
        if file.left:
            return
    if file.parts is not None:
        file.parts.complete()
        file.parts = None
    _record(run.recorder, file)


def _record(recorder: Recorder, file: _File) -> None:
    upload, name = file.upload, file.upload.key.rpartition("/a-")[2].partition("/")[2]
    for stage, start, end in (
        ("serialise", file.started, file.started + file.crc_seconds),
        ("upload", file.started, time.time()),
    ):
        recorder.add(
            Timing(recorder.rank, "save", upload.state, stage, start, end, upload.size, name)
        )


class ReusedMemory:
    """One piece of memory per thread, for objects that have to be put together first."""

    def __init__(self, fill: Callable[[int, int, int, memoryview], None]) -> None:
        """Take `fill(file, start, stop, memory)`, which writes the bytes asked for."""
        self._fill, self._own = fill, threading.local()

    def read(self, file: int, start: int, stop: int) -> memoryview:
        """Return bytes of an object; see `Source`."""
        memory: bytearray | None = getattr(self._own, "memory", None)
        if memory is None or len(memory) < stop - start:
            self._own.memory = memory = bytearray(stop - start)
        view = memoryview(memory)[: stop - start]
        self._fill(file, start, stop, view)
        return view
