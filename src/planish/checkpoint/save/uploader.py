"""The uploading process: reads staged bytes from shared memory and writes them to the store.

`ProcessUploader` is the trainer's side; it starts `python -m planish.checkpoint.save.uploader FD`
with one end of a socket pair, once per rank. That process runs a `Worker`. It never imports torch
nor the user's main script, so that needs no `__main__` guard. It lets the trainer's threads run
first, and ends when the trainer does, having dropped its unfinished uploads.

A message is JSON, some blobs of bytes and file descriptors. Both ends are ours, so what arrives
is trusted::

    head     u32 bytes of JSON, u32 number of blobs
    sizes    u64 for each blob
    JSON, then the blobs

Source: ByteCheckpoint, arXiv 2407.20143, section 4.2 (upload in a process of its own).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planish.base.errors import SaveFailed
from planish.checkpoint.ranks.messages import decode_errors, encode_errors, joined_error
from planish.checkpoint.save.upload import (
    Cancelled,
    FileResult,
    FileUpload,
    RunningJob,
    UploadJob,
    UploadResult,
)
from planish.checkpoint.watch.monitor import Timing
from planish.store import Store, open_store

if TYPE_CHECKING:
    from planish.checkpoint.save.staging import SharedBuffer

STORE_SETTINGS = ("MINIO_", "AWS_", "PLANISH_")
"""The process is started anew when environment variables that begin so have changed."""
NICENESS = 10
"""Of the uploading process: trainers go first."""
CLOSE_SECONDS = 15.0
"""How long the trainer waits for the process to end, or for a job that it gives up."""
FAREWELL_SECONDS = 10.0
"""How long unfinished uploads may take to be dropped once the trainer is gone."""
_HEAD = struct.Struct("<II")
_MOST_FDS = 4


class Message(NamedTuple):
    """One message."""

    fields: dict[str, Any]
    blobs: list[bytes]
    fds: list[int]
    """Descriptors of the receiver, who must close them."""


class Channel:
    """One end of the socket pair; any thread may send, one thread at a time receives.

    A thread of the channel writes, because a signal that interrupts the caller would leave half a
    message, and the other end would take the next one for the rest of it.

    Example:
        >>> a, b = map(Channel, socket.socketpair())
        >>> a.send({"do": "x"}, [b"12"])
        >>> b.receive(60.0).blobs
        [b'12']
        >>> a.close(); b.close()
    """

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._outgoing: queue.SimpleQueue[tuple[list[bytes], list[int]] | None]
        self._outgoing = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="channel", daemon=True)
        self._sender.start()

    def send(
        self, fields: Mapping[str, Any], blobs: Sequence[bytes] = (), fds: Sequence[int] = ()
    ) -> None:
        """Send a message as a whole, in the background; none arrives once the other end is gone.

        Descriptors are duplicated, so the caller may close its own.
        """
        body = json.dumps(fields).encode()
        head = _HEAD.pack(len(body), len(blobs))
        sizes = struct.pack(f"<{len(blobs)}Q", *map(len, blobs))
        self._outgoing.put(([head, sizes + body, *blobs], [os.dup(fd) for fd in fds]))

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, None if none begins within `timeout_s`.

        Raises:
            EOFError: the other end is gone.
        """
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return None
        try:
            head, fds, _, _ = socket.recv_fds(self._socket, _HEAD.size, _MOST_FDS)
            head += self._exactly(_HEAD.size - len(head)) if head else b""
            if not head:
                raise EOFError
            length, count = _HEAD.unpack(head)
            sizes = struct.unpack(f"<{count}Q", self._exactly(8 * count))
            fields = json.loads(self._exactly(length))
            blobs = [bytes(self._exactly(size)) for size in sizes]
        except OSError as error:
            raise EOFError from error
        return Message(fields, blobs, list(fds))

    def close(self) -> None:
        """Close this end, whether or not all is sent; the other one sees it."""
        self._outgoing.put(None)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._sender.join()
        self._socket.close()

    def _send_all(self) -> None:
        while (message := self._outgoing.get()) is not None:
            (head, *rest), fds = message
            with contextlib.suppress(OSError):
                if fds:
                    socket.send_fds(self._socket, [head], fds)
                else:
                    self._socket.sendall(head)
                for part in rest:
                    self._socket.sendall(part)
            for fd in fds:
                os.close(fd)

    def _exactly(self, size: int) -> bytes:
        data = bytearray(size)
        view, done = memoryview(data), 0
        while done < size:
            count = self._socket.recv_into(view[done:])
            if not count:
                raise EOFError
            done += count
        return bytes(data)


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
        """Numbers of the buffers that the process has mapped."""
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
            package = str(Path(__file__).resolve().parents[3])
            paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
            # Not the main script and not its folder: only this package and what it imports.
            command = [sys.executable, "-P", "-m", "planish.checkpoint.save.uploader"]
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
        """Cancel a job and wait for its end, so that nothing is written once it is cleared away."""
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
        """Return what a job has written, calling `check` several times a second.

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
            raise joined_error(decode_errors(answer["error"].encode()), 1)
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
        """Keep the next answer; raises `SaveFailed` if the process of the job has ended."""
        if self._channel is not None and self._jobs.get(number) == self._generation:
            try:
                message = self._channel.receive(0.2)
            except EOFError:
                pass
            else:
                if message is not None and message.fields["job"] in self._jobs:
                    self._answers[message.fields["job"]] = message.fields
                return
        code: int | None = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        raise SaveFailed(
            f"the uploading process must live until the save has ended, but has ended with code "
            f"{code}; the next save starts it again (was it killed for memory?)"
        )


def store_settings() -> dict[str, str]:
    """Return the environment variables that say which store to use, and how."""
    return {name: os.environ[name] for name in os.environ if name.startswith(STORE_SETTINGS)}


def job_fields(job: UploadJob) -> dict[str, Any]:
    """Return a job without its blobs as JSON."""
    fields = {f.name: getattr(job, f.name) for f in dataclasses.fields(job) if f.name != "blobs"}
    return {**fields, "files": [dataclasses.astuple(file) for file in job.files]}


def job_of(message: Message) -> UploadJob:
    """Undo `job_fields`."""
    fields = dict(message.fields)
    del fields["do"], fields["buffer"]
    fields["files"] = tuple(FileUpload(*row) for row in fields["files"])
    fields["starts"] = tuple(fields["starts"])
    return UploadJob(**fields, blobs=tuple(message.blobs))


class Worker:
    """The uploading process: jobs by number, buffers by number, storages by scheme and bucket."""

    def __init__(self, channel: Channel) -> None:
        """Serve the trainer at the other end of `channel`."""
        self._channel = channel
        self._parent = os.getppid()
        self._buffers: dict[int, mmap.mmap] = {}
        self._jobs: dict[int, RunningJob] = {}
        self._storages: dict[str, Store] = {}

    def serve(self) -> None:
        """Do what messages say until the trainer closes its end or is gone."""
        try:
            while True:
                message = self._channel.receive(1.0)
                if message is not None:
                    self._obey(message)
                elif os.getppid() != self._parent:
                    break
        except EOFError:
            pass
        finally:
            limit = time.monotonic() + FAREWELL_SECONDS
            jobs = list(self._jobs.values())
            for running in jobs:
                running.stop.set()
            for running in jobs:
                running.thread.join(max(0.0, limit - time.monotonic()))

    def _obey(self, message: Message) -> None:
        fields = message.fields
        match fields["do"]:
            case "buffer":
                (fd,) = message.fds
                mapped = mmap.mmap(fd, fields["size"], prot=mmap.PROT_READ)
                self._buffers[fields["number"]] = mapped
                os.close(fd)
            case "drop":
                # Its memory goes when the last job that reads it has ended.
                self._buffers.pop(fields["number"], None)
            case "job":
                job = job_of(message)
                view = memoryview(self._buffers.get(fields["buffer"], b""))
                running = RunningJob(job, view, lambda: self._storage(job), self._answer)
                self._jobs[job.number] = running
                running.thread.start()
            case "staged" if fields["job"] in self._jobs:
                progress = self._jobs[fields["job"]].progress
                if fields["after_s"]:
                    timer = threading.Timer(fields["after_s"], progress.advance, [fields["value"]])
                    timer.daemon = True
                    timer.start()
                else:
                    progress.advance(fields["value"])
            case "cancel" if fields["job"] in self._jobs:
                self._jobs[fields["job"]].stop.set()

    def _answer(self, running: RunningJob) -> None:
        """Tell the trainer how a job has ended."""
        job, result, error = running.job, running.result, running.error
        if result is not None:
            answer: dict[str, Any] = {
                "files": [dataclasses.astuple(file) for file in result.files],
                "timings": [dataclasses.astuple(record) for record in result.timings],
            }
        elif isinstance(error, Cancelled):
            answer = {"cancelled": True}
        else:
            reason = error if isinstance(error, Exception) else SaveFailed(repr(error))
            answer = {"error": encode_errors({job.rank: reason}).decode()}
        self._jobs.pop(job.number, None)
        self._channel.send({"job": job.number, **answer})

    def _storage(self, job: UploadJob) -> Store:
        # The storage is that of the part of the URI before the checkpoint's key.
        place = job.uri.removesuffix(job.path)
        if place not in self._storages:
            self._storages[place] = open_store(job.uri, timeout_s=job.timeout_s)[0]
        return self._storages[place]


def main() -> None:
    """Serve on the descriptor given as the only argument."""
    # The trainer decides when to end; a signal to the whole group must not come first.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.nice(NICENESS)
    Worker(Channel(socket.socket(fileno=int(sys.argv[1])))).serve()
    # Threads in a request that hangs must not keep the process.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
