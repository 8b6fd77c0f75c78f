"""The trainer's side of the uploading process: start it, hand it buffers and jobs, hear of them.

One process per rank, started once; no import of the user's main script, no `__main__` guard.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (upload in a process of its own).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import planish
from planish.base.errors import SaveFailed
from planish.checkpoint.ranks import control_errors
from planish.checkpoint.save.channel import Channel
from planish.checkpoint.save.host_memory import SharedBuffer
from planish.checkpoint.save.upload import Cancelled, FileResult
from planish.checkpoint.save.upload_job import UploadJob, UploadResult
from planish.checkpoint.save.upload_worker import job_fields
from planish.checkpoint.watch.timings import Timing

STORE_SETTINGS = ("MINIO_", "AWS_", "PLANISH_")
"""The process is started anew when environment variables that begin so have changed."""
CLOSE_SECONDS = 15.0


class ProcessUploader:
    """One uploading process; `start` brings it back when it has died.

    Example:
        >>> uploader = ProcessUploader()
        >>> uploader.alive
        False
        >>> uploader.close()
    """

    def __init__(self) -> None:
        """Start nothing yet."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._known: set[int] = set()
        self._settings: dict[str, str] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._jobs: dict[int, int] = {}
        """Job to the process that does it; a later process knows nothing of it."""
        self._generation = 0
        self._lock = threading.RLock()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Process id, 0 if none runs."""
        return self._process.pid if self._process is not None and self.alive else 0

    def start(self) -> None:
        """Make sure that the process runs, with the present settings of the store."""
        settings = store_settings()
        with self._lock:
            if self.alive and settings == self._settings:
                return
            self.close()
            ours, theirs = socket.socketpair()
            package = str(Path(planish.__file__).resolve().parents[1])
            paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            # Not the main script and not its folder: only this package and what it imports.
            command = [sys.executable, "-P", "-m", "planish.checkpoint.save.upload_worker"]
            with theirs:
                self._process = subprocess.Popen(
                    [*command, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(paths),
                        "OMP_NUM_THREADS": "1",
                    },
                )
            self._generation += 1
            self._channel, self._settings = Channel(ours), settings

    def submit(self, job: UploadJob, buffer: SharedBuffer | None) -> None:
        """Begin a job; if the process is gone, `wait` says so."""
        number = buffer.number if buffer is not None else 0
        with self._lock:
            self._jobs[job.number] = self._generation
            if buffer is not None and number not in self._known:
                fields = {"do": "buffer", "number": number, "size": buffer.size}
                self._send(fields, fds=[buffer.fd])
                self._known.add(number)
            self._send({"do": "job", "buffer": number, **job_fields(job)}, job.blobs)

    def staged(self, number: int, value: int, after_s: float = 0.0) -> None:
        """Tell a job how many bytes of its buffer are in place, and not to begin at once."""
        self._send({"do": "staged", "job": number, "value": value, "after_s": after_s})

    def cancel(self, number: int) -> None:
        """Ask a job to end; `wait` still has to be called."""
        self._send({"do": "cancel", "job": number})

    def give_up(self, number: int) -> None:
        """Cancel a job and see it end, so that nothing is written once it is cleared away."""
        if number not in self._jobs:
            return
        self.cancel(number)
        limit = time.monotonic() + CLOSE_SECONDS
        with contextlib.suppress(SaveFailed):
            while number not in self._answers and time.monotonic() < limit:
                self._receive(number)
        self._answers.pop(number, None)
        self._jobs.pop(number, None)

    def drop(self, buffer: SharedBuffer) -> None:
        """Tell the process that a buffer is given back."""
        with self._lock:
            if buffer.number in self._known:
                self._known.discard(buffer.number)
                self._send({"do": "drop", "number": buffer.number})

    def wait(self, number: int, deadline: float, check: Callable[[], None]) -> UploadResult:
        """Return what came of a job, calling `check` several times a second.

        After an error the job goes on until `give_up`.

        Raises:
            SaveFailed: the process ended, or `deadline` (`time.monotonic`) passed.
            Cancelled: the job was cancelled.
        """
        while number not in self._answers:
            check()
            if time.monotonic() > deadline:
                raise SaveFailed(
                    "the upload must end within `timeout_s`, but has not; is the store slow?"
                )
            self._receive(number)
        answer = self._answers.pop(number)
        self._jobs.pop(number, None)
        if "cancelled" in answer:
            raise Cancelled
        if "error" in answer:
            raise control_errors.joined(control_errors.decode(answer["error"].encode()), 1)
        return UploadResult(
            tuple(
                FileResult(k, size, name, tuple(crcs)) for k, size, name, crcs in answer["files"]
            ),
            tuple(Timing(*row) for row in answer["timings"]),
        )

    def close(self) -> None:
        """End the process; jobs under way are dropped."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            if self._process is not None:
                try:
                    self._process.wait(CLOSE_SECONDS)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
                self._process = None
            self._known.clear()
            self._answers.clear()

    def _send(self, fields: dict[str, Any], blobs: Any = (), fds: Any = ()) -> None:
        # A process that is gone is noticed by whoever waits for its answer.
        if self._channel is not None:
            self._channel.send(fields, blobs, fds)

    def _receive(self, number: int) -> None:
        channel = self._channel
        if channel is None or self._jobs.get(number) != self._generation:
            raise SaveFailed(self._obituary())
        try:
            message = channel.receive(0.2)
        except EOFError:
            raise SaveFailed(self._obituary()) from None
        if message is not None and message.fields["job"] in self._jobs:
            self._answers[message.fields["job"]] = message.fields

    def _obituary(self) -> str:
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        return (
            f"the uploading process must live until the save has ended, but has ended with code "
            f"{code}; the next save starts it again (was it killed for memory?)"
        )


def store_settings() -> dict[str, str]:
    """Return the environment variables that say which store to use, and how."""
    return {name: os.environ[name] for name in os.environ if name.startswith(STORE_SETTINGS)}
