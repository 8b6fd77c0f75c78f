"""Saves of one process into memory and files: identity, options, failures, small values."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from typing import get_type_hints

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import CheckpointExists, LayoutMismatch, SaveFailed
from planish.checkpoint.format.geometry import whole
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.format.small_objects import Claim, choose_writers, differing, list_objects
from planish.checkpoint.load.agree import LoadKeywords, LoadOptions
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.save import upload
from planish.checkpoint.save.agree import SaveKeywords, SaveOptions
from planish.checkpoint.save.engine import SaveEngine
from planish.store import SINGLE_PUT_BYTES, open_store
from tests.integration.ckpt_states import (
    assert_holds,
    attempts,
    commit_json,
    expected_tensors,
    read_back,
    state_of,
)
from tests.integration.waiting import wait_for
from tests.stores.faulty import FaultyStore
from tests.thin import examples

BIG = {"rows": 700, "cols": 1000, "tensors": 4}
"""17 MB: parts, and the uploading process where there is one."""
LIMIT = 120.0
"""Seconds after which a test that hangs ends."""


WAYS = [{"is_async": False}, {}, {"snapshot": "lazy"}]


@pytest.mark.parametrize("options", WAYS, ids=["waiting", "copy", "lazy"])
@pytest.mark.parametrize("shape", [{}, BIG], ids=["small", "big"])
def test_what_was_saved_is_there_and_equal_states_have_equal_pins(engine, root, shape, options):
    infos = []
    for number in range(2):
        uri = f"{root}/step-{number}"
        handle = engine.save(state_of(0, 1, seed=2, **shape), SaveOptions(uri, step=2, **options))
        infos.append(handle.result(LIMIT))
        commit, _ = assert_holds(uri, seed=2, **shape)
        assert infos[-1].attempt == commit.attempt
        assert infos[-1].num_bytes == commit.total_bytes
        assert handle.done()
        assert handle.staged()
    assert infos[0].sha256 == infos[1].sha256
    assert engine.planner.hits == 1
    stages = {record.stage for record in infos[0].timings.records}
    assert stages >= {"plan", "serialise", "upload", "meta", "commit", "barrier"}


def test_the_commit_says_what_was_asked_for(engine, root):
    options = SaveOptions(
        f"{root}/x", step=7, tags={"why": "best"}, run_id="r1", header={"layout": "dp=1"}
    )
    info = engine.save(state_of(0, 1), options).result(LIMIT)
    found = commit_json(f"{root}/x")
    assert (found["step"], found["tags"], found["run_id"]) == (7, {"why": "best"}, "r1")
    assert info.layout == "dp=1"
    _, meta, _, _ = read_back(f"{root}/x")
    assert meta.header["layout"] == "dp=1"


def test_an_upload_with_a_pace_is_spread_over_its_seconds_unless_somebody_waits(engine, root):
    began = time.monotonic()
    handle = engine.save(state_of(0, 1), SaveOptions(f"{root}/behind", pace_s=1.0))
    handle.result(LIMIT)
    assert time.monotonic() - began > 0.4
    assert_holds(f"{root}/behind")
    slow = {"pace_s": 1000.0, "timeout_s": 2000.0}
    engine.save(state_of(0, 1), SaveOptions(f"{root}/waiting", is_async=False, **slow))
    assert_holds(f"{root}/waiting")
    handle = engine.save(state_of(0, 1), SaveOptions(f"{root}/cancelled", **slow))
    assert not handle.done()
    handle.cancel()
    with pytest.raises(SaveFailed, match="cancelled"):
        handle.result(LIMIT)
    for wrong in (-1.0, 2000.0):
        with pytest.raises(ValueError, match="pace_s"):
            SaveOptions(f"{root}/x", pace_s=wrong)


@given(st.data())
@settings(max_examples=examples(15))
def test_any_tensors_come_back(data):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=6))
    is_async = data.draw(st.booleans())
    items, expected = [], {}
    for index, shape in enumerate(shapes):
        tensor = torch.rand([n + 1 for n in shape][::-1]).permute(tuple(range(len(shape)))[::-1])
        tensor = tensor[tuple(slice(0, n) for n in shape)]
        spec = TensorSpec("main", "model", f"w{index}/é|..", "F32", tuple(shape))
        items.append(LocalItem(spec, (whole(tuple(shape)),), tensor))
        expected["main", "model", spec.fqn] = tensor.numpy()
    engine = SaveEngine(Control.single())
    options = SaveOptions("mem://any/x", overwrite=True, is_async=is_async)
    engine.save({"main": Collected(items)}, options).result(LIMIT)
    engine.close()
    _, _, tensors, _ = read_back("mem://any/x")
    for key, value in expected.items():
        if value.size:
            np.testing.assert_array_equal(tensors[key], value)


def test_a_path_that_is_taken_is_refused_and_can_be_overwritten(engine, root):
    engine.save(state_of(0, 1, seed=1), SaveOptions(f"{root}/x")).result(LIMIT)
    with pytest.raises(CheckpointExists, match="must be free"):
        engine.save(state_of(0, 1, seed=2), SaveOptions(f"{root}/x")).result(LIMIT)
    assert_holds(f"{root}/x", seed=1)
    assert len(attempts(f"{root}/x")[0]) == 1
    with pytest.raises(CheckpointExists):
        engine.save(state_of(0, 1, seed=2), SaveOptions(f"{root}/x", is_async=False))
    engine.save(state_of(0, 1, seed=3), SaveOptions(f"{root}/x", overwrite=True)).result(LIMIT)
    assert_holds(f"{root}/x", seed=3)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"step": -1}, "`step`"),
        ({"timeout_s": 0}, "`timeout_s`"),
        ({"snapshot": "deep"}, "`snapshot`"),
        ({"inflight": "drop"}, "`inflight`"),
    ],
)
def test_options_that_mean_nothing_are_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        SaveOptions("mem://x/y", **wrong)


def test_values_that_can_not_be_stored_are_refused_before_any_request(engine, root):
    state = {"main": Collected([], shared={"extra": {"f": lambda: 0}})}
    with pytest.raises(TypeError, match="role `main`"):
        engine.save(state, SaveOptions(f"{root}/x"))
    assert attempts(f"{root}/x") == ([], False)
    engine.save(state_of(0, 1), SaveOptions(f"{root}/x")).result(LIMIT)


@pytest.mark.parametrize("suffers", ["fail", "lost"])
@pytest.mark.parametrize("is_async", [True, False])
def test_whichever_request_fails_the_checkpoint_is_whole_or_absent(
    engine, root, is_async, suffers, monkeypatch
):
    # As `BIG` in requests, the one file written in parts, and a hundredth of it in bytes.
    monkeypatch.setattr(upload, "SINGLE_PUT_BYTES", SINGLE_PUT_BYTES // 100)
    state = {**BIG, "rows": BIG["rows"] // 100}
    counted = FaultyStore(open_store(f"{root}/x")[0])
    engine.save(state_of(0, 1, **state), SaveOptions(f"{root}/all"), storage=counted).result(LIMIT)
    outcomes = []
    for number in range(1, counted.requests + 2):
        uri = f"{root}/{number}"
        storage, path = open_store(uri)
        faulty = FaultyStore(storage, lambda n, *_, at=number: suffers if n == at else "")
        options = SaveOptions(uri, is_async=is_async, timeout_s=LIMIT)
        try:
            engine.save(state_of(0, 1, **state), options, storage=faulty).result(LIMIT)
            outcomes.append("saved")
        except SaveFailed:
            outcomes.append("failed")
            assert attempts(uri) == ([], False)
            uploads = [u for s in storage.list(path) for u in storage.open_uploads(s.key)]
            assert uploads == []
            engine.save(state_of(0, 1, **state), options).result(LIMIT)
        assert_holds(uri, **state)
    # What follows the commit may fail; what precedes it may not.
    assert {kind for kind, _ in counted.log} >= {"put", "part", "complete"}
    assert outcomes[-1] == "saved"
    assert outcomes.count("failed") >= 8


def test_a_state_of_nothing_but_small_values_can_be_saved(engine, root):
    state = {"main": Collected([], shared={"extra": {"a": (1, b"x")}})}
    for is_async in (True, False):
        options = SaveOptions(f"{root}/{is_async}", is_async=is_async)
        engine.save(state, options).result(LIMIT)
        _, meta, tensors, small = read_back(f"{root}/{is_async}")
        assert tensors == {}
        assert small[meta.objects["main"]["shared"]] == {"extra": {"a": (1, b"x")}}


def test_waiting_saves_start_no_process_and_take_no_staging_memory(engine, file_root):
    before = {child.pid for child in psutil.Process().children()}
    threads = set(threading.enumerate())
    for number in range(3):
        options = SaveOptions(f"{file_root}/{number}", is_async=False)
        engine.save(state_of(0, 1, **BIG), options)
        assert_holds(f"{file_root}/{number}", **BIG)
    assert {child.pid for child in psutil.Process().children()} <= before
    assert engine.pool.num_buffers == 0
    assert set(threading.enumerate()) <= threads


@pytest.mark.slow
def test_the_uploading_process_serves_large_states_and_is_replaced_when_killed(engine, file_root):
    engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/0")).result(LIMIT)
    first = engine.uploader.pid
    assert first
    os.kill(first, 9)
    engine.uploader._process.wait(LIMIT)
    for number in (1, 2):
        engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/{number}")).result(LIMIT)
        assert_holds(f"{file_root}/{number}", **BIG)
    assert engine.uploader.pid not in (0, first)


def test_saves_that_are_interrupted_while_they_stage_give_their_memory_back(engine, file_root):
    class Interrupt(BaseException):
        pass

    def interrupted(item):
        raise Interrupt

    lazy = {"snapshot": "lazy", "timeout_s": LIMIT}
    for number in range(3):
        with pytest.raises(Interrupt):
            engine.save(
                state_of(0, 1, **BIG),
                SaveOptions(f"{file_root}/{number}", **lazy),
                is_written_in_step=interrupted,
            )
    assert engine.wait(LIMIT)
    info = engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/9", **lazy)).result(LIMIT)
    assert_holds(info.uri, **BIG)
    assert engine.pool.num_buffers <= 2
    assert attempts(f"{file_root}/0") == ([], False)


def test_memory_that_a_lazy_copy_writes_to_is_not_handed_out_when_its_save_fails(engine, root):
    copying, go_on = threading.Event(), threading.Event()

    class Slow(torch.Tensor):
        """Copies slowly, as a large tensor does."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch._foreach_copy_:
                copying.set()
                go_on.wait(LIMIT)
            return super().__torch_function__(function, types, args, kwargs or {})

    spec = TensorSpec("main", "optim", "w", "F32", (100,))
    item = LocalItem(spec, (whole((100,)),), torch.ones(100).as_subclass(Slow))
    broken = FaultyStore(open_store(f"{root}/x")[0], lambda *_: "fail")
    options = SaveOptions(f"{root}/x", snapshot="lazy")
    handle = engine.save({"main": Collected([item])}, options, storage=broken)
    assert copying.wait(LIMIT)
    with pytest.raises(SaveFailed):
        handle.result(LIMIT)
    size = engine.pool._size
    other = engine.pool.acquire(size, 0.0)
    assert engine.pool.acquire(size, 0.2) is None
    go_on.set()
    assert engine.pool.acquire(size, LIMIT) is not other


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS, ids=["waiting", "copy", "lazy"])
def test_a_save_that_has_ended_keeps_no_tensor_alive(engine, root, options):
    gc.collect()
    gc.disable()
    try:
        state = state_of(0, 1, **BIG)
        seen = [weakref.ref(item.data) for item in state["main"].items]
        handle = engine.save(state, SaveOptions(f"{root}/x", **options))
        handle.result(LIMIT)
        del state
        wait_for(lambda: all(ref() is None for ref in seen), LIMIT)
    finally:
        gc.enable()


def test_a_closed_engine_has_given_everything_back(file_root):
    engine = SaveEngine(Control.single())
    engine.warmup(20 << 20)
    assert engine.pool.num_buffers == 2
    handle = engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/0"))
    pid = engine.uploader.pid
    engine.close()
    assert handle.done()
    assert_holds(f"{file_root}/0", **BIG)
    assert not psutil.pid_exists(pid)
    assert engine.pool.num_buffers == 0
    engine.close()


def test_the_lowest_rank_writes_what_several_could():
    shared = [Claim("a", "shared", "main", 1, f"{rank}") for rank in range(3)]
    own = Claim("own", "own", "main", 1, "x")
    claims = [[shared[0]], [shared[1], own], [shared[2]]]
    assert choose_writers(claims) == {"a": 0}
    assert differing(claims) == ["a"]
    assert list_objects({0: [shared[0]], 1: [own]}) == {
        "main": {"shared": "a", "own": {"1": "own"}}
    }
    shards = [[Claim("s", "shard", "main", 1, digest)] for digest in "xy"]
    with pytest.raises(LayoutMismatch, match=r"`s` by ranks \[0, 1\]"):
        choose_writers(shards)
    assert choose_writers([shards[0], shards[0]]) == {"s": 0}


def test_expected_values_are_those_of_the_helper():
    # The reading helper of these tests must not agree with itself alone.
    found = expected_tensors(seed=1, rows=2, cols=2, tensors=1)
    assert found["main", "model", "layer.0"].tolist() == [[1000.0, 1001.0], [1002.0, 1003.0]]


def test_the_keywords_of_save_are_the_fields_of_its_options():
    fields = get_type_hints(SaveOptions)
    for name in ("uri", "step", "is_async", "context"):  # arguments of `save` in their own right
        del fields[name]
    assert get_type_hints(SaveKeywords) == fields


def test_the_keywords_of_load_are_the_fields_of_its_options():
    assert get_type_hints(LoadKeywords) == get_type_hints(LoadOptions)
