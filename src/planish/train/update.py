"""One iteration of training: old log-probabilities, advantages, optimizer steps, metrics.

Knows neither the algorithm's name nor the trainer's; both are protocols.

Source: DAPO, arXiv 2503.14476, algorithm 1.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from planish.algorithms.base import Algorithm, Denominators, LossOutput, TrainBatch
from planish.algorithms.mismatch import mismatch_metrics
from planish.errors import CheckpointError
from planish.train.batching import Rows, split_minibatches
from planish.train.config import TrainConfig
from planish.train.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """Counters of a training; part of the train state.

    Example:
        >>> Progress(step=32, updates=31, iterations=2).to_json()["skipped_in_row"]
        0
    """

    step: int = 0
    """Mini-batches seen; an iteration without a rollout counts as one empty mini-batch."""
    updates: int = 0
    """Optimizer steps made: `step` without empty and skipped mini-batches."""
    iterations: int = 0
    """Rollout batches trained on; drives the warm-up."""
    skipped_in_row: int = 0
    """Mini-batches with non-finite gradients since the last good one."""
    skipped_total: int = 0
    """Mini-batches with non-finite gradients so far."""

    def to_json(self) -> dict[str, int]:
        """Return the counters as JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Progress:
        """Read the counters from the JSON part of a train state.

        Raises:
            CheckpointError: a counter is missing or no count.
        """
        names = list(asdict(cls()))
        bad = {n: raw.get(n) for n in names if type(raw.get(n)) is not int or raw[n] < 0}
        if bad:
            raise CheckpointError(
                f"a train state must hold the counters {names} as counts, got {bad}; resume from "
                "an earlier state"
            )
        return cls(**{name: raw[name] for name in names})


@dataclass(frozen=True)
class UpdateResult:
    """What one iteration of training gives back."""

    scalars: dict[str, float]
    """Metrics over the iteration."""
    minibatches: list[dict[str, float]]
    """Metrics of each optimizer step."""
    progress: Progress
    """Counters after the iteration."""


def num_steps(num_rows: int, config: TrainConfig) -> int:
    """Return by how much an iteration with this many kept rollouts raises `Progress.step`."""
    return max(1, config.num_passes * -(-num_rows // config.rollouts_per_minibatch))


def learning_rate(config: TrainConfig, iterations: int) -> float:
    """Return the rate of the iteration after `iterations` earlier ones: linear, then constant."""
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
) -> UpdateResult:
    """Train on one rollout batch.

    Args:
        trainer: the policy in training, at the weights that the old policy is fixed at.
        algorithm: gives masks, advantages and the loss.
        batch: the kept rollouts; may be empty.
        config: of the train stage.
        progress: counters before the iteration.
        seed: what the order of the mini-batches depends on.
    """
    rate = learning_rate(config, progress.iterations)
    if len(batch) == 0:
        logger.warning("no rollouts to train on step=%d", progress.step)
        progress = replace(progress, step=progress.step + 1, iterations=progress.iterations + 1)
        return UpdateResult({"num_rollouts": 0.0, "empty_minibatches": 1.0}, [], progress)
    sampled = batch.policy_mask
    batch = batch.updated(old_logprobs=trainer.logprobs(batch))
    if algorithm.needs_values:
        batch = batch.updated(values=trainer.values(batch))
    scalars = batch_metrics(batch)
    scalars |= mismatch_metrics(batch.old_logprobs, batch.rollout_logprobs, sampled)
    batch = algorithm.advantages(batch)
    scalars |= _advantage_metrics(batch)
    parts = split_minibatches(
        len(batch), config.rollouts_per_minibatch, config.num_passes, seed=seed
    )
    minibatches, progress = _run_steps(
        trainer, algorithm, batch, parts, rate=rate, config=config, progress=progress
    )
    progress = replace(progress, iterations=progress.iterations + 1)
    scalars |= _summary(minibatches)
    scalars |= {"learning_rate": rate, **{k: float(v) for k, v in progress.to_json().items()}}
    return UpdateResult(scalars, minibatches, progress)


def _run_steps(
    trainer: Trainer,
    algorithm: Algorithm,
    batch: TrainBatch,
    parts: Sequence[Rows],
    *,
    rate: float,
    config: TrainConfig,
    progress: Progress,
) -> tuple[list[dict[str, float]], Progress]:
    whole = algorithm.counts(batch)
    results: list[dict[str, float]] = []
    for rows in parts:
        minibatch = batch.take(torch.from_numpy(rows))
        progress = replace(progress, step=progress.step + 1)
        counts = algorithm.counts(minibatch)
        if not any(counts.values()):
            results.append({"loss": 0.0, "empty": 1.0, "num_rollouts": float(len(minibatch))})
            continue
        denominators = Denominators(counts, whole, len(parts))

        def loss_fn(
            logprobs: Tensor,
            entropy: Tensor,
            batch: TrainBatch,
            denominators: Denominators = denominators,
        ) -> LossOutput:
            return algorithm.loss(logprobs, entropy, batch, denominators)

        metrics = trainer.step(minibatch, loss_fn, learning_rate=rate)
        metrics |= {
            "num_rollouts": float(len(minibatch)),
            "num_tokens": float(minibatch.policy_mask.sum()),
        }
        results.append(metrics)
        progress = _count(progress, skipped=metrics["skipped"] > 0, config=config)
        logger.debug("step=%d loss=%.6f", progress.step, metrics["loss"])
    return results, progress


def _count(progress: Progress, *, skipped: bool, config: TrainConfig) -> Progress:
    if not skipped:
        return replace(progress, updates=progress.updates + 1, skipped_in_row=0)
    progress = replace(
        progress,
        skipped_in_row=progress.skipped_in_row + 1,
        skipped_total=progress.skipped_total + 1,
    )
    log = logger.error if progress.skipped_in_row >= config.alarm_after_skipped else logger.warning
    log(
        "gradient not finite, optimizer step skipped step=%d in_row=%d; lower "
        "`train.learning_rate` or look at the rollouts of this iteration",
        *(progress.step, progress.skipped_in_row),
    )
    return progress


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Describe a rollout batch that is not empty: counts, rewards, lengths."""
    lengths = batch.value_mask.sum(1).double()
    return {
        "num_rollouts": float(len(batch)),
        "num_groups": float(len(set(batch.group_index.tolist()))),
        "num_tokens": float(batch.policy_mask.sum()),
        "reward_mean": float(batch.reward.double().mean()),
        "reward_max": float(batch.reward.max()),
        "reward_min": float(batch.reward.min()),
        "accuracy_mean": float(batch.accuracy.double().mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated_fraction": float(batch.is_truncated.double().mean()),
    }


def _advantage_metrics(batch: TrainBatch) -> dict[str, float]:
    """Count groups that train on nothing, and those whose rewards differ by length alone."""
    active = (batch.advantages != 0).any(1)
    groups: dict[int, tuple[set[float], bool]] = {}
    for group, accuracy, trains in zip(
        batch.group_index.tolist(), batch.accuracy.tolist(), active.tolist(), strict=True
    ):
        seen, any_active = groups.get(group, (set(), False))
        groups[group] = (seen | {accuracy}, any_active or trains)
    return {
        "zero_advantage_groups": float(sum(not on for _, on in groups.values())),
        "length_only_groups": float(sum(on and len(a) == 1 for a, on in groups.values())),
    }


def _summary(minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps that have it."""
    steps = [m for m in minibatches if not m.get("empty")]
    summary = {"empty_minibatches": float(len(minibatches) - len(steps))}
    if not steps:
        return summary
    for name in sorted({name for step in steps for name in step}):
        if name in ("num_rollouts", "num_tokens", "skipped"):
            continue
        found = [step[name] for step in steps if name in step and math.isfinite(step[name])]
        if found:
            summary[name] = sum(found) / len(found)
    # Before the first step the policy is the old policy: any other ratio is a bug, or a
    # temperature, mask or dropout that differs between the two passes.
    if "ratio_error_max" in steps[0]:
        summary["first_step_ratio_error"] = steps[0]["ratio_error_max"]
    summary["skipped_steps"] = sum(step["skipped"] for step in steps)
    return summary
