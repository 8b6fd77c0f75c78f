"""Worker process of each rank that writes staged bytes to the store, and the trainer's client.

`Uploader` starts `python -m planish.checkpoint.saving.uploader FD` once and keeps that process. It
imports neither torch nor the user's main script, so the script needs no `__main__` guard. Its
niceness lets the trainer's threads run first, and it ends when the trainer does. For a small save,
or a store that another process can not open, a thread serves the same protocol.

The trainer sends a job over a `multiprocessing.connection` as JSON, then the descriptor of its
staging buffer; the worker answers in JSON.

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (upload in a process of its own).
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
_STOP, _END, _HURRY = b"stop", b"end", b"hurry"
"""Control messages: cancel the job; exit; upload the rest of the job at full speed."""


def store_settings() -> dict[str, str]:
    """Return the environment variables with the settings of the store."""
    return {name: os.environ[name] for name in os.environ if name.startswith(STORE_SETTINGS)}


class Uploader:
    """Client in the trainer: runs one job at a time, from one thread."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._settings: dict[str, str] = {}
        self._working: Connection | None = None
        """Connection to the worker whose answer is still to come."""

    @property
    def pid(self) -> int:
        """Id of the process, 0 if none runs."""
        process = self._process
        return process.pid if process is not None and process.poll() is None else 0

    def start(self) -> None:
        """Make sure that the process runs, with the present settings of the store."""
        settings = store_settings()
        if self.pid and settings == self._settings:
            return
        self.close()
        ours, theirs = Pipe()
        package = str(Path(__file__).resolve().parents[3])
        paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
        # `-P` keeps the folder of the main script out of `sys.path`.
        command = [sys.executable, "-P", "-m", "planish.checkpoint.saving.uploader"]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
            )
        self._connection, self._settings = ours, settings

    def upload(
        self, job: UploadJob, buffer: SharedBuffer, store: Store | None, check: Callable[[], None]
    ) -> dict[str, Any]:
        """Run a job and wait for it; after an error the worker goes on with it until `give_up`.

        Args:
            job: Objects to write.
            buffer: Buffer that has their bytes.
            store: Store to which a thread of this process writes; None: the uploading process
                writes, to the store of the job's URI.
            check: Called several times a second; an error in it ends the wait.

        Returns:
            `files`: fields of each `FileResult`; `timings`: fields of each `Timing`.
        """
        if store is not None:
            connection, theirs = Pipe()
            threading.Thread(target=serve, args=(theirs, store), name="upload", daemon=True).start()
        else:
            self.start()
            assert self._connection is not None
            connection = self._connection
        self._working = connection
        with self._seeing_the_end():
            message = {"size": buffer.size, "job": asdict(job)}
            connection.send_bytes(json.dumps(message).encode())
            send_handle(connection, buffer.fd, self.pid)
        is_told = False
        while not connection.poll(POLL_SECONDS):
            check()
            if ENDING.is_set() and not is_told:
                is_told = True
                with self._seeing_the_end():
                    connection.send_bytes(_HURRY)
        with self._seeing_the_end():
            answer: dict[str, Any] = json.loads(connection.recv_bytes())
        self._working = None
        if store is not None:
            _leave(connection)
        if "error" in answer:
            raise joined_error(decode_errors(answer["error"]), 1)
        return answer

    def give_up(self) -> None:
        """Cancel an unanswered job and wait, so that it writes nothing after the cleanup."""
        connection, self._working = self._working, None
        if connection is None:
            return
        with contextlib.suppress(EOFError, OSError):
            connection.send_bytes(_STOP)
            if connection.poll(CLOSE_SECONDS):
                connection.recv_bytes()
                if connection is self._connection:
                    return
        if connection is self._connection:
            self._end(0.0)
        else:
            _leave(connection)

    def close(self) -> None:
        """End the process; jobs under way are dropped."""
        self._end(CLOSE_SECONDS)

    def _end(self, seconds: float) -> None:
        if self._connection is not None:
            _leave(self._connection)
        if self._process is not None:
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._connection = None

    @contextlib.contextmanager
    def _seeing_the_end(self) -> Iterator[None]:
        """Raise `SaveFailed` if the worker has ended."""
        try:
            yield
        except (EOFError, ConnectionError):
            code: int | None = None
            if self._process is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self._process.wait(1.0)
            raise SaveFailed(
                f"the uploading process must live until the save has ended, but has ended with "
                f"code {code}; the next save starts it again (was it killed for memory?)"
            ) from None


def _leave(connection: Connection) -> None:
    # A close alone is not enough: a process that the trainer has forked may keep this end open.
    with contextlib.suppress(OSError):
        connection.send_bytes(_END)
    connection.close()


def serve(connection: Connection, store: Store | None = None, parent: int = 0) -> None:
    """Run jobs until the client leaves, in `store` or the store of each job's URI.

    `parent` is the process id of the trainer. When this process has another parent, the trainer is
    dead: its queued jobs are dropped, even if a forked process keeps the connection open.
    """
    stop, hurry, thread = threading.Event(), threading.Event(), threading.Thread()
    with connection:
        try:
            while not parent or os.getppid() == parent:
                if not connection.poll(1.0) or (parent and os.getppid() != parent):
                    continue
                message = connection.recv_bytes()
                if message == _END:
                    break
                if message in (_STOP, _HURRY):
                    if message == _STOP:
                        stop.set()
                    hurry.set()
                    continue
                stop, hurry = threading.Event(), threading.Event()
                thread = _start_job(connection, json.loads(message), store, stop, hurry)
        except (EOFError, OSError):
            pass
        stop.set()
        hurry.set()
        if thread.ident is not None:
            thread.join(FAREWELL_SECONDS)


def _start_job(
    connection: Connection,
    message: dict[str, Any],
    store: Store | None,
    stop: threading.Event,
    hurry: threading.Event,
) -> threading.Thread:
    """Start a thread that maps the job's buffer, runs the job and sends the answer."""
    fields = message["job"]
    job = UploadJob(**{**fields, "files": [FileUpload(**file) for file in fields["files"]]})
    fd = recv_handle(connection)
    mapped = mmap.mmap(fd, message["size"], prot=mmap.PROT_READ)
    os.close(fd)

    def work() -> None:
        try:
            found = store or open_store(job.uri, timeout_s=job.timeout_s)[0]
            files, timings = run_job(job, found, memoryview(mapped), stop, hurry)
            answer = {"files": [*map(astuple, files)], "timings": [*map(astuple, timings)]}
            data = json.dumps(answer)
        except Exception as error:
            data = json.dumps({"error": encode_errors({job.rank: error})})
        with contextlib.suppress(OSError):
            connection.send_bytes(data.encode())

    thread = threading.Thread(target=work, name="upload-job", daemon=True)
    thread.start()
    return thread


def main() -> None:
    """Serve on the descriptor given as the only argument."""
    # The trainer decides when this process ends, so a signal to the process group is ignored.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    serve(Connection(int(sys.argv[1])), parent=os.getppid())
    # A thread whose request hangs must not keep the process alive.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
