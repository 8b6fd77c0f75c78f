"""Jobs in threads and in the uploading process: right bytes and checksums, honest failures."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time

import numpy as np
import psutil
import pytest

from planish.base.errors import SaveFailed, StoreError
from planish.checkpoint.commit.journal import new_attempt
from planish.checkpoint.format.metafile import block_crcs
from planish.checkpoint.save.staging import SharedBuffer
from planish.checkpoint.save.upload import (
    BytesInPlace,
    Cancelled,
    FileUpload,
    ThreadUploader,
    UploadJob,
)
from planish.checkpoint.save.uploader import Channel, ProcessUploader
from planish.store import open_store
from tests.integration.waiting import wait_for


@pytest.fixture(name="uploader", scope="module")
def _uploader():
    uploader = ProcessUploader()
    uploader.start()
    yield uploader
    uploader.close()
    assert not uploader.alive


def job_of(uri, number, sizes, blobs=()):
    storage, path = open_store(uri)
    attempt = new_attempt()
    sizes = [*sizes, *map(len, blobs)]
    files = tuple(
        FileUpload(f"{path}/a-{attempt}/data/main.model/{i}", size, "main.model")
        for i, size in enumerate(sizes)
    )
    starts, place = [], 0
    for size in sizes[: len(sizes) - len(blobs)]:
        starts.append(place)
        place += -(-size // 4096) * 4096
    return storage, UploadJob(
        number, 3, uri, path, attempt, files, tuple(starts), tuple(blobs), num_threads=2
    )


def filled(size):
    buffer = SharedBuffer(size)
    np.frombuffer(buffer.view, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, buffer.size)
    return buffer


def check_objects(storage, job, result, buffer):
    assert [file.key for file in result.files] == [file.key for file in job.files]
    for index, file in enumerate(result.files):
        data, _ = storage.get(file.key, 1 << 30)
        if index < len(job.starts):
            assert data == bytes(buffer.view[job.starts[index] :][: file.size])
        else:
            assert data == job.blobs[index - len(job.starts)]
        assert list(file.crcs) == block_crcs(data).tolist()
    stages = {(t.stage, t.num_bytes) for t in result.timings}
    assert stages == {(s, f.size) for s in ("serialise", "upload") for f in job.files}
    assert {t.rank for t in result.timings} == {3}


SIZES = [(20 << 20) + 5, 700, 17 << 20, 1]


@pytest.mark.slow
def test_the_process_writes_what_lies_in_the_buffer(uploader, file_root):
    storage, job = job_of(f"{file_root}/step-1", 1, SIZES, [b"small", b""])
    buffer = filled(50 << 20)
    uploader.submit(job, buffer)
    uploader.staged(1, buffer.size)
    check_objects(storage, job, uploader.wait(1, time.monotonic() + 120, lambda: None), buffer)


@pytest.mark.slow
def test_threads_write_the_same(file_root):
    storage, job = job_of(f"{file_root}/step-1", 1, SIZES, [b"small", b""])
    buffer, uploader = filled(50 << 20), ThreadUploader(storage)
    uploader.submit(job, buffer.view)
    uploader.staged(1, buffer.size)
    check_objects(storage, job, uploader.wait(1, time.monotonic() + 120, lambda: None), buffer)


def test_nothing_is_written_before_it_is_staged(uploader, file_root):
    storage, job = job_of(f"{file_root}/step-2", 2, [100, 100])
    buffer = filled(8192)
    uploader.submit(job, buffer)
    uploader.staged(2, 4000)
    first, second = (file.key for file in job.files)
    wait_for(lambda: first in {s.key for s in storage.list(job.path)}, 120.0)
    assert second not in {stat.key for stat in storage.list(job.path)}
    buffer.view[4096] = 99
    uploader.staged(2, 8192)
    check_objects(storage, job, uploader.wait(2, time.monotonic() + 120, lambda: None), buffer)


def test_an_upload_that_is_to_begin_later_does(uploader, file_root):
    storage, job = job_of(f"{file_root}/step-9", 9, [100])
    buffer = filled(4096)
    begin = time.monotonic()
    uploader.submit(job, buffer)
    uploader.staged(9, 4096, after_s=0.4)
    check_objects(storage, job, uploader.wait(9, time.monotonic() + 120, lambda: None), buffer)
    assert time.monotonic() - begin >= 0.4


def test_a_dead_process_fails_its_jobs_and_the_next_start_brings_it_back(file_root):
    uploader = ProcessUploader()
    uploader.start()
    _, job = job_of(f"{file_root}/step-3", 3, [100])
    buffer = filled(4096)
    uploader.submit(job, buffer)
    os.kill(uploader.pid, signal.SIGKILL)
    with pytest.raises(SaveFailed, match=r"uploading process .* ended with code -9"):
        uploader.wait(3, time.monotonic() + 120, lambda: None)
    uploader.start()
    with pytest.raises(SaveFailed, match="uploading process"):
        uploader.wait(3, time.monotonic() + 120, lambda: None)
    storage, job = job_of(f"{file_root}/step-4", 4, [100])
    uploader.submit(job, buffer)
    uploader.staged(4, 4096)
    check_objects(storage, job, uploader.wait(4, time.monotonic() + 120, lambda: None), buffer)
    uploader.close()


def test_a_cancelled_job_leaves_no_object_in_parts(uploader, file_root):
    storage, job = job_of(f"{file_root}/step-5", 5, [20 << 20])
    uploader.submit(job, filled(20 << 20))
    uploader.staged(5, 17 << 20)
    uploader.cancel(5)
    with pytest.raises(Cancelled):
        uploader.wait(5, time.monotonic() + 120, lambda: None)
    assert storage.open_uploads(job.files[0].key) == []
    assert [s.key for s in storage.list(job.path) if "/data/" in s.key] == []


def test_a_job_over_its_time_fails_and_so_does_one_whose_save_was_given_up(uploader, file_root):
    _, job = job_of(f"{file_root}/step-6", 6, [100])
    uploader.submit(job, filled(4096))
    with pytest.raises(SaveFailed, match="within `timeout_s`"):
        uploader.wait(6, time.monotonic() + 0.1, lambda: None)
    uploader.give_up(6)

    def given_up():
        raise SaveFailed("rank 1: disk full")

    _, job = job_of(f"{file_root}/step-7", 7, [100])
    uploader.submit(job, filled(4096))
    with pytest.raises(SaveFailed, match="disk full"):
        uploader.wait(7, time.monotonic() + 120, given_up)
    uploader.give_up(7)
    uploader.give_up(7)


def test_an_error_of_the_store_comes_back_with_its_kind(uploader, tmp_path):
    (tmp_path / "file").write_text("no folder")
    _, job = job_of(f"file://{tmp_path}/file/step-1", 8, [100])
    uploader.submit(job, filled(4096))
    uploader.staged(8, 4096)
    with pytest.raises(StoreError, match="file"):
        uploader.wait(8, time.monotonic() + 120, lambda: None)


class Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_interrupt_while_a_message_is_sent_leaves_all_messages_whole():
    def interrupted(*_):
        raise Interrupt

    def send_and_wait():
        interrupting.start()
        # Much more than a socket holds while nobody reads.
        sender.send({"number": 1}, [bytes(range(256)) * (8 << 12)])
        # One long wait would miss a signal that comes just before it begins.
        wait_for(lambda: False, 120.0)

    def interrupt_when_sent_in_part():
        select.select([ends[1]], [], [], 120)
        os.kill(os.getpid(), signal.SIGUSR1)

    ends = socket.socketpair()
    for end in ends:
        end.settimeout(120)
    sender, receiver = map(Channel, ends)
    before = signal.signal(signal.SIGUSR1, interrupted)
    interrupting = threading.Thread(target=interrupt_when_sent_in_part)
    try:
        with pytest.raises(Interrupt):
            send_and_wait()
    finally:
        interrupting.join()
        signal.signal(signal.SIGUSR1, before)
    sender.send({"number": 2}, [b"second"])
    first, second = receiver.receive(120), receiver.receive(120)
    assert (first.fields, first.blobs) == ({"number": 1}, [bytes(range(256)) * (8 << 12)])
    assert (second.fields, second.blobs) == ({"number": 2}, [b"second"])
    sender.close()
    with pytest.raises(EOFError):
        receiver.receive(120)
    receiver.close()


def test_closing_ends_a_message_that_nobody_reads():
    sender, receiver = map(Channel, socket.socketpair())
    sender.send({}, [bytes(32 << 20)])
    sender.close()
    sender.send({})
    receiver.close()


def count_mapped(process):
    return sum("memfd" in m.path for m in process.memory_maps())


def test_buffers_given_back_are_unmapped_there_too(uploader, file_root):
    process = psutil.Process(uploader.pid)
    mapped = count_mapped(process)
    for number in range(10, 14):
        storage, job = job_of(f"{file_root}/step-{number}", number, [100])
        buffer = filled(4 << 20)
        uploader.submit(job, buffer)
        uploader.staged(number, 4096)
        check_objects(
            storage, job, uploader.wait(number, time.monotonic() + 120, lambda: None), buffer
        )
        uploader.drop(buffer)
        buffer.free()
    wait_for(lambda: count_mapped(process) <= mapped, 120.0)
    assert process.num_fds() < 20


def test_the_process_is_polite_and_light(uploader):
    process = psutil.Process(uploader.pid)
    assert process.nice() == min(19, os.nice(0) + 10)
    assert not any("torch" in m.path for m in process.memory_maps())
    os.kill(uploader.pid, signal.SIGTERM)
    os.kill(uploader.pid, signal.SIGINT)
    assert uploader.alive


def test_progress_waits_and_can_be_stopped():
    progress, stop = BytesInPlace(), threading.Event()
    threading.Timer(0.05, progress.advance, [10]).start()
    progress.wait(10, stop)
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(Cancelled):
        progress.wait(11, stop)
