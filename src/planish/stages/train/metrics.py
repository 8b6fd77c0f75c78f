"""Metrics of an iteration of training: rollouts, advantages, values, steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from planish.algorithms.advantages import explained_variance
from planish.algorithms.base import TrainBatch
from planish.algorithms.losses import value_losses

_COUNTS = ("num_rollouts", "num_tokens", "skipped", "value_skipped", "entropy_error")


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """Describe the rows of all ranks, at least one: counts, rewards, lengths.

    Rewards, accuracy and lengths cover finished responses only; they are missing if there is none.
    """
    groups, tokens, is_finished, *facts = batch.share.every(
        batch.group_index,
        batch.policy_mask.sum(1),
        batch.is_finished,
        batch.reward,
        batch.accuracy,
        batch.value_mask.sum(1),
        batch.is_truncated,
    )
    counts = {
        "num_rollouts": float(len(groups)),
        "num_groups": float(len(set(groups.tolist()))),
        "num_tokens": float(tokens.sum()),
    }
    done = is_finished != 0
    if not bool(done.any()):
        return counts
    reward, accuracy, lengths, truncated = (fact[done] for fact in facts)
    return {
        **counts,
        "reward_mean": float(reward.mean()),
        "reward_max": float(reward.max()),
        "reward_min": float(reward.min()),
        "accuracy_mean": float(accuracy.mean()),
        "response_tokens_mean": float(lengths.mean()),
        "response_tokens_max": float(lengths.max()),
        "truncated_fraction": float(truncated.mean()),
    }


def group_metrics(
    batch: TrainBatch, chosen: Tensor | None = None, *, has_values: bool
) -> dict[str, float]:
    """Count groups without any advantage, and groups whose rewards differ by length alone.

    The latter have advantages although all their accuracies are equal (a partial score may differ
    too). With `has_values` the critic can cause that, so they are not counted. Only rows of
    `chosen` [B] bool count; None counts all.
    """
    active = (batch.advantages != 0).any(1)
    counted = batch.is_finished == batch.is_finished if chosen is None else chosen
    facts = torch.stack(batch.share.every(counted, batch.group_index, batch.accuracy, active), 1)
    groups: dict[float, tuple[set[float], bool]] = {}
    for _, group, accuracy, trains in facts[facts[:, 0] != 0].tolist():
        seen, any_active = groups.get(group, (set(), False))
        groups[group] = (seen | {accuracy}, any_active or bool(trains))
    counts = {"zero_advantage_groups": float(sum(not on for _, on in groups.values()))}
    if not has_values:
        by_length = [on and len(a) == 1 for a, on in groups.values()]
        counts["length_only_groups"] = float(sum(by_length))
    return counts


def mask_metrics(batch: TrainBatch, *, has_values: bool) -> dict[str, float]:
    """Count the loss masks of a rollout batch that have no token on any rank.

    The metrics omit a mean over such a mask, or give 0 if they need a number. With `has_values`
    the value mask counts too.
    """
    masks = [batch.policy_mask, batch.value_mask] if has_values else [batch.policy_mask]
    counts = batch.share.sum(torch.stack([mask.sum() for mask in masks]))
    return {"empty_mask": float((counts == 0).sum())}


def value_metrics(batch: TrainBatch) -> dict[str, float]:
    """Compare the critic before the iteration with its targets, over `value_mask` of all ranks.

    Returns:
        Metrics; only counts if no token has a target. `ev_undefined` is 1 if all targets are equal.
    """
    mask, share = batch.value_mask, batch.share
    found = share.every(batch.is_finished, mask.sum(1), batch.positive_mask.any(1))
    names = ("num_finished", "num_value_tokens", "positive_rollouts")
    counts = {name: float(x.sum()) for name, x in zip(names, found, strict=True)}
    if not counts["num_value_tokens"]:
        return counts
    values, returns = (x[mask].double() for x in (batch.values, batch.returns))
    explained = float(explained_variance(returns, values, mask[mask], share))
    means = share.means(value_losses(values, values, returns), values, returns)
    return {
        **counts,
        "explained_variance": 0.0 if math.isnan(explained) else explained,
        "ev_undefined": float(math.isnan(explained)),
        "fresh_value_loss": means[0],
        "value_mean": means[1],
        "return_mean": means[2],
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
