"""The uploading process: reads staged bytes from shared memory and writes them to the store.

Started as `python -m planish.checkpoint.save.upload_worker FD` with one end of a socket pair; it
knows nothing of the trainer's main script and never imports torch. It gives way to the trainer's
threads, and ends when the trainer does, having dropped its unfinished uploads.
"""

from __future__ import annotations

import dataclasses
import mmap
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

from planish.checkpoint.ranks import control_errors
from planish.checkpoint.save.channel import Channel, Message
from planish.checkpoint.save.upload import BufferSource, Cancelled, FileUpload, Progress
from planish.checkpoint.save.upload_job import UploadJob, UploadResult, run_job
from planish.checkpoint.storage.base import Storage, open_storage

NICENESS = 10
"""Trainers go first."""
FAREWELL_SECONDS = 10.0
"""How long unfinished uploads may take to be dropped once the trainer is gone."""


class Worker:
    """Jobs by number, buffers by number, storages by URI scheme and bucket."""

    def __init__(self, channel: Channel) -> None:
        """Serve the trainer at the other end of `channel`."""
        self._channel = channel
        self._parent = os.getppid()
        self._buffers: dict[int, mmap.mmap] = {}
        self._jobs: dict[int, tuple[Progress, threading.Event, threading.Thread]] = {}
        self._storages: dict[str, Storage] = {}

    def serve(self) -> None:
        """Do what messages say until the trainer closes its end or is gone."""
        try:
            while True:
                message = self._channel.receive(1.0)
                if message is not None:
                    getattr(self, f"_do_{message.fields['do']}")(message)
                elif os.getppid() != self._parent:
                    break
        except EOFError:
            pass
        finally:
            limit = time.monotonic() + FAREWELL_SECONDS
            for _, stop, _ in list(self._jobs.values()):
                stop.set()
            for _, _, thread in list(self._jobs.values()):
                thread.join(max(0.0, limit - time.monotonic()))

    def _do_buffer(self, message: Message) -> None:
        (fd,) = message.fds
        self._buffers[message.fields["number"]] = mmap.mmap(
            fd, message.fields["size"], prot=mmap.PROT_READ
        )
        os.close(fd)

    def _do_drop(self, message: Message) -> None:
        # Its memory goes when the last job that reads it has ended.
        self._buffers.pop(message.fields["number"], None)

    def _do_job(self, message: Message) -> None:
        job = job_of(message)
        progress, stop = Progress(), threading.Event()
        buffer = self._buffers.get(message.fields["buffer"])
        view = memoryview(buffer) if buffer is not None else memoryview(b"")
        source = BufferSource(view, job.starts, job.blobs, progress, stop)
        thread = threading.Thread(target=self._run, args=(job, source, stop), daemon=True)
        self._jobs[job.number] = progress, stop, thread
        thread.start()

    def _do_staged(self, message: Message) -> None:
        found = self._jobs.get(message.fields["job"])
        if found is None:
            return
        value, after_s = message.fields["value"], message.fields["after_s"]
        if after_s:
            timer = threading.Timer(after_s, found[0].advance, [value])
            timer.daemon = True
            timer.start()
        else:
            found[0].advance(value)

    def _do_cancel(self, message: Message) -> None:
        found = self._jobs.get(message.fields["job"])
        if found is not None:
            found[1].set()

    def _run(self, job: UploadJob, source: BufferSource, stop: threading.Event) -> None:
        try:
            answer = encode_result(run_job(job, self._storage(job), source, stop))
        except Cancelled:
            answer = {"cancelled": True}
        except Exception as error:
            answer = {"error": control_errors.encode({job.rank: error}).decode()}
        del source
        self._jobs.pop(job.number, None)
        self._channel.send({"job": job.number, **answer})

    def _storage(self, job: UploadJob) -> Storage:
        # The storage is that of the part of the URI before the checkpoint's key.
        place = job.uri.removesuffix(job.path)
        if place not in self._storages:
            self._storages[place] = open_storage(job.uri, timeout_s=job.timeout_s)[0]
        return self._storages[place]


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


def encode_result(result: UploadResult) -> dict[str, Any]:
    """Return a result as JSON."""
    return {
        "files": [dataclasses.astuple(file) for file in result.files],
        "timings": [dataclasses.astuple(record) for record in result.timings],
    }


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
