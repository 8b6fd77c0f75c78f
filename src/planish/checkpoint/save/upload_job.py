"""What one rank writes in one save, as one job; and doing it in threads of this process.

Small states, and storages that only this process can reach, take this way; others go to the
process of `uploader`, which runs the same job. Deliberately without torch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from planish.base.errors import SaveFailed
from planish.checkpoint.commit.journal import Journal
from planish.checkpoint.save.upload import (
    BufferSource,
    FileResult,
    FileUpload,
    Progress,
    Source,
    is_large,
    upload_files,
)
from planish.checkpoint.storage.base import Storage, open_storage
from planish.checkpoint.watch.timings import Recorder, Timing

GIVE_UP_SECONDS = 15.0
"""How long a request under way is waited for when a job is given up."""


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
    """What came of a job."""

    files: tuple[FileResult, ...] = ()
    timings: tuple[Timing, ...] = ()


def run_job(
    job: UploadJob,
    storage: Storage,
    source: Source,
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


class ThreadUploader:
    """Does jobs in threads of this process; for small states and storages of this process.

    Example:
        >>> ThreadUploader(None).alive
        True
    """

    alive = True

    def __init__(self, storage: Storage | None) -> None:
        """Write to `storage`; None opens that of each job's URI."""
        self._storage = storage
        self._jobs: dict[int, _Threaded] = {}

    def submit(self, job: UploadJob, view: memoryview) -> None:
        """Take a job whose buffer is `view`; `wait` begins it, so that it is in nobody's way."""
        self._jobs[job.number] = _Threaded(job, view, self._storage)

    def staged(self, number: int, value: int, after_s: float = 0.0) -> None:
        """Tell a job how many bytes of its buffer are in place; small jobs begin at once."""
        job = self._jobs.get(number)
        if job is not None:
            job.progress.advance(value)

    def cancel(self, number: int) -> None:
        """Ask a job to end; `wait` still has to be called."""
        if number in self._jobs:
            self._jobs[number].stop.set()

    def give_up(self, number: int) -> None:
        """Cancel a job and see it end."""
        job = self._jobs.pop(number, None)
        if job is not None:
            job.stop.set()
            if job.thread.is_alive():
                job.thread.join(GIVE_UP_SECONDS)

    def wait(self, number: int, deadline: float, check: Callable[[], None]) -> UploadResult:
        """Do a job and return what came of it, calling `check` several times a second.

        After an error the job goes on until `give_up`.

        Raises:
            SaveFailed: it took longer than until `deadline` (`time.monotonic`).
        """
        job = self._jobs[number]
        job.thread.start()
        while job.thread.is_alive():
            job.thread.join(0.2)
            check()
            if time.monotonic() > deadline:
                raise SaveFailed("the upload must end within `timeout_s`, but has not")
        del self._jobs[number]
        if job.error is not None:
            raise job.error
        assert job.result is not None
        return job.result


class _Threaded:
    def __init__(self, job: UploadJob, view: memoryview, storage: Storage | None) -> None:
        self.progress, self.stop = Progress(), threading.Event()
        self.result: UploadResult | None = None
        self.error: BaseException | None = None
        self._source = BufferSource(view, job.starts, job.blobs, self.progress, self.stop)
        self._job, self._storage = job, storage
        self.thread = threading.Thread(target=self._run, name="upload-job", daemon=True)

    def _run(self) -> None:
        try:
            storage = self._storage or open_storage(self._job.uri)[0]
            self.result = run_job(self._job, storage, self._source, self.stop)
        except BaseException as error:
            self.error = error
