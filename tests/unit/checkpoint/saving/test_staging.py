"""Staged bytes are the files: every layout of memory, every type; buffers are warm and bounded."""

import logging
import os
import signal
import threading

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import SaveFailed
from planish.checkpoint.commit.journal import new_attempt
from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.items import LocalItem, TensorSpec
from planish.checkpoint.format.metafile import block_crcs
from planish.checkpoint.plan.files import FilePlan, RankPlan
from planish.checkpoint.saving import uploader as module
from planish.checkpoint.saving.staging import SharedBuffer, StagingPool, copy_tensors, part_of
from planish.checkpoint.saving.upload import FileUpload, UploadJob
from planish.checkpoint.saving.uploader import Uploader
from planish.store import open_store
from tests.integration.waiting import wait_for
from tests.processes import shared_memory_of
from tests.stores.faulty import FaultyStore


def items_of(*tensors):
    return [
        LocalItem(
            TensorSpec("main", "model", f"t{i}", "F32", tuple(t.shape)),
            (Box((0,) * t.dim(), tuple(t.shape)),),
            t,
        )
        for i, t in enumerate(tensors)
    ]


def plan_of(entries, header=b"12345678"):
    """One file of (item, start, stop); entries of a real plan are aligned too."""
    items, starts, stops = (np.array(column, np.int64) for column in zip(*entries, strict=True))
    offsets = len(header) + np.concatenate([[0], np.cumsum(stops - starts)[:-1]])
    size = len(header) + int((stops - starts).sum())
    return RankPlan(0, (FilePlan("data/x", header, size, items, starts, stops, offsets),))


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def staged(plan, *tensors, buffer=None):
    """Return the bytes of a plan's one file behind its header."""
    buffer = buffer or SharedBuffer(plan.size)
    copy_tensors(plan, items_of(*tensors), buffer)
    (file,) = plan.files
    data = bytes(buffer.view[: file.size])
    assert data.startswith(file.header)
    return data[len(file.header) :]


def test_views_of_a_buffer_serve_later_saves_of_the_same_plan_whatever_the_strides():
    plan, buffer = plan_of([(0, 32, 96)]), SharedBuffer(4096)
    base = torch.arange(24.0).reshape(3, 8)
    turned = base.t().contiguous().t()
    for tensor in (base, turned, torch.arange(24.0).reshape(8, 3).t(), base):
        assert staged(plan, tensor, buffer=buffer) == bytes_of(tensor)[32:96]
    first, second = torch.arange(6.0), torch.arange(10.0, 16.0)
    other = plan_of([(1, 0, 24), (0, 8, 16)])
    for _ in range(2):
        found = staged(other, first, second, buffer=buffer)
        assert found == bytes_of(second) + bytes_of(first)[8:16]
        first += 100
        second += 100
    buffer.free()


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    transposed=st.booleans(),
    cut=st.tuples(st.integers(0, 255), st.integers(0, 255)),
)
def test_any_run_of_bytes_of_a_tensor_is_found(shape, transposed, cut):
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int16).reshape(shape)
    if transposed:
        tensor = tensor.transpose(0, -1)
    low, high = sorted(2 * (n % (tensor.numel() + 1)) for n in cut)
    if low < high:
        assert bytes_of(part_of(tensor, low, high)) == bytes_of(tensor)[low:high]


def test_a_buffer_is_in_memory_before_anybody_writes_and_has_no_name():
    def resident():
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(one.rss for one in maps if "memfd" in one.path)

    before, named = resident(), shared_memory_of([os.getpid()])
    buffer = SharedBuffer(64 << 20)
    assert resident() - before == 64 << 20
    buffer.view[5] = 7
    assert os.pread(buffer.fd, 1, 5) == b"\x07"
    assert shared_memory_of([os.getpid()]) == named
    descriptor = buffer.fd
    buffer.free()
    buffer.free()
    assert resident() == before
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_the_pool_hands_out_two_buffers_again_and_again():
    pool = StagingPool()
    seen = set()
    for _ in range(20):
        first, second = pool.acquire(5000, 0.0), pool.acquire(5000, 0.0)
        with pytest.raises(SaveFailed, match="within `timeout_s`"):
            pool.acquire(5000, 0.01)
        seen |= {id(first), id(second)}
        pool.release(second)
        pool.release(first)
    assert len(seen) == pool.num_buffers == 2
    pool.close()
    assert pool.num_buffers == 0


def test_another_size_replaces_the_buffers():
    pool = StagingPool()
    old, spare = pool.acquire(10, 0.0), pool.acquire(10, 0.0)
    pool.release(spare)
    new = pool.acquire(1 << 20, 0.0)
    assert new.size == 1 << 20
    assert [spare.fd, old.fd > 0] == [-1, True]
    pool.release(old)
    assert old.fd == -1
    pool.release(new)
    assert pool.acquire(1 << 20, 0.0) is new
    pool.warm_one_more()
    pool.warm_one_more()
    assert pool.num_buffers == 2
    pool.close()
    pool.release(new)
    assert new.fd == -1


def test_short_memory_leaves_one_buffer_says_so_once_and_the_next_save_waits_for_it(caplog):
    pool = StagingPool(free_memory=lambda: 30_000)
    with caplog.at_level(logging.WARNING):
        first = pool.acquire(8192, 0.0)
        threading.Timer(0.1, pool.release, [first]).start()
        assert pool.acquire(8192, 120.0) is first
    assert pool.limit == 1
    assert len([r for r in caplog.records if "one buffer" in r.message]) == 1
    pool.close()


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
        assert uploader._child.code(120) == -9

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
