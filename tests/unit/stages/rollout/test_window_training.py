"""Successive batching and training together over simulated runs: what trains on which tokens."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planish.algorithms.tppo import Tppo, TppoConfig
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.values import ValueSet
from planish.records.waiting import WaitingSet
from planish.stages.train.batching import train_batch
from planish.stages.train.config import CriticConfig
from planish.stages.train.progress import Progress
from planish.stages.train.update import UpdateResult, run_update
from planish.stages.train.window_values import earlier_values, values_to_store
from tests import thin
from tests.unit.records.samples import rows_of
from tests.unit.stages.rollout import simulation
from tests.unit.stages.rollout.simulation import Simulation
from tests.unit.stages.rollout.test_window_property import RUNS, begin, check_nothing_is_lost
from tests.unit.stages.rollout.test_window_property import place as place
from tests.unit.stages.train.tables import TableTrainer, table_config

SHARDS = st.lists(st.integers(1, 3), min_size=3, max_size=5)
WIDEST = 64
CRITIC = {"warmup_iterations": 0, "learning_rate": 0.1, "pretrain_iterations": 0}


@pytest.fixture(autouse=True)
def scripted(monkeypatch):
    simulation.register(monkeypatch)


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
        rewards = judged(joined, ordinals)
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
            earlier_values=earlier_values(batch, joined, rewards, ordinals, self.values),
        )
        self.values = values_to_store(batch, result.values, joined, rewards, ordinals, self.values)
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
@settings(
    max_examples=15 if thin.full else 5, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(options=RUNS, shards=SHARDS, max_groups=st.integers(1, 6))
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
@settings(
    max_examples=15 if thin.full else 5, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(options=RUNS, shards=SHARDS, min_finished=st.integers(2, 12))
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
