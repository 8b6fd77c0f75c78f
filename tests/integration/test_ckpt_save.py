"""Saves by real ranks: what is written, refusals on every rank alike."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from planish.base.errors import CheckpointExists, LayoutMismatch, PlanMismatch, SaveFailed
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.saving.agree import SaveOptions
from planish.checkpoint.saving.engine import default_engine
from tests.integration.ckpt_forks import run_ranks
from tests.integration.ckpt_states import (
    assert_holds,
    attempts,
    sharded,
    state_of,
)

HERE = "tests.integration.test_ckpt_save"
BIG = {"rows": 800, "cols": 1000, "tensors": 8}
"""32 MB: of three ranks each has more than what a trainer writes itself."""

pytestmark = pytest.mark.slow


def told(error):
    return [type(error).__name__, str(error), getattr(error, "per_rank", None)]


def save_all(rank, size, folder, root, kinds):
    """Save the same state in several ways, one checkpoint each."""
    engine, pins = default_engine(), []
    for name, shape, options in kinds:
        state = state_of(rank, size, seed=3, **shape)
        handle = engine.save(state, SaveOptions(f"{root}/{name}", step=3, **options))
        pins.append(handle.result(60).sha256)
        info = handle.result()
        assert info.step == 3
        assert {r.stage for r in info.timings.records} >= {"plan", "upload", "barrier"}
        ranks = {record.rank for record in info.timings.records}
        assert ranks == (set(range(size)) if rank == 0 else {rank})
    default_engine().close()
    return pins


@pytest.mark.parametrize("size", [1, 3])
def test_every_way_of_saving_writes_the_same_state(store_root, tmp_path, size):
    kinds = [
        ("small", {}, {}),
        ("small-waiting", {}, {"is_async": False}),
        ("big", BIG, {}),
        ("big-waiting", BIG, {"is_async": False}),
    ]
    pins = run_ranks(
        f"{HERE}:save_all", size, tmp_path / "ranks", root=store_root, kinds=kinds, timeout=300
    )
    assert all(found == pins[0] for found in pins)
    small, small_waiting, *bigs = pins[0]
    # Equal states have equal identities, whichever way they took.
    assert small == small_waiting
    assert len(set(bigs)) == 1
    for name, shape, _ in kinds:
        commit, meta = assert_holds(f"{store_root}/{name}", seed=3, **shape)
        assert commit.roles == ("main",)
        assert meta.header["step"] == 3
        assert len(attempts(f"{store_root}/{name}")[0]) == 1
        assert sorted(meta.objects["main"]["own"]) == [str(rank) for rank in range(size)]


def refused(rank, size, folder, root):
    """Saves that must fail on all ranks; then one that must not."""
    engine, raised = default_engine(), {}

    def attempt(name, roles, timeout_s=20.0, **options):
        begin = time.monotonic()
        try:
            uri = f"{root}/{options.pop('place', name)}"
            engine.save(roles, SaveOptions(uri, timeout_s=timeout_s, **options)).result(60)
        except (Exception, KeyboardInterrupt) as error:
            raised[name] = [*told(error), time.monotonic() - begin]

    def explode():
        raise TypeError("`extra.loss` must be a number, got a function")

    def interrupt():
        raise KeyboardInterrupt

    good = state_of(rank, size)
    hole = {"main": Collected(sharded(rank, size)[: 2 if rank == 1 else 3])}
    other = LocalItem(TensorSpec("main", "model", "layer.0", "I64", (8, 6)), ())
    attempt("collect", explode if rank == 1 else good)
    attempt("interrupt", interrupt if rank == 1 else good)
    attempt("hole", hole)
    attempt("dtype", {"main": Collected([other])} if rank == 1 else good)
    attempt("arguments", good, step=5 + rank)
    if rank != 1:
        attempt("absent", good, timeout_s=1.0)
    else:
        time.sleep(1.5)
    attempt("fine", good)
    attempt("again", good, place="fine")
    attempt("over", good, place="fine", overwrite=True)
    default_engine().close()
    return raised


def test_what_one_rank_must_not_save_is_refused_on_all(store_root, tmp_path):
    found = run_ranks(f"{HERE}:refused", 3, tmp_path / "ranks", root=store_root)
    expected = {
        "collect": (TypeError, "rank 1: `extra.loss`"),
        "hole": (LayoutMismatch, "layer.2"),
        "dtype": (LayoutMismatch, "I64"),
        "arguments": (PlanMismatch, "`step`: 5 on rank 0, 6 on rank 1"),
        "again": (CheckpointExists, "must be free"),
    }
    for rank, raised in enumerate(found):
        kinds = expected | {"interrupt": (KeyboardInterrupt, "")}
        if rank != 1:
            kinds["interrupt"] = (SaveFailed, "rank 1: KeyboardInterrupt()")
            kinds["absent"] = (PlanMismatch, "rank 1 must answer")
        assert raised.keys() == kinds.keys()
        for name, (kind, part) in kinds.items():
            assert raised[name][0] == kind.__name__, raised[name]
            assert part in raised[name][1]
            assert raised[name][3] < 15
            if name in ("collect", "absent"):
                assert list(raised[name][2]) == ["1"]
    for name in expected.keys() - {"again"}:
        assert attempts(f"{store_root}/{name}") == ([], False)
    assert_holds(f"{store_root}/fine")


def crowded(rank, size, folder, root, inflight):
    """Two saves that can not end yet, and a third; the times are of the machine's one clock."""
    engine = default_engine()
    state = {"main": Collected(sharded(rank, size, **BIG))}
    gate = torch.multiprocessing.Event()
    hold = {"after_commit": lambda *_: gate.wait(20)}
    handles = [engine.save(state, SaveOptions(f"{root}/{n}", step=n), **hold) for n in range(2)]
    raised, skipped, let_go = None, "", []

    def open_gate():
        let_go.append(time.monotonic())
        gate.set()

    if inflight == "wait" and rank == 0:
        threading.Timer(0.7, open_gate).start()
    try:
        handle = engine.save(state, SaveOptions(f"{root}/2", step=2, inflight=inflight))
        returned = time.monotonic()
        skipped = handle.skipped
        gate.set()
        handle.result(60)
    except SaveFailed as error:
        raised, returned = told(error), time.monotonic()
    gate.set()
    for handle in handles:
        handle.result(60)
    default_engine().close()
    return raised, returned, skipped, let_go


@pytest.mark.parametrize("inflight", ["wait", "skip", "raise"])
def test_a_save_too_many_waits_is_skipped_or_raises(file_root, tmp_path, inflight):
    found = run_ranks(f"{HERE}:crowded", 2, tmp_path / "ranks", root=file_root, inflight=inflight)
    third = attempts(f"{file_root}/2")
    for raised, returned, skipped, _ in found:
        if inflight == "wait":
            assert raised is None
            assert returned >= found[0][3][0], "the third save went on before the first two ended"
            assert third[1]
        else:
            assert raised[0] == "SaveFailed"
            assert "ranks [0, 1] still write" in raised[1]
            assert bool(skipped) == (inflight == "skip")
            assert third == ([], False)


def quiet(rank, size, folder, root):
    """The training group is not touched once the first save has returned."""
    engine = default_engine()
    state = {"main": Collected(sharded(rank, size, **BIG))}
    engine.save(state, SaveOptions(f"{root}/0")).result(60)
    calls = []
    names = [n for n in dir(dist) if "gather" in n or "broadcast" in n or n == "barrier"]
    for name in names:
        setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    engine.save(state, SaveOptions(f"{root}/1")).result(60)
    default_engine().close()
    return calls


def test_saves_after_the_first_leave_the_training_group_alone(file_root, tmp_path):
    assert run_ranks(f"{HERE}:quiet", 2, tmp_path / "ranks", root=file_root) == [[], []]
