"""The update of a policy over a trainer of a few lines, worked by hand."""

import logging
import math

import pytest
import torch

from planish.algorithms.dapo import Dapo, DapoConfig
from planish.algorithms.mismatch import mismatch_limit
from planish.base.errors import ConfigError
from planish.stages.train.metrics import batch_metrics
from planish.stages.train.progress import Progress
from planish.stages.train.update import learning_rate, num_steps, run_update
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
    assert num_steps(4, table_config()) == 2


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
    assert num_steps(0, table_config()) == 1


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
