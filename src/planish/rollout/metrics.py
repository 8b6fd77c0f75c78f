"""Scalars of one shard's batch; a mean over nothing is left out, not written as 0."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planish.engines.requests import FinishReason
from planish.rollout.groups import Fate, Group
from planish.rollout.sampler import Batch
from planish.rollout.surplus import Exchange


def batch_metrics(batch: Batch, exchange: Exchange | None = None) -> dict[str, float]:
    """Return counts, shares of the fates of groups, and lengths.

    Response lengths and accuracy are those of all complete groups that were generated, not of the
    kept ones: they describe the policy. `kept_*` describe the batch.

    Args:
        batch: what was drawn.
        exchange: what became of surplus groups; None where there is no reuse.
    """
    groups = batch.generated()
    complete = [g for g in groups if g.fate is not Fate.INCOMPLETE]
    metrics: dict[str, float] = {
        "num_groups": len(batch.kept),
        "num_rollouts": sum(len(g.outputs) for g in batch.kept),
        "num_generated_groups": len(groups),
        "num_generated_rollouts": sum(len(g.outputs) for g in groups),
        "num_generated_tokens": sum(g.num_tokens for g in groups),
        "num_kept_tokens": sum(g.num_tokens for g in batch.kept),
        "num_verifier_errors": sum(g.num_verifier_errors for g in groups),
        "group_dropped_incomplete": len(groups) - len(complete),
        "ds/gen_rounds": batch.num_rounds,
        "ds/surplus": len(batch.surplus),
        "ds/starved": float(batch.starved),
    }
    if complete:
        fates = [g.fate for g in complete]
        for name, fate in (
            ("ds/kept_frac", Fate.MIXED),
            ("ds/all_correct_frac", Fate.ALL_CORRECT),
            ("ds/all_wrong_frac", Fate.ALL_WRONG),
        ):
            metrics[name] = fates.count(fate) / len(fates)
        metrics["accuracy_mean"] = float(np.mean([g.accuracy for g in complete]))
        metrics.update(_lengths(complete))
    num_right = sum(sum(g.accuracy) for g in batch.kept)
    if exchange is not None:
        num_right += sum(exchange.used.num_right)
        _add_surplus(metrics, batch, exchange)
    rows = metrics["num_rollouts"]
    if rows:
        metrics["ds/samples_per_trained_sample"] = metrics["num_generated_rollouts"] / rows
        metrics["kept_accuracy_mean"] = num_right / rows
        metrics["kept_response_length_mean"] = metrics["num_kept_tokens"] / rows
    return metrics


def _add_surplus(metrics: dict[str, float], batch: Batch, exchange: Exchange) -> None:
    """Count the reused groups in; num_groups + dropped + surplus + expired = generated + taken."""
    used = exchange.used.rollouts
    metrics["num_groups"] += used.num_groups
    metrics["num_rollouts"] += used.num_rows
    metrics["num_kept_tokens"] += len(used.response_tokens.values)
    metrics["num_dropped_groups"] = len(batch.dropped)
    metrics["ds/surplus"] = len(exchange.carried) + exchange.num_undrawn
    metrics["ds/surplus_taken"] = exchange.num_taken
    metrics["ds/surplus_used"] = len(exchange.used)
    metrics["ds/surplus_expired"] = exchange.num_expired


def _lengths(groups: Sequence[Group]) -> dict[str, float]:
    outputs = [output for group in groups for output in group.outputs]
    lengths = np.array([output.num_tokens for output in outputs])
    logprobs = sum(sum(output.logprobs) for output in outputs)
    cut = sum(output.finish_reason is FinishReason.LENGTH for output in outputs)
    return {
        "response_length_mean": float(lengths.mean()),
        "response_length_max": float(lengths.max()),
        "truncated_frac": cut / len(outputs),
        "logprob_mean": float(logprobs / lengths.sum()),
    }
