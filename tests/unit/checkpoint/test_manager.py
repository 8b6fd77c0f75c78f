"""A run's checkpoints in one process: schedule, retention, failures, damage, SIGTERM."""

import os
import signal

import pytest
import torch

from planish.base.errors import CheckpointCorrupt, SaveFailed
from planish.checkpoint.checkpoint_manager import CheckpointManager, Schedule
from planish.checkpoint.commit import catalog
from planish.store import open_store
from tests.unit.checkpoint.damage import flip


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
