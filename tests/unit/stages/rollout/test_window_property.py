"""Successive batching, and training on it, over simulated runs: no token or response is lost."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planish.algorithms.tppo import Tppo, TppoConfig
from planish.engines import ENGINES
from planish.engines.sampling import request_seed
from planish.models.policy import save_policy
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.stream import StreamState, advance, fresh_cursor
from planish.records.values import ValueSet
from planish.records.waiting import WaitingSet
from planish.run.stage import Context
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.job import RolloutJob, start_of
from planish.stages.rollout.progress import SamplingProgress
from planish.stages.rollout.windows import sample_windows
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig
from planish.stages.train.progress import Progress
from planish.stages.train.update import UpdateResult, run_update
from planish.stages.train.window_values import earlier_values, row_keys, values_to_store
from tests import thin
from tests.unit.records import rules
from tests.unit.records.samples import rows_of
from tests.unit.stages.rollout.scripted_engine import (
    EOS,
    ScriptedEngine,
    fails,
    scripted_length,
    scripted_token,
)
from tests.unit.stages.rollout.stage_run import easy_policy
from tests.unit.stages.train.tables import TableTrainer, table_config

counter = itertools.count()


@pytest.fixture(scope="module")
def place(template, tmp_path_factory):
    """A folder for the roots of simulations, prompts, and policies of several versions."""
    folder = tmp_path_factory.mktemp("simulated")
    prompts, policies = write_policies_and_prompts(template.as_uri(), folder.as_uri())
    return folder, prompts, policies


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    register(monkeypatch)


def begin(place, **changes) -> Simulation:
    folder, prompts, policies = place
    config = RolloutConfig(
        **{
            "dynamic_sampling": False,
            "prompts_per_iteration": 4,
            "group_size": 3,
            "max_response_tokens": 16,
            "window_tokens": 4,
            "sample_retries": 0,
            **changes,
        }
    )
    root = folder / f"run-{next(counter)}"
    return Simulation(root.as_uri(), prompts, policies, config)


RUNS = st.fixed_dictionaries(
    {
        "prompts_per_iteration": st.integers(3, 5),
        "group_size": st.integers(1, 4),
        "max_response_tokens": st.integers(1, 18),
        "window_tokens": st.integers(1, 20),
        "max_rows": st.sampled_from([2, 64]),
        "sample_retries": st.integers(0, 1),
    }
)
SHARDS = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def check_slots(run: Simulation, metrics: list[dict[str, float]]) -> None:
    """Slots are all in use, and what is open is in the carry."""
    config = run.config
    num_slots = config.prompts_per_iteration * config.group_size
    assert sum(m["num_live_slots"] for m in metrics) == num_slots
    assert sum(m["num_carried"] for m in metrics) <= len(run.carried)
    finished = sum(m["num_finished"] for m in metrics)
    waiting = sum(m["num_waiting"] for m in metrics)
    assert sum(m["num_carried"] for m in metrics) == num_slots - finished + waiting
    seeds = [(key, run.seed_of(key)) for key in run.carried]
    stuck = [key for key, seed in seeds if fails(seed, run.number - 1)]
    assert sum(m["num_failed_rows"] for m in metrics) <= len(stuck)


def check_nothing_is_lost(run: Simulation) -> None:
    """Every sample of every drawn prompt is finished once, or goes on."""
    everything = {(k, s) for k in run.drawn for s in range(run.config.group_size)}
    assert set(run.finished) | set(run.carried) == everything
    assert not set(run.finished) & set(run.carried)
    assert set(run.finished.values()) <= {1}
    below = range(run.data.cursor["next"])
    assert sorted([*run.drawn, *run.data.cursor["pending"]]) == list(below)


FEW = settings(
    max_examples=15 if thin.full else 5, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@settings(
    max_examples=25 if thin.full else 8, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(options=RUNS, shards=SHARDS)
def test_every_token_is_in_one_window_and_no_response_is_lost(place, options, shards):
    run = begin(place, **options)
    total = 0
    for num_shards in shards:
        metrics = run.iterate(num_shards)
        check_slots(run, metrics)
        check_nothing_is_lost(run)
        total += sum(m["num_generated_tokens"] for m in metrics)
        # each new token of the engine is in exactly one window
        assert run.num_generated == total
        handed_out = sum(len(window) for parts in run.windows.values() for _, window in parts)
        assert handed_out == total
    for key, parts in run.windows.items():
        tokens = [token for _, window in parts for token in window]
        assert all(len(window) <= run.config.window_tokens for _, window in parts)
        script = run.script(key)
        if key in run.finished:
            assert tokens == script
        else:
            assert tokens == run.carried[key] == script[: len(tokens)]
            assert len(tokens) < len(script)


@pytest.mark.slow
@FEW
@given(options=RUNS, shards=SHARDS, whole_groups=st.booleans())
def test_held_responses_enter_once_with_all_their_tokens(place, options, shards, whole_groups):
    held = "hold_group" if whole_groups else "hold"
    run = begin(place, unfinished=held, **options)
    for num_shards in shards:
        before = set(run.finished)
        metrics = run.iterate(num_shards)
        check_slots(run, metrics)
        check_nothing_is_lost(run)
        fresh = set(run.finished) - before
        assert sum(m["num_rollouts"] for m in metrics) == len(fresh)
        if whole_groups:
            size = run.config.group_size
            assert fresh == {(k, s) for k, _ in fresh for s in range(size)}
    assert set(run.windows) == set(run.finished)
    for key, parts in run.windows.items():
        assert parts == [(0, run.script(key))]


def test_a_window_that_ends_with_the_end_token_finishes_the_response(place):
    run = begin(place, window_tokens=3, max_response_tokens=9)
    for _ in range(4):
        run.iterate(1)
    exact = [k for k in run.finished if len(run.script(k)) % 3 == 0 and run.script(k)[-1] == EOS]
    cut = [k for k in run.finished if len(run.script(k)) == 9 and run.script(k)[-1] != EOS]
    assert exact
    assert cut
    for key in exact + cut:
        # the last window is full, and there is no empty one after it
        windows = [window for _, window in run.windows[key] if window]
        assert [len(window) for window in windows] == [3] * (len(run.script(key)) // 3)
        assert len(run.windows[key][-1][1]) == 3


def test_versions_and_ages_of_tokens_are_those_of_the_policies_that_sampled_them(place):
    run = begin(place, unfinished="hold", window_tokens=2, max_response_tokens=16)
    oldest = 0.0
    for number in range(1, 6):
        metrics = run.iterate(1)[0]
        oldest = max(oldest, metrics.get("staleness_max", 0.0))
        assert 0 <= metrics.get("staleness_mean", 0.0) <= oldest <= number - 1
    assert oldest == max(len(run.script(k)) - 1 for k in run.finished) // 2
    train = begin(place, window_tokens=2)
    assert train.iterate(1)[0]["staleness_max"] == 0.0
    assert train.iterate(1)[0]["staleness_max"] == 1.0


def test_the_pace_counts_the_tokens_that_steps_of_any_size_give(place, monkeypatch):
    runs, looks = [], []

    def look(self, *, num_rows, stats, **_):
        looks.append((num_rows, stats()["tokens"]))

    monkeypatch.setattr(SamplingProgress, "look", look)
    for step_sizes in ((1,), (0, 3)):
        looks.clear()
        monkeypatch.setattr(ScriptedEngine, "step_sizes", step_sizes)
        runs.append(begin(place, window_tokens=8, max_rows=5))
        runs[-1].iterate(1)
    plain, uneven = runs
    assert (uneven.windows, uneven.carried) == (plain.windows, plain.carried)
    counts = [num_tokens for _, num_tokens in looks]
    grown = [after - before for before, after in zip([0, *counts], counts, strict=False)]
    assert counts[-1] == uneven.num_generated
    # All rows are taken, and of responses that end inside of a step the rest is not counted.
    assert grown.count(0) >= len(grown) // 2
    assert 5 < max(grown) <= 3 * 5
    assert sum(num_rows for num_rows, _ in looks) != counts[-1]


SEED = 3
NAME = "scripted"

Key = tuple[int, int]


def register(monkeypatch) -> None:
    monkeypatch.setitem(ENGINES, NAME, "tests.unit.stages.rollout.scripted_engine:ScriptedEngine")


def save_policies(root: str, count: int) -> list[str]:
    """Versions 0..count-1 of the same weights; returns their pins."""
    return [
        save_policy(
            layout.policy(root, v), easy_policy(), version=v, parents={}, attributes={}
        ).pin()
        for v in range(count)
    ]


@dataclass
class Simulation:
    """A run: each call of `iterate` is one iteration under the next policy version."""

    root: str
    prompts: PromptSet
    policies: list[str]
    config: RolloutConfig
    data: StreamState = field(default_factory=lambda: StreamState(fresh_cursor()))
    number: int = 0
    windows: dict[Key, list[tuple[int, list[int]]]] = field(default_factory=dict)
    """(start, tokens) of every window in the rollout sets, by (ordinal, sample)."""
    finished: dict[Key, int] = field(default_factory=dict)
    """How often a response was finished in a rollout set."""
    carried: dict[Key, list[int]] = field(default_factory=dict)
    """Tokens of what goes on after the newest iteration."""
    drawn: dict[int, int] = field(default_factory=dict)
    """Ordinal to the iteration in which it was drawn."""
    num_generated: int = 0
    given: list[tuple[RolloutSet, list[int]]] = field(default_factory=list)
    """Rollout set and ordinals of its groups, of each shard of the newest iteration."""

    def iterate(self, num_shards: int) -> list[dict[str, float]]:
        """Run all shards; returns their metrics."""
        self.number += 1
        consumed: list[int] = []
        self.carried = {}
        self.given = []
        metrics, carry = [], []
        for shard in range(num_shards):
            task = self.task(shard, num_shards)
            sampled = sample_windows(task, self.prompts)
            rules.check(sampled.rollouts)
            self.given.append((sampled.rollouts, sampled.attributes["ordinals"]))
            self.collect(sampled.rollouts, sampled.attributes)
            consumed += sampled.attributes["consumed"]
            uri = layout.carry(self.root, self.number, shard)
            assert read_manifest(uri).sha256 == sampled.attributes["carry_sha256"]
            carry.append(f"{uri}#sha256={sampled.attributes['carry_sha256']}")
            self.collect_carry(uri)
            metrics.append(sampled.attributes["metrics"])
        self.drawn |= dict.fromkeys(consumed, self.number)
        self.data = StreamState(advance(self.data.cursor, consumed), carry=carry)
        return metrics

    def task(self, shard: int, num_shards: int) -> RolloutJob:
        pin = self.policies[self.number - 1]
        tables = {"run": {"seed": SEED}, "engine": {"name": NAME}}
        context = Context(self.root, "rollout", self.number, shard, tables, "c" * 64, {})
        start = start_of(pin, self.data)
        return RolloutJob(context, self.config, num_shards, start, "0" * 64)

    def collect(self, rollouts: RolloutSet, attributes: dict[str, Any]) -> None:
        for row in range(rollouts.num_rows):
            ordinal = attributes["ordinals"][rollouts.group_index[row]]
            key = (ordinal, int(rollouts.sample_index[row]))
            start = int(rollouts.window_start[row])
            tokens = rollouts.response_tokens.row(row).tolist()
            known = [token for _, window in self.windows.get(key, []) for token in window]
            # what came before this window is what was handed out then
            assert tokens[:start] == known
            self.windows.setdefault(key, []).append((start, tokens[start:]))
            if rollouts.finish[row] != FinishReason.WINDOW:
                self.finished[key] = self.finished.get(key, 0) + 1
            self.num_generated += len(tokens) - start

    def collect_carry(self, uri: str) -> None:
        carry = read_set(RolloutSet, uri)
        ordinals = read_manifest(uri).attributes["ordinals"]
        for row in range(carry.num_rows):
            key = (ordinals[carry.group_index[row]], int(carry.sample_index[row]))
            assert key not in self.carried
            self.carried[key] = carry.response_tokens.row(row).tolist()

    def script(self, key: Key) -> list[int]:
        """Return all tokens of a response, as its seed has them."""
        seed = self.seed_of(key)
        length = min(scripted_length(seed), self.config.max_response_tokens)
        return [scripted_token(seed, t) for t in range(length)]

    def seed_of(self, key: Key) -> int:
        from planish.records.stream import position

        row = position(key[0], self.prompts.num_rows, SEED)
        name = f"{self.prompts.prompt_id[row]}/{key[0]}"
        return request_seed(SEED, self.drawn[key[0]], name, key[1])


def write_policies_and_prompts(template_root: str, root: str) -> tuple[PromptSet, list[str]]:
    prompts = read_set(PromptSet, layout.prompts(template_root))
    write_set(layout.prompts(root), prompts, parents={}, attributes={})
    return prompts, save_policies(root, 6)


LONG_RUNS = st.lists(st.integers(1, 3), min_size=3, max_size=5)
WIDEST = 64
CRITIC = {"warmup_iterations": 0, "learning_rate": 0.1, "pretrain_iterations": 0}


class Watched(TableTrainer):
    """Keeps the responses that a critic step has been made on; its critic takes any width."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.value_table = torch.zeros(WIDEST, requires_grad=True)
        self.responses: list[tuple[int, ...]] = []

    def values(self, batch):
        width = batch.value_mask.shape[1]
        return self.value_table.detach()[:width] * batch.value_mask

    def value_step(self, minibatch, loss_fn, *, learning_rate):
        for row in minibatch.value_mask.any(1).nonzero().flatten().tolist():
            mask = minibatch.value_mask[row]
            self.responses.append(tuple(minibatch.input_ids[row, mask].tolist()))
        values = self.value_table[: minibatch.value_mask.shape[1]] * minibatch.value_mask
        return self.descend(self.value_table, loss_fn(values, minibatch), learning_rate, None)


@dataclass
class Training:
    """Trains on every iteration of a simulation."""

    run: Simulation
    train: dict = field(default_factory=dict)
    critic: dict = field(default_factory=dict)
    waiting: WaitingSet | None = None
    progress: Progress = field(default_factory=Progress)
    values: ValueSet = field(default_factory=lambda: ValueSet.from_rows({}))
    finished: Counter = field(default_factory=Counter)
    """Responses that have been finished."""
    learned: Counter = field(default_factory=Counter)
    """Responses that the critic has trained on."""

    def update(self) -> UpdateResult:
        joined = RolloutSet.concat([part for part, _ in self.run.given])
        ordinals = [k for _, part in self.run.given for k in part]
        rewards, keys = judged(joined, ordinals), row_keys(joined, ordinals)
        batch = train_batch(joined, rewards)
        window = self.run.config.window_tokens
        trainer = Watched(batch.input_ids.shape[1])
        result = run_update(
            trainer,
            Tppo(TppoConfig(window_tokens=window, ignored_tail_tokens=min(2, window - 1))),
            batch,
            config=table_config(rollouts_per_minibatch=5, **self.train),
            progress=self.progress,
            seed=(0, self.run.number),
            group_places=ordinals,
            critic=CriticConfig(**CRITIC, **self.critic),
            waiting=self.waiting,
            earlier_values=earlier_values(batch, keys, rewards, self.values),
        )
        goes_on = joined.finish == FinishReason.WINDOW
        self.values = values_to_store(batch, result.values, keys, goes_on, rewards, self.values)
        self.progress, self.waiting = result.progress, result.waiting
        self.learned.update(trainer.responses)
        for row in np.flatnonzero(joined.finish != FinishReason.WINDOW):
            self.finished[tuple(joined.response_tokens.row(row).tolist())] += 1
        return result


def judged(rollouts: RolloutSet, ordinals: list[int]) -> RewardSet:
    """Every third response is right, once it is finished."""
    done = rollouts.finish != FinishReason.WINDOW
    place = np.array(ordinals, np.int64)[rollouts.group_index] + rollouts.sample_index
    right = ((place % 3 == 0) & done).astype(np.float32)
    return RewardSet(
        accuracy=right,
        outcome=right,
        length_penalty=np.zeros_like(right),
        reward=right,
        has_reward=done,
        keep=np.ones_like(done),
        extracted=[""] * len(right),
    )


@pytest.mark.slow
@FEW
@given(options=RUNS, shards=LONG_RUNS, max_groups=st.integers(1, 6))
def test_selection_loses_no_slot_and_no_response_and_counts_every_token(
    place, options, shards, max_groups
):
    run = begin(place, **options)
    training = Training(run, {"selection": "mixed_first", "max_groups": max_groups})
    for num_shards in shards:
        metrics = run.iterate(num_shards)
        num_slots = run.config.prompts_per_iteration * run.config.group_size
        assert sum(m["num_live_slots"] for m in metrics) == num_slots
        check_nothing_is_lost(run)
        result = training.update()
        scalars = result.scalars
        if not scalars["num_rollouts"]:
            continue
        trained = sum(step.get("num_tokens", 0.0) for step in result.minibatches)
        left_out = scalars["num_unselected_tokens"] + scalars["num_ignored_tokens"]
        generated = sum(m["num_generated_tokens"] for m in metrics)
        assert trained + left_out == scalars["num_tokens"] == generated
        assert scalars["num_selected_groups"] == min(max_groups, scalars["num_groups"])
        assert scalars["num_missing_values"] == 0.0
        # what the critic learns from does not depend on what was selected
        assert training.learned == training.finished
    assert set(training.values.to_rows()) == {key for key, t in run.carried.items() if t}


@pytest.mark.slow
@FEW
@given(options=RUNS, shards=LONG_RUNS, min_finished=st.integers(2, 12))
def test_every_finished_response_enters_exactly_one_critic_update_or_still_waits(
    place, options, shards, min_finished
):
    run = begin(place, **options)
    training = Training(run, critic={"min_finished": min_finished})
    for num_shards in shards:
        run.iterate(num_shards)
        before = training.learned.total()
        result = training.update()
        waiting = training.waiting or WaitingSet.empty()
        assert waiting.num_rows < min_finished
        assert result.scalars.get("num_waiting_responses", 0.0) == waiting.num_rows
        left = Counter(tuple(tokens) for tokens in rows_of(waiting.response_tokens))
        assert training.learned + left == training.finished
        # all or none: what an iteration leaves, it has not trained on
        assert training.learned.total() == before or waiting.num_rows == 0
