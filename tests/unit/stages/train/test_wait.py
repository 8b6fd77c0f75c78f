"""Finished responses that wait until a critic step has enough of them."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.algorithms.tppo import Tppo, TppoConfig
from planish.records.waiting import WaitingSet
from planish.stages.train.config import CriticConfig
from planish.stages.train.progress import Progress
from planish.stages.train.update import run_update
from planish.stages.train.wait import as_waiting, plan_steps, pooled_parts, with_waiting
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.records import rules
from tests.unit.records.samples import rows_of
from tests.unit.stages.train.tables import TableTrainer, batch_of, table_config

PLAIN = {"warmup_iterations": 0, "learning_rate": 0.1, "pretrain_iterations": 0}
TPPO = Tppo(TppoConfig(window_tokens=3, ignored_tail_tokens=0))


class Watched(TableTrainer):
    """Keeps how many responses each critic step had, and their values and returns."""

    def __init__(self, width, **more):
        super().__init__(width, **more)
        self.sizes = []
        self.targets = []

    def value_step(self, minibatch, loss_fn, *, learning_rate):
        mask = minibatch.value_mask
        self.sizes.append(int(mask.any(1).sum()))
        pairs = zip(minibatch.values[mask].tolist(), minibatch.returns[mask].tolist(), strict=True)
        self.targets += pairs
        return super().value_step(minibatch, loss_fn, learning_rate=learning_rate)


def update(trainer, batch, progress=None, *, algorithm=TPPO, waiting=None, **more):
    config = table_config(rollouts_per_minibatch=more.pop("size", 4))
    return run_update(
        trainer, algorithm, batch, config=config, progress=progress or Progress(), seed=(0, 1),
        critic=CriticConfig(**PLAIN | more), waiting=waiting,
    )  # fmt: skip


def responses(finished, reward=None, length=3, width=4):
    """Rows of one prompt token and a response; ids tell the rows apart by their reward."""
    count = len(finished)
    reward = [1.0] * count if reward is None else reward
    mask = ragged_mask([length + 1] * count, width) & (torch.arange(width) > 0)
    batch = make_batch(mask, reward=reward, group=list(range(count)), finished=finished)
    ids = torch.arange(count)[:, None] * 10 + torch.arange(width) + 1
    return batch.updated(input_ids=ids, attention_mask=torch.arange(width) <= mask.sum(1)[:, None])


def test_too_few_finished_responses_wait_and_train_the_critic_with_those_that_follow():
    first = responses([True, False, True, False], [1.0, 0.0, 0.0, 0.0])
    trainer = Watched(4, value=0.5)
    one = update(trainer, first, min_finished=3)
    assert trainer.order == ["policy"]
    assert one.scalars["num_waiting_responses"] == one.waiting.num_rows == 2
    assert (one.scalars["num_finished"], one.progress.critic_iterations) == (2.0, 0)
    assert rows_of(one.waiting.response_tokens) == [[2, 3, 4], [22, 23, 24]]
    assert rows_of(one.waiting.prompt_tokens) == [[1], [21]]
    assert rows_of(one.waiting.values) == [[0.5] * 3] * 2
    assert rows_of(one.waiting.returns) == [[1.0] * 3, [0.0] * 3]
    trainer.value_table = torch.full((4,), 0.75, requires_grad=True)
    two = update(
        trainer, responses([True, False]), one.progress, min_finished=3, waiting=one.waiting
    )
    assert trainer.sizes == [3]
    # what waited keeps its values and returns, what is new has those of its own iteration
    wanted = [(0.5, 1.0)] * 3 + [(0.5, 0.0)] * 3 + [(0.75, 1.0)] * 3
    assert sorted(trainer.targets) == sorted(wanted)
    assert (two.scalars["num_waiting_responses"], two.waiting.num_rows) == (0.0, 0)
    assert (two.progress.critic_iterations, two.progress.critic_updates) == (1, 1)


def test_pooled_responses_train_the_critic_as_if_they_were_finished_together():
    rewards = [1.0, 0.0, 0.5, 0.25]
    together, apart = TableTrainer(4), TableTrainer(4)
    update(together, responses([True] * 4, rewards))
    kept = update(apart, responses([True] * 2, rewards[:2]), min_finished=4)
    assert apart.value_table.tolist() == [0.0] * 4
    update(apart, responses([True] * 2, rewards[2:]), min_finished=4, waiting=kept.waiting)
    torch.testing.assert_close(apart.value_table, together.value_table)
    assert together.value_table.tolist()[0] == 0.0
    assert together.value_table.tolist()[1] > 0.0


def test_every_critic_step_has_at_least_so_many_and_the_policy_steps_on_every_mini_batch():
    trainer = Watched(4)
    batch = responses([True] * 10 + [False] * 6)
    result = update(trainer, batch, min_finished=4, size=2)
    assert trainer.sizes == [5, 5]
    assert trainer.order.count("policy") == 8
    assert trainer.order[:2] == ["critic", "policy"]
    assert [("value_loss" in step) for step in result.minibatches] == [
        True, False, False, False, True, False, False, False,
    ]  # fmt: skip
    assert result.scalars["num_waiting_responses"] == 0.0


def test_by_default_nothing_is_pooled():
    batch = batch_of(8, finished=[True] * 3 + [False] * 5)
    result = update(TableTrainer(3), batch)
    assert result.waiting is None
    assert "num_waiting_responses" not in result.scalars
    parts = [np.array([0, 1]), np.array([2])]
    plan = plan_steps(batch, parts, WaitingSet.empty(), min_finished=1, num_passes=1, seed=[0])
    assert plan.values is batch
    assert (plan.value_parts, plan.num_value_steps) == (parts, 2)


def test_in_value_pretraining_an_iteration_that_waits_trains_nothing_and_does_not_count():
    more = {"min_finished": 3, "pretrain_iterations": 1, "pretrain_passes": 2}
    trainer = Watched(4)
    one = update(trainer, responses([True, False]), **more)
    assert trainer.order == []
    assert one.minibatches == [{"loss": 0.0, "empty": 1.0, "num_rollouts": 2.0}] * 2
    assert one.progress == Progress(step=1)
    two = update(trainer, responses([True, True]), one.progress, waiting=one.waiting, **more)
    assert trainer.sizes == [3, 3]
    assert (two.progress.pretrain_iterations, two.progress.critic_updates) == (1, 2)


def test_an_iteration_without_rollouts_leaves_them_waiting():
    left = update(TableTrainer(4), responses([True, False]), min_finished=9).waiting
    empty = responses([True]).take(torch.zeros(0, dtype=torch.int64))
    result = update(TableTrainer(4), empty, min_finished=9, waiting=left)
    assert result.waiting == left
    assert result.scalars["num_waiting_responses"] == 1.0


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 40),
    num_minibatches=st.integers(1, 6),
    num_passes=st.integers(1, 3),
    min_finished=st.integers(1, 12),
    seed=st.integers(0, 99),
)
def test_each_pass_has_every_response_once_in_steps_that_are_large_enough(
    num_rows, num_minibatches, num_passes, min_finished, seed
):
    parts = pooled_parts(
        num_rows, num_minibatches, num_passes, min_finished=min_finished, seed=[seed]
    )
    assert len(parts) == num_minibatches * num_passes
    for first in range(0, len(parts), num_minibatches):
        steps = [rows for rows in parts[first : first + num_minibatches] if len(rows)]
        assert len(steps) == min(num_minibatches, num_rows // min_finished)
        assert all(len(rows) >= min_finished for rows in steps)
        found = sorted(row for rows in steps for row in rows.tolist())
        assert found == (list(range(num_rows)) if steps else [])


@pytest.mark.parametrize("width", [4, 7])
def test_rows_survive_the_record_and_stand_before_others_of_any_width(width):
    left = TPPO.advantages(responses([True, True], [1.0, 0.5], length=4, width=6))
    left = left.updated(values=torch.rand(2, 6) * left.value_mask)
    stored = as_waiting(left)
    rules.check(stored)
    other = responses([True, False], width=width)
    joined = with_waiting(other, stored)
    assert len(joined) == 4
    assert joined.input_ids.shape[1] == max(5, width)
    assert as_waiting(joined.take(torch.arange(2))) == stored
    for name in ("input_ids", "value_mask", "policy_mask", "returns", "group_index"):
        rest, own = getattr(joined, name)[2:], getattr(other, name)
        assert torch.equal(rest[:, :width] if rest.dim() > 1 else rest, own)
    assert joined.position_ids.tolist() == [list(range(max(5, width)))] * 4
    assert not joined.policy_mask[:2].any()
    assert not joined.positive_mask[:2].any()
    assert not joined.attention_mask[2:, 4:].any()
    assert joined.is_finished.tolist() == [True, True, True, False]
    assert all(math.isfinite(x) for x in joined.values[:2].flatten().tolist())
