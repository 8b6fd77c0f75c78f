"""The update of policy and critic over a trainer of a few lines, worked by hand."""

import logging
import math

import pytest
import torch

from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.mismatch import mismatch_limit
from planish.algorithms.tppo import Tppo, TppoConfig
from planish.algorithms.vapo import Vapo, VapoConfig
from planish.base.errors import CheckpointError, ConfigError
from planish.stages.train.config import CriticConfig
from planish.stages.train.metrics import batch_metrics, value_metrics
from planish.stages.train.progress import Progress, judge
from planish.stages.train.update import learning_rate, run_update
from tests.unit.algorithms.batches import make_batch, ragged_mask
from tests.unit.stages.train.tables import TableTrainer, batch_of, table_config


def update(trainer, batch, progress=None, cfg=None, *, algorithm=None, **more):
    return run_update(
        trainer, Dapo(algorithm or DapoConfig()), batch,
        config=cfg or table_config(), progress=progress or Progress(), seed=(0, 1), **more,
    )  # fmt: skip


def test_learning_rate_rises_linearly_then_stays():
    cfg = table_config(warmup_iterations=4)
    rates = [learning_rate(cfg, k) / 0.1 for k in range(6)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1])
    assert learning_rate(table_config(), 0) == 0.1


def test_counters_and_scalars_after_one_batch():
    trainer = TableTrainer(3)
    result = update(trainer, batch_of())
    assert result.progress == Progress(step=2, updates=2, iterations=1)
    scalars = result.scalars
    assert scalars["empty_mask"] == 0.0
    assert (scalars["num_rollouts"], scalars["num_groups"], scalars["num_tokens"]) == (4, 2, 10)
    assert (scalars["reward_mean"], scalars["accuracy_mean"]) == (0.0, 0.5)
    assert (scalars["response_tokens_mean"], scalars["response_tokens_max"]) == (2.5, 3.0)
    assert scalars["first_step_ratio_error"] == 0.0
    assert scalars["mismatch_logprob_mean"] == 1.0
    assert [m["num_rollouts"] for m in result.minibatches] == [2.0, 2.0]
    assert table_config().num_steps(4) == 2


@pytest.mark.parametrize("algorithm", [DapoConfig(), DapoConfig(correction="bypass")])
def test_rollouts_of_another_network_end_the_run_before_a_step(algorithm):
    """The batch has log-probabilities of 0, and the table gives -1."""
    trainer = TableTrainer(3)
    told = r"of 0\.0000 by the engine and -1\.0000 by the trainer in .*, 1\.0000 apart where"
    with pytest.raises(ConfigError, match=told):
        update(trainer, batch_of(), algorithm=algorithm, mismatch_limit=0.25)
    assert trainer.table.tolist() == [-1.0] * 3
    result = update(trainer, batch_of(), algorithm=algorithm, mismatch_limit=1.0)
    assert result.progress.updates == 2


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 0.02),
        ({"model": {"dtype": "bfloat16"}}, 0.25),
        ({"train": {"compute_dtype": "bfloat16"}}, 0.25),
        ({"engine": {"quantization": "fp8"}}, 0.5),
        ({"rollout": {"top_p": 0.9}}, math.inf),
        ({"rollout": {"top_k": 5}}, math.inf),
    ],
)
def test_the_number_formats_say_how_far_apart_engine_and_trainer_may_be(changes, limit):
    assert mismatch_limit(changes) == limit


def test_denominators_count_the_whole_minibatch_not_the_group():
    # One mini-batch: both groups together; the loss at ratio 1 is minus the token-mean advantage.
    result = update(TableTrainer(3), batch_of(), cfg=table_config(rollouts_per_minibatch=4))
    advantage = 1 / math.sqrt(2)
    wanted = -(3 * advantage - 2 * advantage) * 2 / 10
    assert result.minibatches[0]["loss"] == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("num_passes", [1, 2, 4])
def test_the_loss_over_the_tokens_of_the_batch_does_not_grow_with_the_passes(num_passes):
    cfg = table_config(rollouts_per_minibatch=4, num_passes=num_passes)
    whole = DapoConfig(aggregation="batch-token")
    result = update(TableTrainer(3), batch_of(), cfg=cfg, algorithm=whole)
    # One mini-batch holds all 10 tokens: as in the token-mean above, whatever follows it.
    assert result.minibatches[0]["loss"] == pytest.approx(-math.sqrt(2) / 10, abs=1e-6)


def test_no_rollouts_leave_the_policy_and_advance_the_step():
    trainer = TableTrainer(3)
    empty = batch_of().take(torch.zeros(0, dtype=torch.int64))
    result = update(trainer, empty, Progress(step=5, updates=4, iterations=2))
    assert result.progress == Progress(step=6, updates=4, iterations=3)
    assert result.scalars == {"num_rollouts": 0.0, "empty_minibatches": 1.0}
    assert trainer.table.tolist() == [-1.0] * 3
    assert table_config().num_steps(0) == 1


def test_a_minibatch_without_tokens_makes_no_optimizer_step():
    batch = batch_of(truncated=[True] * 4)
    trainer = TableTrainer(3)
    result = update(trainer, batch, algorithm=DapoConfig(overlong_filtering=True))
    assert result.progress == Progress(step=2, updates=0, iterations=1)
    assert trainer.rates == []
    assert (result.scalars["empty_minibatches"], result.scalars["empty_mask"]) == (2.0, 1.0)
    assert "whiten_undefined" not in result.scalars
    assert result.minibatches[0]["loss"] == 0.0


def test_three_gradients_in_a_row_that_are_not_finite_raise_an_alarm(caplog):
    trainer = TableTrainer(3, norms=[math.nan, math.inf, math.nan, 1.0])
    with caplog.at_level(logging.WARNING):
        result = update(trainer, batch_of(8))
    levels = [r.levelname for r in caplog.records]
    assert levels == ["WARNING", "WARNING", "ERROR"]
    assert result.progress == Progress(step=4, updates=1, iterations=1, skipped_total=3)
    assert result.scalars["skipped_steps"] == 3.0
    assert math.isfinite(result.scalars["grad_norm"])


def test_the_count_in_a_row_lives_on_from_one_iteration_to_the_next(caplog):
    trainer = TableTrainer(3, norms=[math.nan, math.nan])
    first = update(trainer, batch_of())
    assert first.progress.skipped_in_row == 2
    trainer.norms = [math.nan, 1.0]
    with caplog.at_level(logging.ERROR):
        update(trainer, batch_of(), first.progress)
    assert "in_row=3" in caplog.text


def test_groups_without_signal_and_groups_that_differ_by_length_are_counted():
    batch = make_batch(
        ragged_mask([1] * 6, 2), reward=[1.0, 1.0, -1.0, -1.5, 1.0, -1.0], group=[0, 0, 1, 1, 2, 2]
    )
    scalars = update(TableTrainer(2), batch).scalars
    assert (scalars["zero_advantage_groups"], scalars["length_only_groups"]) == (1.0, 1.0)


def test_the_entropy_of_an_iteration_covers_rows_that_train_nothing_too():
    batch = batch_of()
    batch = batch.updated(reward=torch.tensor([1.0, 1.0, 1.0, -1.0]))
    whole = update(TableTrainer(3), batch)
    assert whole.scalars["entropy"] == 0.5
    assert whole.minibatches[0]["entropy"] == 0.0  # what the trainer's own loss pass told


def test_the_metrics_of_a_step_cover_rows_that_train_nothing_too():
    # The policy has -1 everywhere. Rows 0 and 1 are a group of equal rewards, rows 2 and 3 are
    # not; all but the last have old log-probabilities 0.5 below.
    old = torch.full((4, 3), -1.5)
    old[3] = -1.0
    batch = batch_of(reward=[1.0, 1.0, 1.0, -1.0], rollout=old)
    cfg, bypass = table_config(rollouts_per_minibatch=4), DapoConfig(correction="bypass")
    result = update(TableTrainer(3), batch, cfg=cfg, algorithm=bypass)
    (step,) = result.minibatches
    # 8 of 10 tokens have moved by 0.5; the 3 tokens of row 2 alone have an advantage above 0.
    assert step["approx_kl"] == pytest.approx(-0.4)
    assert step["clipfrac_high"] == pytest.approx(0.3)
    assert step["clipfrac_low"] == 0.0
    assert step["mean_upclipped_prob"] == pytest.approx(math.exp(-1.5))


def test_rewards_and_lengths_are_those_of_finished_responses():
    found = batch_metrics(batch_of(finished=[True, False, False, False]))
    assert (found["reward_mean"], found["reward_min"], found["accuracy_mean"]) == (1.0, 1.0, 1.0)
    assert (found["response_tokens_mean"], found["num_rollouts"]) == (3.0, 4.0)
    none = batch_metrics(batch_of(finished=[False] * 4))
    assert set(none) == {"num_rollouts", "num_groups", "num_tokens"}


def test_bypass_scores_one_minibatch_and_trains_on_the_engines_logprobs():
    engine = torch.full((4, 3), -1.0)
    batch = batch_of(rollout=engine)
    full, short = TableTrainer(3), TableTrainer(3)
    wanted = update(full, batch)
    seen = update(short, batch, algorithm=DapoConfig(correction="bypass"))
    assert (full.scored, short.scored) == ([4], [2])
    # The engine agrees with the trainer here, so everything else is equal.
    assert torch.equal(full.table, short.table)
    assert seen.scalars["mismatch_logprob_max"] == wanted.scalars["mismatch_logprob_max"] == 0.0


PLAIN = {"warmup_iterations": 0, "learning_rate": 0.1}


def critic_config(**changes):
    return CriticConfig(**{**PLAIN, "pretrain_iterations": 0, **changes})


def update_both(trainer, batch, progress=None, *, critic=None, algorithm=None, **more):
    config = more.pop("config", None) or table_config(rollouts_per_minibatch=4)
    return run_update(
        trainer, algorithm or Vapo(VapoConfig()), batch, config=config,
        progress=progress or Progress(), seed=(0, 1), critic=critic or critic_config(), **more,
    )  # fmt: skip


def test_one_critic_step_by_hand():
    trainer = TableTrainer(3)
    result = update_both(trainer, batch_of())
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
    result = update_both(trainer, batch_of(8), config=table_config(rollouts_per_minibatch=4))
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
    result = update_both(trainer, batch_of(), algorithm=Spy(VapoConfig()))
    assert torch.equal(seen[0], 0.5 * batch_of().value_mask)
    assert torch.equal(result.values, seen[0])


def test_pretraining_leaves_the_policy_alone_and_counts_for_the_critic_only():
    trainer = TableTrainer(3)
    critic = critic_config(pretrain_iterations=2, pretrain_learning_rate=0.3, pretrain_passes=3)
    first = update_both(trainer, batch_of(), critic=critic)
    assert trainer.table.tolist() == [-1.0] * 3
    assert trainer.value_rates == [0.3] * 3
    assert first.progress == Progress(
        step=1, critic_iterations=1, critic_updates=3, pretrain_iterations=1
    )
    assert (first.scalars["pretraining"], first.scalars["learning_rate"]) == (1.0, 0.0)
    assert "loss" not in first.scalars
    second = update_both(trainer, batch_of(), first.progress, critic=critic)
    third = update_both(trainer, batch_of(), second.progress, critic=critic)
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
        progress = update_both(trainer, batch_of(), progress, critic=critic, config=config).progress
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
        result = update_both(trainer, batch, progress, critic=critic)
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
    result = update_both(
        TableTrainer(3), batch_of(), critic=critic, algorithm=algorithm, config=config
    )
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
        result = update_both(trainer, batch, critic=critic, algorithm=algorithm, config=config)
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
        result = update_both(trainer, batch_of(8), config=table_config(rollouts_per_minibatch=2))
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
    result = update_both(trainer, batch, algorithm=algorithm)
    assert trainer.order == ["policy"]
    assert result.progress == Progress(step=1, updates=1, iterations=1, pretrain_done=1)
    assert result.scalars["num_value_tokens"] == 0.0
    assert "explained_variance" not in result.scalars
    one = update_both(
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
    result = update_both(TableTrainer(4), batch, algorithm=algorithm)
    scalars = result.scalars
    assert (scalars["empty_mask"], scalars["whiten_undefined"]) == (empty, undefined)
    assert all(math.isfinite(value) for value in scalars.values())
    plain = Tppo(TppoConfig(window_tokens=8, ignored_tail_tokens=tail, whiten_advantages=False))
    assert "whiten_undefined" not in update_both(TableTrainer(4), batch, algorithm=plain).scalars


def test_stored_values_stand_in_for_fresh_ones_and_missing_ones_are_counted():
    window = torch.tensor([[0, 0, 1], [0, 1, 1]]).bool()
    response = torch.tensor([[1, 1, 1], [1, 1, 1]]).bool()
    earlier = torch.full((2, 3), math.nan)
    earlier[0, :2] = torch.tensor([0.75, 0.25])
    batch = make_batch(window, response=response, reward=[1.0, -1.0], group=[0, 0])
    result = update_both(TableTrainer(3, value=0.5), batch, earlier_values=earlier)
    assert result.values.tolist() == [[0.75, 0.25, 0.5], [0.5, 0.5, 0.5]]
    assert result.scalars["num_missing_values"] == 1.0


def test_an_iteration_without_rollouts_in_pretraining_is_no_iteration_of_the_policy():
    critic = critic_config(pretrain_iterations=2)
    empty = batch_of().take(torch.zeros(0, dtype=torch.int64))
    result = update_both(TableTrainer(3), empty, Progress(step=5), critic=critic)
    assert result.progress == Progress(step=6)
    assert result.values is None
    after = update_both(TableTrainer(3), empty, Progress(step=5, pretrain_done=1), critic=critic)
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


@pytest.mark.parametrize("step", [{}, {"step": None}, {"step": "3"}, {"step": 3.0}, {"step": True}])
def test_counters_that_another_release_names_otherwise_do_not_begin_anew(step):
    counters = Progress(step=3, updates=2, iterations=1).to_json()
    del counters["step"]
    with pytest.raises(CheckpointError, match=r"as whole numbers, got {'step': .*with the release"):
        Progress.from_json({**counters, **step, "data": {}})
