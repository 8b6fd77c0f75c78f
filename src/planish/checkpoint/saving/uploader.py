"""Worker process of each rank that writes staged bytes to the store, and the trainer's client.

`Uploader` starts `python -m planish.checkpoint.saving.uploader` once and keeps that process. It
imports neither torch nor the user's main script, so the script needs no `__main__` guard. Its
niceness lets the trainer's threads run first, and it ends when the trainer does. For a small save,
or a store that another process can not open, a thread serves the same protocol.

The trainer sends a job with the descriptor of its staging buffer over a `base.child.Channel`; the
worker answers there.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (upload in a process of its own).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, astuple
from pathlib import Path
from typing import TYPE_CHECKING

from planish.base.child import Channel, Child, Message, start_child
from planish.base.errors import SaveFailed
from planish.base.startup import ENDING
from planish.checkpoint.ranks.messages import decode_errors, encode_errors, joined_error
from planish.checkpoint.saving.upload import FileUpload, UploadJob, run_job
from planish.store import Store, open_store

if TYPE_CHECKING:
    from planish.checkpoint.saving.staging import SharedBuffer

STORE_SETTINGS = ("MINIO_", "AWS_", "PLANISH_")
"""Prefixes of the store's environment variables; a change of one restarts the process."""
NICENESS = 10
"""Niceness of the uploading process, so that the trainer's threads run first."""
CLOSE_SECONDS = 15.0
"""Longest wait of the trainer for the process to end, or for a cancelled job."""
FAREWELL_SECONDS = 10.0
"""Longest wait of the process for its cancelled job once the trainer is gone."""
POLL_SECONDS = 0.2
_STOP, _HURRY = {"op": "stop"}, {"op": "hurry"}
"""Messages during a job: cancel it; upload the rest of it at full speed."""


def store_settings() -> dict[str, str]:
    """Return the environment variables with the settings of the store."""
    return {name: os.environ[name] for name in os.environ if name.startswith(STORE_SETTINGS)}


class Uploader:
    """Client in the trainer: runs one job at a time, from one thread."""

    def __init__(self) -> None:
        self._child: Child | None = None
        self._settings: dict[str, str] = {}
        self._working: Child | None = None
        """Worker whose answer is still to come."""

    @property
    def pid(self) -> int:
        """Id of the process, 0 if none runs."""
        return 0 if self._child is None else self._child.pid

    def start(self) -> Child:
        """Make sure that the process runs, with the present settings of the store; return it."""
        settings = store_settings()
        if self._child is not None:
            if self._child.pid and settings == self._settings:
                return self._child
            self.close()
        package = str(Path(__file__).resolve().parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._settings = settings
        self._child = start_child(
            # `-P` keeps the folder of the main script out of `sys.path`.
            [sys.executable, "-P", "-m", "planish.checkpoint.saving.uploader"],
            is_trusted=True,
            environment={"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        return self._child

    def upload(
        self, job: UploadJob, buffer: SharedBuffer, store: Store | None, check: Callable[[], None]
    ) -> Message:
        """Run a job and wait for it; after an error the worker goes on with it until `give_up`.

        Args:
            job: Objects to write.
            buffer: Buffer that has their bytes.
            store: Store to which a thread of this process writes; None: the uploading process
                writes, to the store of the job's URI.
            check: Called several times a second; an error in it ends the wait.

        Returns:
            `files`: fields of each `FileResult`; `timings`: fields of each `Timing`.

        Raises:
            SaveFailed: the worker has ended.
        """
        worker = self.start() if store is None else _start_thread(store)
        self._working, is_told = worker, False
        try:
            message = {"size": buffer.size, "job": asdict(job)}
            worker.channel.send(message, files=[buffer.fd])
            while not worker.channel.has_message(POLL_SECONDS):
                check()
                if ENDING.is_set() and not is_told:
                    is_told = True
                    worker.channel.send(_HURRY)
            answer = worker.channel.receive()
        except ConnectionError:
            raise SaveFailed(
                f"the uploading process must live until the save has ended, but has ended with "
                f"code {worker.code(1.0)}; the next save starts it again (was it killed for "
                "memory?)"
            ) from None
        self._working = None
        if store is not None:
            worker.close()
        if "error" in answer:
            raise joined_error(decode_errors(answer["error"]), 1)
        return answer

    def give_up(self) -> None:
        """Cancel an unanswered job and wait, so that it writes nothing after the cleanup."""
        worker, self._working = self._working, None
        if worker is None:
            return
        with contextlib.suppress(OSError):
            worker.channel.send(_STOP, CLOSE_SECONDS)
            worker.channel.receive(CLOSE_SECONDS)
            if worker is self._child:
                return
        worker.close()

    def close(self) -> None:
        """End the process; jobs under way are dropped."""
        if self._child is not None:
            self._child.close(CLOSE_SECONDS)


def _start_thread(store: Store) -> Child:
    """Start a thread that serves like the process, but writes to `store`."""
    here, there = socket.socketpair()
    channel = Channel(there, max_files=1)
    threading.Thread(target=serve, args=(channel, store), name="upload", daemon=True).start()
    return Child(Channel(here))


def serve(channel: Channel, store: Store | None = None, parent: int = 0) -> None:
    """Run jobs until the client leaves, in `store` or the store of each job's URI.

    `parent` is the process id of the trainer. When this process has another parent, the trainer is
    dead: its queued jobs are dropped, even if a forked process keeps the connection open.
    """
    stop, hurry, thread = threading.Event(), threading.Event(), threading.Thread()
    with contextlib.suppress(OSError):
        while not parent or os.getppid() == parent:
            if not channel.has_message(1.0) or (parent and os.getppid() != parent):
                continue
            message = channel.receive()
            if message in (_STOP, _HURRY):
                if message == _STOP:
                    stop.set()
                hurry.set()
                continue
            stop, hurry = threading.Event(), threading.Event()
            thread = _start_job(channel, message, store, stop, hurry)
    stop.set()
    hurry.set()
    if thread.ident is not None:
        thread.join(FAREWELL_SECONDS)


def _start_job(
    channel: Channel,
    message: Message,
    store: Store | None,
    stop: threading.Event,
    hurry: threading.Event,
) -> threading.Thread:
    """Start a thread that maps the job's buffer, runs the job and sends the answer."""
    fields = message["job"]
    job = UploadJob(**{**fields, "files": [FileUpload(**file) for file in fields["files"]]})
    fd = channel.files.pop()
    mapped = mmap.mmap(fd, message["size"], prot=mmap.PROT_READ)
    os.close(fd)

    def work() -> None:
        answer: Message
        try:
            found = store or open_store(job.uri, timeout_s=job.timeout_s)[0]
            files, timings = run_job(job, found, memoryview(mapped), stop, hurry)
            answer = {"files": [*map(astuple, files)], "timings": [*map(astuple, timings)]}
        except Exception as error:
            answer = {"error": encode_errors({job.rank: error})}
        with contextlib.suppress(OSError):
            channel.send(answer)

    thread = threading.Thread(target=work, name="upload-job", daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Serve at the standard input."""
    # The trainer decides when this process ends, so signals of others are ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    serve(Channel(socket.socket(fileno=0), max_files=1), parent=os.getppid())
    # A thread whose request hangs must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
