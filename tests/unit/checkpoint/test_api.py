"""The calls that users know, from a save to the last checkpoint's removal."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
import torch

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointNotFound,
    PlanishError,
    SaveFailed,
    StoreError,
)
from planish.checkpoint import api, list_checkpoints
from planish.checkpoint.checkpoint_manager import CheckpointManager, Schedule
from planish.checkpoint.commit import catalog
from planish.store import normal_uri, open_store
from tests.processes import python
from tests.stores.faulty import FaultyStore
from tests.thin import examples
from tests.unit.checkpoint.damage import flip


def trained(seed):
    """A small model with an optimizer that has made two steps."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Linear(5, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer, "extra": {"tokens": 7}}


def test_what_is_saved_later_wins_and_nothing_is_replaced_unasked(tmp_path):
    root = f"{tmp_path}/run"
    assert api.latest(root) is None
    for step in (1, 2, 3):
        api.save(f"{root}/step-{step}", trained(step), async_=False, step=step)
    assert api.latest(root).commit.step == 3
    assert [entry.commit.step for entry in api.list_checkpoints(root)] == [1, 2, 3]
    with pytest.raises(CheckpointExists):
        api.save(f"{root}/step-3", trained(8), async_=False, step=3)
    api.save(f"{root}/step-3", trained(8), async_=False, step=3, overwrite=True)
    assert api.verify(f"{root}/step-3").is_intact
    assert not api.diff(f"{root}/step-2", f"{root}/step-3").is_equal
    kept = api.retain(root, keep_last=1)
    assert [entry.commit.step for entry in api.list_checkpoints(root)] == [3]
    assert len(kept) == 3
    api.gc(root, grace_s=0)
    api.delete(f"{root}/step-3")
    with pytest.raises(CheckpointNotFound):
        api.info(f"{root}/step-3")


@pytest.mark.parametrize("root", ["run", "./a b/run", "../run", "run#1", "7:30"])
def test_a_relative_path_is_a_place_for_every_call(tmp_path, monkeypatch, root):
    (tmp_path / "here").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    saved = api.save(f"{root}/step-00000001", trained(1), async_=False, step=1).result()
    assert saved.uri == normal_uri(f"{root}/step-00000001")
    assert api.load(f"{root}/step-00000001", trained(2)).uri == saved.uri
    assert api.latest(root).commit.step == len(api.list_checkpoints(root)) == 1
    assert api.verify(f"{root}/step-00000001").is_intact
    api.export_dcp(f"{root}/step-00000001", "dcp")
    assert api.import_dcp("dcp", f"{root}/step-00000002").uri == normal_uri(f"{root}/step-00000002")
    api.gc(root, grace_s=0)
    api.retain(root, keep_last=2)
    api.delete(f"{root}/step-00000002")
    manager = CheckpointManager(root, Schedule(1), overwrite=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    manager.step(1, trained(1)).result(20)
    manager.close()
    assert manager.resume(trained(2)).info.uri == saved.uri
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("async_", [True, False])
def test_a_store_that_is_down_is_a_failed_save_and_for_a_load_a_store_error(tmp_path, async_):
    place = f"{tmp_path}/run/step-1"
    down = FaultyStore(open_store(place)[0], lambda *_: "fail")
    with pytest.raises(SaveFailed, match="rank 0"):
        api.save(place, trained(0), async_=async_, storage=down).result(20)
    api.save(place, trained(0), async_=async_).result(20)
    with pytest.raises(StoreError) as caught:
        api.load(place, trained(1), storage=down)
    assert not isinstance(caught.value, CheckpointError)
    assert isinstance(caught.value, PlanishError)
    # Whoever catches one of the two must have been told.
    assert "`StoreError`" in api.__doc__
    assert "`StoreError`" in CheckpointError.__doc__


def test_any_object_may_be_a_small_value_where_both_sides_ask_for_it(tmp_path):
    place, state = f"{tmp_path}/a", {"model": {"w": torch.ones(2)}, "extra": {"seen": {1, 2}}}
    with pytest.raises(TypeError, match=r"`extra\.seen` must be plain data .*allow_pickle=True"):
        api.save(place, state, async_=False)
    api.save(place, state, async_=False, allow_pickle=True)
    target = {"model": {"w": torch.zeros(2)}, "extra": {}}
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        api.load(place, target)
    assert target["model"]["w"].tolist() == [0.0, 0.0]
    api.load(place, target, allow_pickle=True)
    assert target["extra"] == {"seen": {1, 2}}


def state_at(step):
    return {"model": {"w": torch.full((4,), float(step))}, "extra": {"step": step}}


def steps_in(root):
    storage, path = open_store(root)
    return [entry.step for entry in catalog.list_checkpoints(storage, path)]


def train(manager, steps):
    for step in steps:
        manager.step(step, state_at(step))
        if manager.should_stop:
            break


def test_saves_come_at_the_interval_and_old_ones_go(engine, root):
    schedule = Schedule(2, keep_last=2, keep_every=6, pins=(4,))
    manager = CheckpointManager(root, schedule, engine=engine)
    assert [step for step in range(7) if manager.will_save_at(step)] == [2, 4, 6]
    train(manager, range(1, 15))
    manager.close()
    assert steps_in(root) == [4, 6, 12, 14]


def test_what_a_killed_save_of_another_step_has_left_goes_at_a_commit(engine, root, monkeypatch):
    storage, path = open_store(root)
    left = f"{path}/step-00000001/a-{'0' * 26}/data/0.safetensors"
    storage.put(left, b"0")
    storage.put(f"{path}/step-00000005/a-{'0' * 25}1/data/0.safetensors", b"0")
    monkeypatch.setattr(catalog, "GRACE_SECONDS", 0.0)
    manager = CheckpointManager(root, Schedule(2), engine=engine)
    train(manager, range(1, 5))
    manager.close()
    names = {stat.key.removeprefix(f"{path}/").partition("/")[0] for stat in storage.list(path)}
    assert names == {"step-00000002", "step-00000004", "LATEST"}


def test_a_run_goes_on_from_its_newest_checkpoint(engine, root):
    manager = CheckpointManager(root, Schedule(3), engine=engine)
    empty = state_at(0)
    assert manager.resume(empty) is None
    train(manager, range(1, 8))
    manager.wait()
    target = state_at(0)
    resumed = manager.resume(target)
    assert resumed.info.step == 6
    assert resumed.skipped == ()
    assert target["model"]["w"].tolist() == [6.0] * 4
    assert target["extra"]["step"] == 6
    manager.close()


@pytest.mark.parametrize("part", ["safetensors", "global.bin", "shared.bin", "COMMIT"])
def test_a_damaged_checkpoint_is_reported_and_an_older_one_is_taken(engine, root, part):
    manager = CheckpointManager(root, Schedule(1, keep_last=5), engine=engine)
    train(manager, range(1, 4))
    manager.wait()
    flip(manager.place(3), part)
    target = state_at(0)
    resumed = manager.resume(target)
    assert resumed.info.step == 2
    assert target["model"]["w"].tolist() == [2.0] * 4
    if part != "COMMIT":
        ((place, reason),) = resumed.skipped
        assert "step-00000003" in place
        assert "Corrupt" in reason
    flip(manager.place(2), "safetensors")
    flip(manager.place(1), "safetensors")
    with pytest.raises(CheckpointCorrupt, match="none of"):
        manager.resume(state_at(0))
    manager.close()


def fail_saves(manager, steps):
    """Make the saves of some steps fail in the background."""
    make = manager.engine.save

    def save(roles, options, **rest):
        handle = make(roles, options, **rest)
        if options.step in steps:
            handle._end(SaveFailed("disk full"))
        return handle

    manager.engine.save = save


def test_training_goes_on_after_a_failed_save_and_the_next_one_succeeds(engine, root):
    manager = CheckpointManager(root, Schedule(1, keep_last=9), engine=engine)
    fail_saves(manager, {2, 3, 5})
    for step in range(1, 7):
        manager.step(step, state_at(step))
        if step not in (2, 3, 5):
            manager.wait()
    assert [str(error) for _, error in manager.failures] == ["disk full"] * 3
    manager.close()


def test_too_many_failures_in_a_row_are_raised(engine, root):
    manager = CheckpointManager(root, Schedule(1, max_failures=1), engine=engine)
    fail_saves(manager, {1, 2})
    with pytest.raises(SaveFailed, match="disk full"):
        train(manager, range(1, 5))
    assert len(manager.failures) == 2


def test_a_failed_last_save_is_not_swallowed(engine, root):
    manager = CheckpointManager(root, Schedule(1), engine=engine)
    fail_saves(manager, {1})
    manager.step(1, state_at(1))
    with pytest.raises(SaveFailed, match="disk full"):
        manager.close()


def test_sigterm_saves_at_the_next_step_and_ends_the_loop(engine, root):
    before = signal.getsignal(signal.SIGTERM)
    manager = CheckpointManager(root, Schedule(100), engine=engine, hear_sigterm=True)
    for step in range(1, 10):
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        manager.step(step, state_at(step))
        if manager.should_stop:
            break
    assert step == 4
    assert steps_in(root) == [4]
    manager.close()
    assert signal.getsignal(signal.SIGTERM) is before
    # A later run of the same process does not stop by itself.
    again = CheckpointManager(root, Schedule(100), engine=engine, hear_sigterm=True)
    again.step(5, state_at(5))
    assert not again.should_stop
    again.close()


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"interval": 0}, "interval"),
        ({"keep_last": 0}, "keep_last"),
        ({"keep_every": -1}, "keep_every"),
        ({"grace_s": -1.0}, "grace_s"),
    ],
)
def test_a_schedule_that_means_nothing_is_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        Schedule(**{"interval": 1, **wrong})


PAGE = Path(__file__).resolve().parents[3] / "docs" / "checkpoint.md"


@pytest.mark.long
def test_the_example_of_the_page_trains_stops_and_goes_on(tmp_path):
    (program,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    first = python(tmp_path / "train.py", tmp_path / "out")
    assert first.returncode == 0, first.stderr
    pin, weights = first.stdout.split()
    assert pin.startswith(f"file://{tmp_path}/out/run/step-00000020#sha256=")
    assert weights == f"file://{tmp_path}/out/weights-20"
    assert (tmp_path / "out/weights-20/model.safetensors").is_file()
    assert [entry.step for entry in list_checkpoints(f"{tmp_path}/out/run")] == [15, 20]


REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = {"metadata", "metadata 1", "commit", "header", "extra", "journal"}


def run(cases, seed):
    """Fuzz in a process of its own: its audit hook stays until the process ends."""
    options = (f"--cases={cases}", f"--seed={seed}")
    done = python("-m", "tests.fuzz.checkpoint", *options, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr[-2000:]
    return {r["target"]: r for r in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_damaged_files_cause_nothing_but_our_errors():
    cases = examples(10_000)
    found = run(cases, seed=0)
    assert set(found) == NAMES
    assert sum(result["cases"] for result in found.values()) >= cases
    for name in ("metadata", "metadata 1", "commit", "header", "extra"):
        assert found[name]["cases"] / 2 < found[name]["refused"] < found[name]["cases"]
