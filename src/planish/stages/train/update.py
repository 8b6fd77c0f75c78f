"""One iteration of training: log-probabilities and values before it, advantages, optimizer steps.

This module knows neither algorithms nor trainers by name.

Source: DAPO, arXiv 2503.14476, algorithm 1; VAPO, arXiv 2504.05118, section 4.1 (critic).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from planish.algorithms.base import ActorCritic, Algorithm, Denominators, LossOutput, TrainBatch
from planish.algorithms.mismatch import check_mismatch, mismatch_metrics
from planish.base import telemetry
from planish.base.parallel import Share
from planish.records.waiting import WaitingSet
from planish.run.layer_clock import finish_step
from planish.stages.train.batching import Movement, Rows, here, split_minibatches
from planish.stages.train.config import CriticConfig, TrainConfig
from planish.stages.train.metrics import (
    batch_metrics,
    group_metrics,
    mask_metrics,
    step_summary,
    value_metrics,
)
from planish.stages.train.progress import Progress, critic_learning_rate, judge
from planish.stages.train.selection import Selection, select_groups
from planish.stages.train.trainer import STILL_ROWS, Trainer
from planish.stages.train.wait import StepPlan, plan_steps

logger = logging.getLogger(__name__)

Step = dict[str, float]


@dataclass(frozen=True)
class UpdateResult:
    """Metrics, counters and leftovers of one iteration of training."""

    scalars: dict[str, float]
    """Metrics over the iteration."""
    minibatches: list[Step]
    """Metrics of each mini-batch."""
    progress: Progress
    """Counters after the iteration."""
    values: Tensor | None = None
    """[B, S] float32, values of this rank's rows by the critic before the iteration; None without
    a critic or a rollout."""
    waiting: WaitingSet | None = None
    """Finished responses on which the critic has not trained yet; None if responses never wait."""


@dataclass(frozen=True)
class _Rates:
    """Learning rates of an iteration; None: the model does not train."""

    policy: float | None
    critic: float | None


def learning_rate(config: TrainConfig, iterations: int) -> float:
    """Return the learning rate after `iterations` iterations: linear warm-up, then constant."""
    if config.warmup_iterations == 0:
        return config.learning_rate
    return config.learning_rate * min(1.0, (iterations + 1) / config.warmup_iterations)


def run_update(
    trainer: Trainer,
    algorithm: Algorithm,
    batch: TrainBatch,
    *,
    config: TrainConfig,
    progress: Progress,
    seed: Sequence[int],
    group_places: Sequence[int] | None = None,
    critic: CriticConfig | None = None,
    earlier_values: Tensor | None = None,
    waiting: WaitingSet | None = None,
    reference_pin: str = "",
    before_step: Callable[[], None] = lambda: None,
    mismatch_limit: float = math.inf,
) -> UpdateResult:
    """Train on one rollout batch: policy and critic, or during value pretraining the critic alone.

    Args:
        trainer: policy in training; its present weights are those of the old policy.
        algorithm: gives masks, advantages and the losses.
        batch: kept rollouts of this rank; may be empty.
        config: settings of the train stage.
        progress: counters before the iteration.
        seed: seed of the order of the mini-batches.
        group_places: place in the stream of prompts by group index; None takes the index itself.
        critic: settings of the critic; None takes the defaults.
        earlier_values: [B, S] float32, values of tokens that earlier iterations sampled, NaN for
            all others; None if there are none.
        waiting: finished responses on which the critic has not trained yet; None for none.
        reference_pin: pinned URI of the reference policy, for algorithms that need one.
        before_step: called before each mini-batch, on every rank.
        mismatch_limit: largest mean absolute difference, in nats, between log-probabilities of
            engine and trainer, over tokens of the policy before the iteration.

    Raises:
        ConfigError: the difference is above `mismatch_limit`.
    """
    critic = critic or CriticConfig()
    num_rows = len(batch.share.every(batch.reward)[0])
    if num_rows == 0:
        return _without_rollouts(algorithm, progress, critic, waiting)
    selection = select_groups(batch, config, group_places)
    batch, values, scalars = _estimate(
        trainer,
        algorithm,
        batch,
        selection,
        config=config,
        seed=seed,
        earlier=earlier_values,
        mismatch_limit=mismatch_limit,
    )
    rates = _Rates(learning_rate(config, progress.iterations), None)
    passes = config.num_passes
    if algorithm.needs_values:
        scalars |= value_metrics(batch)
        progress = judge(critic, progress, scalars)
        rates = replace(rates, critic=critic_learning_rate(critic, progress))
        if not progress.pretrain_done:
            rates, passes = replace(rates, policy=None), critic.pretrain_passes
        scalars["pretraining"] = float(not progress.pretrain_done)
    # While only the critic trains, no loss needs the reference.
    if algorithm.needs_reference and rates.policy is not None:
        batch = batch.updated(reference_logprobs=trainer.reference_logprobs(batch, reference_pin))
    parts = split_minibatches(num_rows, config.rollouts_per_minibatch, passes, seed=seed)
    least = critic.min_finished if algorithm.needs_values else 1
    plan = plan_steps(batch, parts, waiting, min_finished=least, num_passes=passes, seed=seed)
    minibatches, progress = _run_steps(
        trainer, algorithm, batch, plan, rates, config, progress, before_step
    )
    scalars = step_summary(minibatches) | scalars | {"learning_rate": rates.policy or 0.0}
    if rates.critic is not None:
        scalars["critic_learning_rate"] = rates.critic
    if plan.waiting is not None:
        scalars["num_waiting_responses"] = float(plan.waiting.num_rows)
    scalars |= {name: float(count) for name, count in progress.to_json().items()}
    return UpdateResult(scalars, minibatches, progress, values, plan.waiting)


def _without_rollouts(
    algorithm: Algorithm, progress: Progress, critic: CriticConfig, waiting: WaitingSet | None
) -> UpdateResult:
    """Advance the counters of an iteration that has nothing to train on."""
    logger.warning("no rollouts to train on step=%d", progress.step)
    trains = not algorithm.needs_values or judge(critic, progress, {}).pretrain_done
    progress = replace(
        progress, step=progress.step + 1, iterations=progress.iterations + int(trains)
    )
    scalars = {"num_rollouts": 0.0, "empty_minibatches": 1.0}
    if waiting is not None and waiting.num_rows:
        scalars["num_waiting_responses"] = float(waiting.num_rows)
    return UpdateResult(scalars, [], progress, waiting=waiting)


def _estimate(
    trainer: Trainer,
    algorithm: Algorithm,
    batch: TrainBatch,
    selection: Selection,
    *,
    config: TrainConfig,
    seed: Sequence[int],
    earlier: Tensor | None,
    mismatch_limit: float,
) -> tuple[TrainBatch, Tensor | None, dict[str, float]]:
    """Fill in old log-probabilities, values, advantages and masks for the steps.

    Groups outside the selection get values only, and do not enter any mean of advantages.

    Returns:
        The batch, the values as in `UpdateResult`, and metrics.
    """
    scalars = batch_metrics(batch) | selection.metrics(batch)
    whole, values = batch, None
    batch, mismatch = _score_old_policy(
        trainer, algorithm, selection.apply(batch), config, seed, mismatch_limit
    )
    scalars |= mismatch
    if algorithm.needs_values:
        values = trainer.values(whole)
        if earlier is not None:
            # tokens of earlier windows keep the values of their own iteration
            unknown = earlier.isnan()
            missing = whole.value_mask & ~whole.policy_mask & unknown
            scalars["num_missing_values"] = float(batch.share.sum(missing.sum()))
            values = values.where(unknown, earlier)
        batch = batch.updated(values=values)
        scalars |= cast(ActorCritic, algorithm).describe(batch)
    batch = selection.apply(algorithm.advantages(batch))
    has_values = algorithm.needs_values
    scalars |= group_metrics(batch, selection.chosen, has_values=has_values)
    scalars |= mask_metrics(batch, has_values=has_values)
    return batch, values, scalars


def _score_old_policy(
    trainer: Trainer,
    algorithm: Algorithm,
    batch: TrainBatch,
    config: TrainConfig,
    seed: Sequence[int],
    mismatch_limit: float,
) -> tuple[TrainBatch, dict[str, float]]:
    """Fill in the log-probabilities before the iteration, and compare them with the engine's.

    If the algorithm uses those of the engine, only the first mini-batch is scored, to compare.

    Returns:
        The batch, and metrics over all scored tokens: mismatch, the share of routers' choices that
        differ from the engine's, and the entropy of the policy before the iteration. (The entropy
        of a mini-batch is over rows that train.)
    """
    if algorithm.needs_old_logprobs:
        old, entropy, routed = trainer.logprobs(batch)
        batch = part = batch.updated(old_logprobs=old)
    else:
        num_rows = len(batch.share.every(batch.reward)[0])
        first = split_minibatches(num_rows, config.rollouts_per_minibatch, 1, seed=seed)[0]
        part = here(batch, torch.from_numpy(first))
        old, entropy, routed = trainer.logprobs(part)
        part = part.updated(old_logprobs=old)
        batch = batch.updated(old_logprobs=batch.rollout_logprobs)
    if math.isfinite(mismatch_limit):
        fresh = part.policy_mask
        if part.is_fresh is not None:
            fresh = fresh & part.is_fresh[:, None]
        check_mismatch(part.old_logprobs, part.rollout_logprobs, fresh, mismatch_limit, part.share)
    mask, share = part.policy_mask, part.share
    metrics = mismatch_metrics(part.old_logprobs, part.rollout_logprobs, mask, share) | routed
    if metrics:
        metrics["entropy"] = share.means(entropy[mask])[0]
    return batch, metrics


def _run_steps(
    trainer: Trainer,
    algorithm: Algorithm,
    batch: TrainBatch,
    plan: StepPlan,
    rates: _Rates,
    config: TrainConfig,
    progress: Progress,
    before_step: Callable[[], None],
) -> tuple[list[Step], Progress]:
    """Step on all mini-batches: in each the critic first, then the policy."""
    share, start = batch.share, progress
    whole = _sums(share, algorithm.counts(batch))
    critic = cast(ActorCritic, algorithm) if rates.critic is not None else None
    whole_values = _sums(share, critic.value_counts(plan.values)) if critic is not None else {}
    movement = Movement(batch, has_penalty=algorithm.needs_reference)
    results: list[Step] = []
    for rows, value_rows in zip(plan.parts, plan.value_parts, strict=True):
        before_step()
        progress = replace(progress, step=progress.step + 1)
        step: Step = {}
        if critic is not None and rates.critic is not None:
            targets = here(plan.values, torch.from_numpy(value_rows))
            own = _sums(share, critic.value_counts(targets))
            counts = Denominators(own, whole_values, plan.num_value_steps)
            step |= _value_step(
                trainer, critic, targets, counts, rates.critic, is_pretraining=rates.policy is None
            )
        if rates.policy is not None:
            minibatch = here(batch, torch.from_numpy(rows))
            own = _sums(share, algorithm.counts(minibatch))
            counts = Denominators(own, whole, plan.num_policy_steps)
            step |= _policy_step(trainer, algorithm, movement, rows, counts, rates.policy)
        progress = progress.after_step(step)
        if not step:
            step = {"loss": 0.0, "empty": 1.0}
        step["num_rollouts"] = float(len(rows))
        results.append(step)
        _show(step)
        finish_step(progress.step)
        logger.debug("step=%d loss=%.6f", progress.step, step.get("loss", 0.0))
    values = int(rates.critic is not None and plan.has_targets)
    progress = replace(
        progress,
        step=start.step + config.num_steps(len(movement.num_tokens)),
        iterations=start.iterations + int(rates.policy is not None),
        critic_iterations=start.critic_iterations + values,
        pretrain_iterations=start.pretrain_iterations + values * int(rates.policy is None),
    )
    return results, progress


def _sums(share: Share, counts: Mapping[str, float]) -> dict[str, float]:
    """Return the counts of all ranks."""
    total = share.sum(torch.tensor(list(counts.values()), dtype=torch.float64))
    return dict(zip(counts, total.tolist(), strict=True))


def _show(step: Step) -> None:
    """Publish the metrics of one mini-batch to the monitoring server."""
    telemetry.mark_progress()
    telemetry.count("planish_train_tokens_total", step.get("num_tokens", 0.0))
    for part, skipped in (("policy", "skipped"), ("critic", "value_skipped")):
        if skipped in step:
            telemetry.count("planish_train_steps_total", part=part)
            telemetry.count("planish_train_nonfinite_steps_total", step[skipped], part=part)
    for name in ("loss", "grad_norm", "value_loss"):
        if name in step:
            telemetry.set_level(f"planish_train_{name}", step[name])


def _policy_step(
    trainer: Trainer,
    algorithm: Algorithm,
    movement: Movement,
    rows: Rows,
    denominators: Denominators,
    rate: float,
) -> Step:
    """Step the policy and return metrics; a mini-batch without a trained token makes no step."""
    if not any(denominators.minibatch.values()):
        return {}

    def loss_fn(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> LossOutput:
        return algorithm.loss(logprobs, entropy, batch, denominators)

    moving, still = movement.split(rows, STILL_ROWS)
    metrics = trainer.step(moving, loss_fn, learning_rate=rate, still=still)
    return metrics | {"num_tokens": float(movement.num_tokens[rows].sum())}


def _value_step(
    trainer: Trainer,
    algorithm: ActorCritic,
    minibatch: TrainBatch,
    denominators: Denominators,
    rate: float,
    *,
    is_pretraining: bool,
) -> Step:
    """Step the critic and return metrics; a mini-batch without a target makes no step."""
    if not any(denominators.minibatch.values()):
        return {}

    def loss_fn(values: Tensor, batch: TrainBatch) -> LossOutput:
        return algorithm.value_loss(values, batch, denominators, is_pretraining=is_pretraining)

    metrics = trainer.value_step(minibatch, loss_fn, learning_rate=rate)
    own = ("loss", "grad_norm", "skipped")
    return {f"value_{name}" if name in own else name: x for name, x in metrics.items()}
