"""Jobs in the uploading process and in its stand-in thread: right bytes, honest failures."""

import os
import signal
import threading

import numpy as np
import psutil
import pytest

from planish.base.errors import SaveFailed
from planish.checkpoint.commit.journal import new_attempt
from planish.checkpoint.format.metafile import block_crcs
from planish.checkpoint.save import uploader as module
from planish.checkpoint.save.staging import SharedBuffer
from planish.checkpoint.save.upload import FileUpload, UploadJob
from planish.checkpoint.save.uploader import Uploader
from planish.store import open_store
from tests.integration.waiting import wait_for
from tests.stores.faulty import FaultyStore

SIZES = [(20 << 20) + 5, 700, 17 << 20, 1, 0]


@pytest.fixture(name="uploader", scope="module")
def _uploader():
    uploader = Uploader()
    uploader.start()
    yield uploader
    uploader.close()
    assert not uploader.pid


def job_of(uri, sizes):
    """Return a store, a job for it, and a buffer with its bytes."""
    storage, path = open_store(uri)
    attempt = new_attempt()
    files = [
        FileUpload(f"{path}/a-{attempt}/data/main.model/{i}", size, "main.model", sum(sizes[:i]))
        for i, size in enumerate(sizes)
    ]
    buffer = SharedBuffer(sum(sizes))
    bits = np.random.default_rng(0).integers(0, 256, sum(sizes), np.uint8)
    np.frombuffer(buffer.view, np.uint8)[:] = bits
    return storage, UploadJob(3, uri, path, attempt, files, num_threads=2), buffer


def nothing():
    """Find no reason to give a job up."""


def check_objects(storage, job, buffer, answer):
    assert [file[0] for file in answer["files"]] == [file.key for file in job.files]
    for file, (key, size, _, crcs) in zip(job.files, answer["files"], strict=True):
        data, _ = storage.get(key, 1 << 30)
        assert data == bytes(buffer.view[file.start : file.start + size])
        assert crcs == block_crcs(data).tolist()
    stages = {(row[3], row[6]) for row in answer["timings"]}
    assert stages == {(s, f.size) for s in ("serialise", "upload") for f in job.files}


@pytest.mark.slow
@pytest.mark.parametrize("is_process", [True, False])
def test_the_worker_writes_what_lies_in_the_buffer(uploader, file_root, is_process):
    storage, job, buffer = job_of(f"{file_root}/step-1", SIZES)
    answer = uploader.upload(job, buffer, None if is_process else storage, nothing)
    check_objects(storage, job, buffer, answer)


def test_a_killed_process_is_noticed_and_the_next_job_starts_it_again(file_root):
    uploader = Uploader()
    uploader.start()

    def kill():
        os.kill(uploader.pid, signal.SIGKILL)
        uploader._process.wait(120)

    os.kill(uploader.pid, signal.SIGSTOP)
    storage, job, buffer = job_of(f"{file_root}/step-3", [100])
    with pytest.raises(SaveFailed, match=r"uploading process .* ended with code -9"):
        uploader.upload(job, buffer, None, kill)
    uploader.give_up()
    check_objects(storage, job, buffer, uploader.upload(job, buffer, None, nothing))
    uploader.close()


class GivenUp(Exception):
    """Why a job ends."""


@pytest.mark.parametrize("is_process", [True, False])
def test_a_job_that_is_given_up_leaves_no_object_in_parts(uploader, file_root, is_process):
    storage, job, buffer = job_of(f"{file_root}/step-5", [20 << 20, 17 << 20])
    job = UploadJob(**{**vars(job), "pace_s": 60.0})

    def give_up():
        raise GivenUp

    with pytest.raises(GivenUp):
        uploader.upload(job, buffer, None if is_process else storage, give_up)
    uploader.give_up()
    uploader.give_up()
    for file in job.files:
        assert storage.open_uploads(file.key) == []
        assert file.key not in {stat.key for stat in storage.list(job.path)}
    _, job, buffer = job_of(f"{file_root}/step-6", [100])
    check_objects(storage, job, buffer, uploader.upload(job, buffer, None, nothing))


def test_a_worker_that_hangs_is_left_behind(uploader, file_root, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.1)
    storage, job, buffer = job_of(f"{file_root}/step-7", [100])
    go_on = threading.Event()
    hangs = FaultyStore(storage, lambda *_: go_on.wait(120) and "")

    def give_up():
        raise GivenUp

    with pytest.raises(GivenUp):
        uploader.upload(job, buffer, hangs, give_up)
    uploader.give_up()
    go_on.set()
    stopped = Uploader()
    stopped.start()
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(GivenUp):
        stopped.upload(job, buffer, None, give_up)
    stopped.give_up()
    assert not stopped.pid


def test_a_buffer_is_unmapped_there_when_its_job_has_ended(uploader, file_root):
    process = psutil.Process(uploader.pid)

    def mapped():
        return sum("memfd" in m.path for m in process.memory_maps())

    for number in range(4):
        storage, job, buffer = job_of(f"{file_root}/step-{number}", [4 << 20])
        check_objects(storage, job, buffer, uploader.upload(job, buffer, None, nothing))
        buffer.free()
        wait_for(lambda: not mapped(), 120.0)
    assert process.num_fds() < 20


def test_the_process_is_polite_and_light_and_hears_no_signal(uploader):
    process = psutil.Process(uploader.pid)
    assert process.nice() == min(19, os.nice(0) + 10)
    assert not any("torch" in m.path for m in process.memory_maps())
    os.kill(uploader.pid, signal.SIGTERM)
    os.kill(uploader.pid, signal.SIGINT)
    assert uploader.pid


def test_a_process_that_the_trainer_has_forked_does_not_keep_the_worker_alive():
    uploader = Uploader()
    uploader.start()
    pid, forked = uploader.pid, os.fork()
    if not forked:
        signal.pause()
    try:
        uploader.close()
        assert not psutil.pid_exists(pid)
    finally:
        os.kill(forked, signal.SIGKILL)
        os.waitpid(forked, 0)
