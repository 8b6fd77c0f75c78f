"""Metrics of an iteration of training: rollouts, advantages, values, steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from planish.algorithms.advantages import explained_variance
from planish.algorithms.base import TrainBatch
from planish.algorithms.losses import value_losses

_COUNTS = ("num_rollouts", "num_tokens", "skipped", "value_skipped", "entropy_error")


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Describe a rollout batch that is not empty: counts, rewards, lengths.

    Rewards and lengths are those of finished responses; others have neither yet. They are missing
    where no response is finished.
    """
    counts = {
        "num_rollouts": float(len(batch)),
        "num_groups": float(len(set(batch.group_index.tolist()))),
        "num_tokens": float(batch.policy_mask.sum()),
    }
    done = batch.is_finished
    if not bool(done.any()):
        return counts
    reward, lengths = batch.reward[done], batch.value_mask.sum(1).double()[done]
    return {
        **counts,
        "reward_mean": float(reward.double().mean()),
        "reward_max": float(reward.max()),
        "reward_min": float(reward.min()),
        "accuracy_mean": float(batch.accuracy[done].double().mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated_fraction": float(batch.is_truncated[done].double().mean()),
    }


def group_metrics(batch: TrainBatch, *, has_values: bool) -> dict[str, float]:
    """Count groups that train on nothing, and those whose rewards differ by length alone.

    The latter are groups that train although their verdicts are equal (or differ by a part of a
    score); with `has_values` a critic makes the difference, and they are not counted.
    """
    active = (batch.advantages != 0).any(1)
    groups: dict[int, tuple[set[float], bool]] = {}
    for group, accuracy, trains in zip(
        batch.group_index.tolist(), batch.accuracy.tolist(), active.tolist(), strict=True
    ):
        seen, any_active = groups.get(group, (set(), False))
        groups[group] = (seen | {accuracy}, any_active or trains)
    counts = {"zero_advantage_groups": float(sum(not on for _, on in groups.values()))}
    if not has_values:
        by_length = [on and len(a) == 1 for a, on in groups.values()]
        counts["length_only_groups"] = float(sum(by_length))
    return counts


def mask_metrics(batch: TrainBatch, *, has_values: bool) -> dict[str, float]:
    """Count the loss masks of a rollout batch that hold no token at all.

    A mean over such a mask is left out of the metrics, or is 0 where a number is needed. With
    `has_values` the value mask counts too.
    """
    masks = [batch.policy_mask, batch.value_mask] if has_values else [batch.policy_mask]
    return {"empty_mask": float(sum(not bool(mask.any()) for mask in masks))}


def value_metrics(batch: TrainBatch) -> dict[str, float]:
    """Compare the critic before the iteration with its targets, over `value_mask`.

    Returns:
        Counts alone where no token has a target. `ev_undefined` is 1 where all targets are equal.
    """
    mask = batch.value_mask
    counts = {
        "num_finished": float(batch.is_finished.sum()),
        "num_value_tokens": float(mask.sum()),
        "positive_rollouts": float(batch.positive_mask.any(1).sum()),
    }
    if not counts["num_value_tokens"]:
        return counts
    values, returns = (x[mask].double() for x in (batch.values, batch.returns))
    explained = float(explained_variance(returns, values, mask[mask]))
    losses = value_losses(values, values, returns)
    return {
        **counts,
        "explained_variance": 0.0 if math.isnan(explained) else explained,
        "ev_undefined": float(math.isnan(explained)),
        "fresh_value_loss": float(losses.mean()),
        "value_mean": float(values.mean()),
        "return_mean": float(returns.mean()),
    }


def step_summary(minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps that have it."""
    steps = [m for m in minibatches if not m.get("empty")]
    summary = {"empty_minibatches": float(len(minibatches) - len(steps))}
    if not steps:
        return summary
    for name in sorted({name for step in steps for name in step}):
        if name in _COUNTS:
            continue
        numbers = [step[name] for step in steps if name in step and math.isfinite(step[name])]
        if numbers:
            summary[name] = sum(numbers) / len(numbers)
    # Before the first step the policy is the old policy: any other ratio is a bug, or a
    # temperature, mask or dropout that differs between the two passes.
    first = next((step for step in steps if "ratio_error_max" in step), None)
    if first is not None:
        summary["first_step_ratio_error"] = first["ratio_error_max"]
    for skipped, name in (("skipped", "skipped_steps"), ("value_skipped", "value_skipped_steps")):
        numbers = [step[skipped] for step in steps if skipped in step]
        if numbers:
            summary[name] = sum(numbers)
    return summary
