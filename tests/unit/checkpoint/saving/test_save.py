"""Saves of one process into memory and files: identity, options, failures, small values, plans."""

import gc
import os
import signal
import threading
import time
import weakref

import psutil
import pytest
import torch

from planish.base.errors import LayoutMismatch, SaveFailed
from planish.checkpoint.format.geometry import Box, whole
from planish.checkpoint.format.items import Collected, Columns, LocalItem, TensorSpec
from planish.checkpoint.format.small_objects import Claim, choose_writers, differing, list_objects
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.saving import engine as save_engine
from planish.checkpoint.saving import upload
from planish.checkpoint.saving.agree import MOST_PLANS, SaveOptions, plan_key
from planish.checkpoint.saving.engine import SaveEngine
from planish.checkpoint.watch import monitor
from planish.store import SINGLE_PUT_BYTES, open_store
from tests.integration.ckpt_states import assert_holds, attempts, commit_json, read_back, state_of
from tests.integration.waiting import wait_for
from tests.stores.faulty import FaultyStore

BIG = {"rows": 700, "cols": 1000, "tensors": 4}
"""17 MB: parts, and the uploading process where there is one."""
LIMIT = 120.0
"""Seconds after which a test that hangs ends."""

WAYS = pytest.mark.parametrize("is_async", [False, True], ids=["waiting", "behind"])


@WAYS
@pytest.mark.parametrize("shape", [{}, BIG], ids=["small", "big"])
def test_what_was_saved_is_there_and_equal_states_have_equal_pins(engine, root, shape, is_async):
    infos = []
    for number in range(2):
        uri = f"{root}/step-{number}"
        options = SaveOptions(uri, step=2, is_async=is_async)
        handle = engine.save(state_of(0, 1, seed=2, **shape), options)
        infos.append(handle.result(LIMIT))
        commit, _ = assert_holds(uri, seed=2, **shape)
        assert infos[-1].attempt == commit.attempt
        assert infos[-1].num_bytes == commit.total_bytes
        assert handle.done()
    assert infos[0].sha256 == infos[1].sha256
    assert engine.planner.hits == 1
    stages = {record.stage for record in infos[0].timings.records}
    assert stages == {"plan", "stage", "serialise", "upload", "meta", "commit", "barrier"}
    stored = monitor.read_timings(infos[0].uri).records
    assert len(set(stored)) == len(stored)


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


@pytest.mark.parametrize(
    "wrong",
    [{"step": -1}, {"timeout_s": 0}, {"inflight": "drop"}, {"pace_s": -1.0}, {"pace_s": 2000.0}],
    ids=str,
)
def test_options_that_mean_nothing_are_refused(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
        SaveOptions("mem://x/y", **wrong)


def test_values_that_can_not_be_stored_are_refused_before_any_request(engine, root):
    state = {"main": Collected([], shared={"extra": {"f": lambda: 0}})}
    with pytest.raises(TypeError, match="role `main`"):
        engine.save(state, SaveOptions(f"{root}/x"))
    assert attempts(f"{root}/x") == ([], False)
    engine.save(state_of(0, 1), SaveOptions(f"{root}/x")).result(LIMIT)


@pytest.mark.parametrize("suffers", ["fail", "lost"])
def test_whichever_request_fails_the_checkpoint_is_whole_or_absent(
    engine, root, suffers, monkeypatch
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
        options = SaveOptions(uri, is_async=number % 2 == 0, timeout_s=LIMIT)
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
    for size in (1, 3_000_000, 5):
        state = {"main": Collected([], shared={"extra": {"a": (1, bytes(size))}})}
        engine.save(state, SaveOptions(root, overwrite=True)).result(LIMIT)
        _, meta, tensors, small = read_back(root)
        assert tensors == {}
        assert small[meta.objects["main"]["shared"]] == {"extra": {"a": (1, bytes(size))}}


def test_a_small_save_starts_no_process_and_takes_one_buffer(engine, file_root):
    for number in range(3):
        engine.save(state_of(0, 1), SaveOptions(f"{file_root}/{number}")).result(LIMIT)
        assert_holds(f"{file_root}/{number}")
    assert not engine.uploader.pid
    assert engine.pool.num_buffers == 1


class Interrupt(BaseException):
    """What a signal handler raises."""


def test_saves_that_are_interrupted_while_they_stage_give_their_memory_back(
    engine, file_root, monkeypatch
):
    def interrupted(*_):
        raise Interrupt

    with monkeypatch.context() as patched:
        patched.setattr(save_engine, "copy_tensors", interrupted)
        for number in range(3):
            with pytest.raises(Interrupt):
                engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/{number}"))
    assert engine.wait(LIMIT)
    info = engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/9")).result(LIMIT)
    assert_holds(info.uri, **BIG)
    assert engine.pool.num_buffers <= 2
    assert attempts(f"{file_root}/0") == ([], False)


def test_a_wait_that_is_interrupted_gives_the_save_up(engine, root):
    def interrupt(*_):
        raise Interrupt

    held = threading.Event()

    def hold(*_):
        os.kill(os.getpid(), signal.SIGUSR1)
        held.wait(LIMIT)
        return ""

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        slow = FaultyStore(open_store(f"{root}/x")[0], hold)
        with pytest.raises(Interrupt):
            engine.save(state_of(0, 1), SaveOptions(f"{root}/x", is_async=False), storage=slow)
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        held.set()
    assert engine.wait(LIMIT)
    signal.signal(signal.SIGUSR1, before)
    assert attempts(f"{root}/x") == ([], False)


@pytest.mark.slow
@WAYS
def test_a_save_that_has_ended_keeps_no_tensor_alive(engine, root, is_async):
    gc.collect()
    gc.disable()
    try:
        state = state_of(0, 1, **BIG)
        seen = [weakref.ref(item.data) for item in state["main"].items]
        engine.save(state, SaveOptions(f"{root}/x", is_async=is_async)).result(LIMIT)
        del state
        wait_for(lambda: all(ref() is None for ref in seen), LIMIT)
    finally:
        gc.enable()


def test_a_closed_engine_has_given_everything_back(file_root):
    engine = SaveEngine(Control.single())
    handle = engine.save(state_of(0, 1, **BIG), SaveOptions(f"{file_root}/0"))
    wait_for(lambda: engine.uploader.pid, LIMIT)
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


def signatures(**changes):
    """Return the signatures of four ranks, those of rank 3 with changes."""
    one = {"role": "main", "kind": "model", "fqn": "w", "dtype": "F32", "shape": (8, 2)}
    found = []
    for rank in range(4):
        mine = one | (changes if rank == 3 else {})
        item = LocalItem(TensorSpec(**mine), (Box((2 * rank, 0), (2, 2)),))
        found.append(Columns.from_items([item]).signature())
    return found


def key(found, **more):
    return plan_key(found, **({"hosts": [0, 0, 1, 1]} | more))


def test_equal_ranks_have_one_plan_and_every_change_has_another():
    first = key(signatures())
    assert first == key(signatures())
    more = LocalItem(TensorSpec("main", "model", "w2", "F32", (1,)), (whole((1,)),))
    changed = [
        key(signatures(fqn="v")),
        key(signatures(dtype="BF16")),
        key(signatures(shape=(8, 3))),
        key(signatures(kind="optim")),
        key(signatures(role="critic")),
        key([*signatures()[:3], Columns.from_items([more]).signature()]),
        key(signatures()[:3]),
        key(signatures()[::-1]),
        key(signatures(), hosts=[0, 1, 0, 1]),
    ]
    assert len({first, *changed}) == 10


def test_the_plan_that_was_not_used_for_longest_is_made_anew(engine, root):
    def is_hit(size):
        before = engine.planner.hits
        spec = TensorSpec("main", "model", "w", "F32", (size,))
        state = {"main": Collected([LocalItem(spec, (whole((size,)),), torch.zeros(size))])}
        engine.save(state, SaveOptions(root, overwrite=True)).result(LIMIT)
        return engine.planner.hits > before

    assert [is_hit(size) for size in range(1, MOST_PLANS + 1)] == [False] * MOST_PLANS
    assert is_hit(1)
    assert not is_hit(MOST_PLANS + 1)
    assert not is_hit(2)
    assert is_hit(1)
    assert is_hit(MOST_PLANS)
