"""Loader state prepared one step ahead: what a save holds is what the loader had, always."""

from __future__ import annotations

import itertools
import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.checkpoint import api
from planish.checkpoint.adapters.loader_ahead import Foreseen, LoadersAhead
from planish.checkpoint.adapters.loader_state import LoaderShard
from planish.checkpoint.checkpoint_manager import CheckpointManager, Schedule
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.save.engine import SaveEngine
from tests.thin import examples

PER_STEP = 3
"""Samples that a step is expected to take."""
NUMBERS = itertools.count()


class Stream:
    """One reader that hands out 0, 1, 2, ... from a buffer of 4; counts how it is asked."""

    dp_rank, dp_size, num_readers = 0, 1, 1

    def __init__(self, per_step=PER_STEP):
        self.taken, self.per_step = 0, per_step
        self.asked, self.prepared = 0, []
        self.gate, self.looked = None, threading.Event()

    def take(self, count):
        self.taken += count

    def shards_at(self, taken):
        return [LoaderShard(0, 0, buffer=list(range(taken, taken + 4)), cursor={"s": taken + 4})]

    def ckpt_common(self):
        return {"seed": 7}

    def ckpt_shards(self):
        self.asked += 1
        return self.shards_at(self.taken)

    def ckpt_restore(self, common, shards):
        assert common["seed"] == 7
        (shard,) = shards
        self.taken = shard.cursor["s"] - 4
        assert shard.buffer == list(range(self.taken, self.taken + 4))

    def ckpt_prepare(self, step):
        self.prepared.append((step, threading.current_thread() is threading.main_thread()))
        taken = self.taken + self.per_step
        self.looked.set()
        if self.gate is not None:
            assert self.gate.wait(120.0)
        return Foreseen(taken, self.ckpt_common(), self.shards_at(taken))

    def ckpt_mark(self):
        return self.taken


def state_of(loader):
    return {"model": {"w": torch.zeros(4)}, "dataloader": loader}


def train(manager, loader, counts):
    """Take so many samples in each step; a preparation has looked before the next one begins."""
    for step, count in enumerate(counts, 1):
        loader.take(count)
        loader.looked.clear()
        handle = manager.step(step, state_of(loader))
        if manager.will_save_at(step + 1):
            assert loader.looked.wait(120.0)
    return handle


def saved_position(place):
    found = Stream()
    api.load(place, state_of(found))
    return found.taken


def test_the_save_takes_what_was_prepared_and_does_not_ask_again(engine, root):
    manager, loader = CheckpointManager(root, Schedule(2), engine=engine), Stream()
    train(manager, loader, [PER_STEP] * 4)
    manager.close()
    assert loader.prepared == [(2, False), (4, False)]
    assert (manager.ahead.used, manager.ahead.stale, loader.asked) == (2, 0, 0)
    assert saved_position(manager.place(2)) == 2 * PER_STEP
    assert saved_position(manager.place(4)) == 4 * PER_STEP


def test_a_step_that_takes_more_than_foreseen_is_saved_as_it_is(engine, root):
    manager, loader = CheckpointManager(root, Schedule(2), engine=engine), Stream()
    train(manager, loader, [3, 4])
    manager.close()
    assert (manager.ahead.used, manager.ahead.stale, loader.asked) == (0, 1, 1)
    assert saved_position(manager.place(2)) == 7


def test_the_same_bytes_are_saved_either_way(engine, root):
    pins = []
    for way, schedule in (("ahead", Schedule(2)), ("fresh", Schedule(9))):
        manager = CheckpointManager(f"{root}-{way}", schedule, engine=engine)
        loader = Stream()
        handle = train(manager, loader, [PER_STEP] * 2)
        pins.append((handle or manager.save(2, state_of(loader))).result().sha256)
        manager.close()
        assert manager.ahead.used == (way == "ahead")
    assert pins[0] == pins[1]


def test_a_save_waits_for_a_preparation_under_way(engine, root):
    manager, loader = CheckpointManager(root, Schedule(2), engine=engine), Stream()
    loader.gate = threading.Event()
    loader.take(PER_STEP)
    manager.step(1, state_of(loader))
    loader.take(PER_STEP)
    threading.Timer(0.2, loader.gate.set).start()
    manager.step(2, state_of(loader))
    manager.close()
    # It looked at the loader before the step or after it; whichever it was, the save is right.
    assert manager.ahead.used + manager.ahead.stale == 1
    assert saved_position(manager.place(2)) == 2 * PER_STEP


@pytest.mark.parametrize("fault", ["raises", "unknown", "unsavable"])
def test_a_preparation_that_comes_to_nothing_costs_only_time(engine, root, fault):
    manager, loader = CheckpointManager(root, Schedule(2), engine=engine), Stream()

    def prepare(step):
        if fault == "raises":
            raise RuntimeError("readers are busy")
        wrong = [LoaderShard(0, 0, buffer=[object()])]
        return None if fault == "unknown" else Foreseen(2 * PER_STEP, {}, wrong)

    loader.ckpt_prepare = prepare
    for step in (1, 2):
        loader.take(PER_STEP)
        manager.step(step, state_of(loader))
    manager.close()
    assert (manager.ahead.used, loader.asked) == (0, 1)
    assert saved_position(manager.place(2)) == 2 * PER_STEP


def test_only_the_loader_and_the_step_that_were_prepared_count():
    loader, other = Stream(), Stream()
    ahead = LoadersAhead()
    for step, asked in ((2, other), (3, loader)):
        ahead.begin(2, {"policy": state_of(loader)})
        other.taken = loader.taken + PER_STEP
        state = {"policy": state_of(asked)}
        assert ahead.take(step, state)["policy"]["dataloader"] is asked
    ahead.begin(2, {"policy": state_of(loader)})
    ahead.drop()
    loader.take(PER_STEP)
    assert ahead.take(2, {"policy": state_of(loader)})["policy"]["dataloader"] is loader
    assert (ahead.used, ahead.stale) == (0, 0)


def test_a_loader_that_can_not_be_asked_ahead_is_left_alone(engine, root):
    class Plain:
        dp_rank, dp_size, num_readers = 0, 1, 1
        ckpt_common = staticmethod(lambda: {"seed": 7})
        ckpt_shards = staticmethod(lambda: Stream().shards_at(5))

    manager = CheckpointManager(root, Schedule(1), engine=engine)
    for step in (1, 2):
        manager.step(step, state_of(Plain()))
    manager.close()
    assert manager.ahead.used == 0
    assert saved_position(manager.place(2)) == 5


@pytest.mark.slow
@settings(max_examples=examples(30), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_whatever_the_steps_take_every_save_holds_the_true_position(seed):
    rng = random.Random(seed)
    root = f"mem://ahead-{next(NUMBERS)}/run"
    engine = SaveEngine(Control.single())
    manager = CheckpointManager(root, Schedule(rng.randint(1, 3), keep_last=99), engine=engine)
    loader, truth = Stream(), {}
    for step in range(1, 9):
        loader.take(rng.choice([PER_STEP, PER_STEP, rng.randint(0, 5)]))
        if rng.random() < 0.1:
            loader = Stream()
        if manager.step(step, state_of(loader)) is not None:
            truth[step] = loader.taken
    manager.close()
    engine.close()
    assert {step: saved_position(manager.place(step)) for step in truth} == truth
