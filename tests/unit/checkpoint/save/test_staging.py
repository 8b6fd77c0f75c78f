"""Staged bytes are the files: every layout of memory, every type; buffers are warm and bounded."""

from __future__ import annotations

import logging
import os
import threading

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planish.checkpoint.format.geometry import Box
from planish.checkpoint.format.items import LocalItem, TensorSpec
from planish.checkpoint.plan.files import FilePlan, RankPlan
from planish.checkpoint.save.staging import BufferLayout, SharedBuffer, Stager, StagingPool, part_of
from tests.processes import shared_memory_of


def items_of(*tensors):
    return [
        LocalItem(
            TensorSpec("main", "model", f"t{i}", "F32", tuple(t.shape)),
            (Box((0,) * t.dim(), tuple(t.shape)),),
            t,
        )
        for i, t in enumerate(tensors)
    ]


def plan_of(entries, header=b"head"):
    """One file of (item, start, stop)."""
    items, starts, stops = (np.array(column, np.int64) for column in zip(*entries, strict=True))
    offsets = len(header) + np.concatenate([[0], np.cumsum(stops - starts)[:-1]])
    size = len(header) + int((stops - starts).sum())
    return RankPlan(0, (FilePlan("data/x", header, size, items, starts, stops, offsets),))


def bytes_of(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stage(plan, items):
    layout = BufferLayout.of([file.size for file in plan.files])
    buffer = SharedBuffer(layout.size)
    seen = []
    Stager(plan, buffer).copy(items, seen.append)
    assert seen[-1] == layout.size
    assert seen == sorted(seen)
    return [
        bytes(buffer.view[start : start + file.size])
        for start, file in zip(layout.starts, plan.files, strict=True)
    ]


DTYPES = [
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    *(torch.complex64, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_staged_byte_for_byte(dtype):
    tensor = torch.arange(24).reshape(2, 3, 4).to(dtype)
    width = tensor.element_size()
    # Eight bytes of header: entries of a real plan are aligned too.
    (data,) = stage(plan_of([(0, 0, 24 * width)], b"12345678"), items_of(tensor))
    assert data == b"12345678" + bytes_of(tensor)


def test_strided_tensors_are_staged_in_logical_order():
    base = torch.arange(120, dtype=torch.float32).reshape(2, 3, 4, 5)
    tensors = [
        base.transpose(0, 3),
        base[:, ::2, 1:, ::3],
        torch.arange(3.0).expand(4, 3),
        base.contiguous(memory_format=torch.channels_last),
        torch.tensor(7.0),
        torch.nn.Parameter(base[1]),
        torch.complex(base[0], base[1]).conj(),
    ]
    entries = [(i, 0, t.numel() * t.element_size()) for i, t in enumerate(tensors)]
    (data,) = stage(plan_of(entries, b"12345678"), items_of(*tensors))
    assert data[8:] == b"".join(bytes_of(t.resolve_conj()) for t in tensors)


def test_a_part_of_a_tensor_whose_strides_have_changed_is_staged_by_the_same_views():
    plan = plan_of([(0, 32, 96)], b"12345678")
    buffer = SharedBuffer(BufferLayout.of([plan.files[0].size]).size)
    stager = Stager(plan, buffer)
    base = torch.arange(24.0).reshape(3, 8)
    turned = base.t().contiguous().t()
    for tensor in (base, turned, torch.arange(24.0).reshape(8, 3).t(), base):
        stager.copy(items_of(tensor), lambda _: None)
        assert bytes(buffer.view[8:72]) == bytes_of(tensor)[32:96]
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


def test_whole_rows_of_a_strided_tensor_are_taken_without_a_copy():
    tensor = torch.arange(24.0).reshape(1, 4, 6)[..., ::2]
    part = part_of(tensor, 1 * 12, 3 * 12)
    assert part.tolist() == tensor[0, 1:3].tolist()
    assert part.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_entries_come_from_any_item_and_a_second_copy_sees_new_values():
    first, second = torch.arange(6.0), torch.arange(10.0, 16.0)
    plan = plan_of([(1, 0, 24), (0, 8, 16)])
    buffer = SharedBuffer(100)
    stager = Stager(plan, buffer)
    for _ in range(2):
        stager.copy(items_of(first, second), lambda _: None)
        expected = b"head" + bytes_of(second) + bytes_of(first)[8:16]
        assert bytes(buffer.view[:36]) == expected
        first += 100
        second += 100


def test_files_begin_at_pages_and_progress_is_told_along_the_way():
    tensors = [torch.ones(5 << 20, dtype=torch.float64) for _ in range(3)]
    seen = []
    plan = plan_of([(i, 0, 40 << 20) for i in range(3)], b"12345678")
    buffer = SharedBuffer(sum(file.size for file in plan.files))
    Stager(plan, buffer, patience_s=0.0).copy(items_of(*tensors), seen.append)
    assert seen == [8 + (40 << 20) * n for n in (1, 2, 3)] + [8 + (120 << 20)]
    seen.clear()
    Stager(plan, buffer, patience_s=60.0).copy(items_of(*tensors), seen.append)
    assert seen == [8 + (120 << 20)]
    assert BufferLayout.of([1, 4096, 4097, 0]).starts == (0, 4096, 8192, 16384)


def test_a_buffer_is_readable_through_its_descriptor_and_has_no_name():
    before = shared_memory_of([os.getpid()])
    buffer = SharedBuffer(1 << 20)
    buffer.view[5] = 7
    assert os.pread(buffer.fd, 1, 5) == b"\x07"
    assert shared_memory_of([os.getpid()]) == before
    descriptor = buffer.fd
    buffer.free()
    buffer.free()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_a_warm_buffer_is_in_memory_before_anybody_writes():
    def resident():
        maps = psutil.Process().memory_maps(grouped=False)
        return sum(one.rss for one in maps if "memfd" in one.path)

    before = resident()
    buffer = SharedBuffer(64 << 20)
    assert resident() - before == 64 << 20
    buffer.free()
    assert resident() == before


def test_the_pool_hands_out_two_buffers_again_and_again():
    pool = StagingPool()
    seen = set()
    for _ in range(20):
        first, second = pool.acquire(5000, 0.0), pool.acquire(5000, 0.0)
        assert pool.acquire(5000, 0.01) is None
        seen |= {first.number, second.number}
        pool.release(second)
        pool.release(first)
    assert len(seen) == 2
    assert pool.num_buffers == 2
    pool.close()
    assert pool.num_buffers == 0


def test_a_waiting_save_gets_the_buffer_that_is_released():
    pool = StagingPool(most=1)
    held = pool.acquire(10, 0.0)
    threading.Timer(0.1, pool.release, [held]).start()
    assert pool.acquire(10, 120.0) is held


def test_another_size_replaces_the_buffers_and_tells_their_readers():
    freed = []
    pool = StagingPool(on_free=lambda buffer: freed.append(buffer.number))
    old, spare = pool.acquire(10, 0.0), pool.acquire(10, 0.0)
    pool.release(spare)
    new = pool.acquire(1 << 20, 0.0)
    assert new.size == 1 << 20
    assert freed == [spare.number]
    pool.release(old)
    assert freed == [spare.number, old.number]
    pool.release(new)
    assert pool.acquire(1 << 20, 0.0) is new
    pool.close()
    pool.release(new)
    assert freed[-1] == new.number


def test_short_memory_leaves_one_buffer_and_says_so_once(caplog):
    pool = StagingPool(free_memory=lambda: 30_000)
    with caplog.at_level(logging.WARNING):
        first = pool.acquire(8192, 0.0)
        assert pool.acquire(8192, 0.0) is None
    assert pool.limit == 1
    assert len([r for r in caplog.records if "one buffer" in r.message]) == 1
    pool.release(first)
    pool.close()


def test_warming_allocates_both_buffers_ahead():
    pool = StagingPool()
    pool.warm(10_000)
    assert pool.num_buffers == 2
    pool.warm_one_more()
    assert pool.num_buffers == 2
    pool.close()
    lazy = StagingPool()
    lazy.acquire(10_000, 0.0)
    lazy.warm_one_more()
    assert lazy.num_buffers == 2
    lazy.close()
