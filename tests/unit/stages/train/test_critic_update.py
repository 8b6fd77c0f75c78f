"""The update of policy and critic together over a trainer of a few lines, worked by hand."""

import logging
import math

import pytest
import torch

from planish.algorithms.tppo import Tppo, TppoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.stages.train.config import CriticConfig
from planish.stages.train.metrics import value_metrics
from planish.stages.train.progress import Progress, judge
from planish.stages.train.update import run_update
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.stages.train.tables import TableTrainer, batch_of, table_config

PLAIN = {"warmup_iterations": 0, "learning_rate": 0.1}


def critic_config(**changes):
    return CriticConfig(**{**PLAIN, "pretrain_iterations": 0, **changes})


def update(trainer, batch, progress=None, *, critic=None, algorithm=None, **more):
    config = more.pop("config", None) or table_config(rollouts_per_minibatch=4)
    return run_update(
        trainer, algorithm or Vapo(VapoConfig()), batch, config=config,
        progress=progress or Progress(), seed=(0, 1), critic=critic or critic_config(), **more,
    )  # fmt: skip


def test_one_critic_step_by_hand():
    trainer = TableTrainer(3)
    result = update(trainer, batch_of())
    # All values are 0 and all returns +1 or -1: half the squared error is 0.5 for each token. In
    # columns 0 and 1 the rewards cancel; column 2 has two tokens of return 1 among 10 tokens.
    assert result.minibatches[0]["value_loss"] == 0.5
    assert trainer.value_table.tolist() == pytest.approx([0.0, 0.0, 0.1 * 2 / 10])
    assert result.minibatches[0]["value_grad_norm"] == pytest.approx(0.2)
    scalars = result.scalars
    # Returns: six of +1 and four of -1.
    assert (scalars["value_mean"], scalars["return_mean"]) == (0.0, pytest.approx(0.2))
    assert (scalars["explained_variance"], scalars["ev_undefined"]) == (0.0, 0.0)
    assert (scalars["fresh_value_loss"], scalars["value_loss"]) == (0.5, 0.5)
    assert (scalars["num_finished"], scalars["num_value_tokens"]) == (4.0, 10.0)
    assert scalars["positive_rollouts"] == 2.0
    assert scalars["critic_learning_rate"] == 0.1
    assert scalars["pretraining"] == 0.0
    assert scalars["nll_loss"] == pytest.approx(1.0)


def test_in_each_mini_batch_the_critic_steps_before_the_policy():
    trainer = TableTrainer(3)
    result = update(trainer, batch_of(8), config=table_config(rollouts_per_minibatch=4))
    assert trainer.order == ["critic", "policy", "critic", "policy"]
    assert result.progress == Progress(
        step=2, updates=2, iterations=1, critic_iterations=1, critic_updates=2, pretrain_done=1
    )


def test_advantages_come_from_the_values_before_any_step():
    seen = []

    class Spy(Vapo):
        def advantages(self, batch):
            seen.append(batch.values.clone())
            return super().advantages(batch)

    trainer = TableTrainer(3, value=0.5)
    result = update(trainer, batch_of(), algorithm=Spy(VapoConfig()))
    assert torch.equal(seen[0], 0.5 * batch_of().value_mask)
    assert torch.equal(result.values, seen[0])


def test_pretraining_leaves_the_policy_alone_and_counts_for_the_critic_only():
    trainer = TableTrainer(3)
    critic = critic_config(pretrain_iterations=2, pretrain_learning_rate=0.3, pretrain_passes=3)
    first = update(trainer, batch_of(), critic=critic)
    assert trainer.table.tolist() == [-1.0] * 3
    assert trainer.value_rates == [0.3] * 3
    assert first.progress == Progress(
        step=1, critic_iterations=1, critic_updates=3, pretrain_iterations=1
    )
    assert (first.scalars["pretraining"], first.scalars["learning_rate"]) == (1.0, 0.0)
    assert "loss" not in first.scalars
    second = update(trainer, batch_of(), first.progress, critic=critic)
    third = update(trainer, batch_of(), second.progress, critic=critic)
    assert third.scalars["pretraining"] == 0.0
    assert third.progress == Progress(
        step=3, updates=1, iterations=1, critic_iterations=3, critic_updates=7,
        pretrain_iterations=2, pretrain_done=1,
    )  # fmt: skip
    assert trainer.value_rates[6:] == [0.1]
    assert trainer.table.tolist() != [-1.0] * 3


def test_the_warm_up_of_the_policy_begins_after_pretraining():
    trainer, progress = TableTrainer(3), Progress()
    config = table_config(warmup_iterations=4, rollouts_per_minibatch=4)
    critic = critic_config(pretrain_iterations=2, warmup_iterations=2)
    for _ in range(4):
        progress = update(trainer, batch_of(), progress, critic=critic, config=config).progress
    assert trainer.rates == pytest.approx([0.025, 0.05])
    assert trainer.value_rates == pytest.approx([0.05, 0.1, 0.1, 0.1])


def test_the_rule_ends_pretraining_on_the_batch_that_meets_it_and_that_batch_trains_the_policy():
    # Values of 0 explain nothing; each step brings them nearer to the returns.
    trainer, progress = TableTrainer(3), Progress()
    reward = [1.0, 1.0, 1.0, 1.0]
    critic = critic_config(pretrain_iterations=50, pretrain_value_loss=0.2, learning_rate=1.0)
    losses, frozen = [], []
    for _ in range(6):
        batch = make_batch(ragged_mask([3, 3, 3, 3], 3), reward=reward, group=[0, 0, 1, 1])
        result = update(trainer, batch, progress, critic=critic)
        progress = result.progress
        losses.append(result.scalars["fresh_value_loss"])
        frozen.append(result.scalars["pretraining"])
        if progress.pretrain_done:
            break
    # A step of rate 1 moves each value a third of the way: losses 0.5 x (2/3)^(2k).
    assert losses == pytest.approx([0.5 * (2 / 3) ** (2 * k) for k in range(len(losses))])
    assert frozen == [1.0, 1.0, 1.0, 0.0][-len(frozen) :]
    assert losses[-1] <= 0.2 < losses[-2]
    assert len(trainer.rates) == 1


@pytest.mark.parametrize(
    ("patience", "measured", "done_after"),
    [
        (1, [0.1, 0.6], 2),
        (2, [0.6, 0.1, 0.6, 0.7], 4),
        (2, [0.6, None, 0.7], 3),
        (3, [0.6, 0.7], None),
    ],
)
def test_patience_counts_batches_in_a_row_and_batches_without_targets_are_not_judged(
    patience, measured, done_after
):
    config = critic_config(
        pretrain_iterations=50, pretrain_explained_variance=0.5, pretrain_patience=patience
    )
    progress = Progress()
    for number, seen in enumerate(measured, start=1):
        scalars = {} if seen is None else {"explained_variance": seen}
        progress = judge(config, progress, scalars)
        assert progress.pretrain_done == int(number == done_after)


@pytest.mark.parametrize("min_finished", [1, 2])
@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_the_value_loss_over_the_tokens_of_the_batch_does_not_grow_with_the_passes(
    num_passes, min_finished
):
    algorithm = Vapo(VapoConfig(value_aggregation="batch-token"))
    config = table_config(rollouts_per_minibatch=4, num_passes=num_passes)
    critic = critic_config(min_finished=min_finished)
    result = update(TableTrainer(3), batch_of(), critic=critic, algorithm=algorithm, config=config)
    assert result.minibatches[0]["value_loss"] == 0.5


def test_value_pretraining_is_not_clipped_and_joint_training_is():
    algorithm = Tppo(TppoConfig(window_tokens=3, ignored_tail_tokens=0))
    batch = batch_of(4, reward=[1.0] * 4)
    ends = {}
    for pretrain_iterations in (0, 1):
        trainer = TableTrainer(3)
        critic = critic_config(
            learning_rate=0.5, pretrain_iterations=pretrain_iterations, pretrain_passes=40
        )
        config = table_config(rollouts_per_minibatch=4, num_passes=40)
        result = update(trainer, batch, critic=critic, algorithm=algorithm, config=config)
        ends[pretrain_iterations] = (trainer.value_table[0].item(), result.scalars)
    # Each step takes the values of column 0 from 0 a sixth nearer to the return of 1.
    assert ends[1][0] == pytest.approx(1.0, abs=1e-2)
    assert ends[1][1]["value_clipfrac"] == 0.0
    # Beyond 0.6 above the old value the clipped error has no gradient.
    assert 0.6 < ends[0][0] < 0.8
    assert ends[0][1]["value_clipfrac"] > 0.0


def test_every_given_rule_must_hold():
    config = critic_config(
        pretrain_iterations=5, pretrain_explained_variance=0.5, pretrain_value_loss=0.1
    )
    good = {"explained_variance": 0.5, "fresh_value_loss": 0.1}
    assert judge(config, Progress(), good).pretrain_done == 1
    for worse in ({"explained_variance": 0.49}, {"fresh_value_loss": 0.11}):
        assert judge(config, Progress(), good | worse).pretrain_done == 0
    without = critic_config(pretrain_iterations=5)
    assert judge(without, Progress(), good).pretrain_done == 0
    assert judge(without, Progress(pretrain_iterations=5), {}).pretrain_done == 1
    assert judge(without, Progress(pretrain_done=1), {}).pretrain_done == 1


def test_a_critic_gradient_that_is_not_finite_skips_the_critic_alone_and_raises_an_alarm(caplog):
    trainer = TableTrainer(3, value_norms=[math.nan, math.inf, math.nan, 1.0])
    with caplog.at_level(logging.WARNING):
        result = update(trainer, batch_of(8), config=table_config(rollouts_per_minibatch=2))
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING", "ERROR"]
    assert "model=critic" in caplog.text
    assert (result.progress.updates, result.progress.critic_updates) == (4, 1)
    assert result.progress.critic_skipped_total == 3
    assert result.progress.skipped_total == 0
    assert result.scalars["value_skipped_steps"] == 3.0
    assert result.scalars["skipped_steps"] == 0.0


def test_a_mini_batch_without_a_finished_response_makes_no_critic_step():
    algorithm = Tppo(TppoConfig(window_tokens=3, ignored_tail_tokens=1))
    batch = batch_of(4, finished=[False] * 4)
    trainer = TableTrainer(3)
    result = update(trainer, batch, algorithm=algorithm)
    assert trainer.order == ["policy"]
    assert result.progress == Progress(step=1, updates=1, iterations=1, pretrain_done=1)
    assert result.scalars["num_value_tokens"] == 0.0
    assert "explained_variance" not in result.scalars
    one = update(
        TableTrainer(3), batch_of(4, finished=[True, False, False, False]), algorithm=algorithm
    )
    assert one.progress.critic_updates == 1
    assert one.minibatches[0]["value_loss"] == 0.5


@pytest.mark.parametrize(
    ("finished", "tail", "empty", "undefined"),
    [
        ([True, True], 4, 0.0, 0.0),
        ([False, False], 0, 1.0, 0.0),  # no target for the critic
        ([False, False], 4, 2.0, 1.0),  # and no token that trains the policy
        ([True, False], 4, 0.0, 1.0),  # one token alone: its advantage is 0
    ],
)
def test_empty_masks_and_whitening_of_fewer_than_two_tokens_are_counted(
    finished, tail, empty, undefined
):
    algorithm = Tppo(TppoConfig(window_tokens=8, ignored_tail_tokens=tail))
    lengths = [1, 4] if undefined and any(finished) else [4, 4]
    batch = make_batch(ragged_mask(lengths, 4), reward=[1.0, 0.0], group=[0, 0], finished=finished)
    result = update(TableTrainer(4), batch, algorithm=algorithm)
    scalars = result.scalars
    assert (scalars["empty_mask"], scalars["whiten_undefined"]) == (empty, undefined)
    assert all(math.isfinite(value) for value in scalars.values())
    plain = Tppo(TppoConfig(window_tokens=8, ignored_tail_tokens=tail, whiten_advantages=False))
    assert "whiten_undefined" not in update(TableTrainer(4), batch, algorithm=plain).scalars


def test_stored_values_stand_in_for_fresh_ones_and_missing_ones_are_counted():
    window = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    response = torch.tensor([[1, 1, 1], [1, 1, 1]]).bool()
    earlier = torch.full((2, 3), math.nan)
    earlier[0, :2] = torch.tensor([0.75, 0.25])
    batch = make_batch(window, response=response, reward=[1.0, -1.0], group=[0, 0])
    result = update(TableTrainer(3, value=0.5), batch, earlier_values=earlier)
    assert result.values.tolist() == [[0.75, 0.25, 0.5], [0.5, 0.5, 0.5]]
    assert result.scalars["num_missing_values"] == 1.0


def test_an_iteration_without_rollouts_in_pretraining_is_no_iteration_of_the_policy():
    critic = critic_config(pretrain_iterations=2)
    empty = batch_of().take(torch.zeros(0, dtype=torch.int64))
    result = update(TableTrainer(3), empty, Progress(step=5), critic=critic)
    assert result.progress == Progress(step=6)
    assert result.values is None
    after = update(TableTrainer(3), empty, Progress(step=5, pretrain_done=1), critic=critic)
    assert after.progress == Progress(step=6, iterations=1, pretrain_done=1)


def test_equal_returns_leave_the_explained_variance_undefined():
    mask = ragged_mask([2, 2], 2)
    batch = make_batch(mask, returns=[[1.0, 1.0], [1.0, 1.0]], values=[[0.5, 0.0], [0.0, 0.5]])
    found = value_metrics(batch)
    assert (found["explained_variance"], found["ev_undefined"]) == (0.0, 1.0)


def test_counters_of_the_critic_are_in_the_state_only_where_there_is_one():
    plain = Progress(1, 2, 3, 4, 5)
    assert set(plain.to_json()) == {
        "step", "updates", "iterations", "skipped_in_row", "skipped_total",
    }  # fmt: skip
    critic = Progress(step=3, critic_iterations=2, critic_updates=6, pretrain_iterations=1)
    for progress in (plain, critic):
        assert Progress.from_json(progress.to_json() | {"data": {}}) == progress
