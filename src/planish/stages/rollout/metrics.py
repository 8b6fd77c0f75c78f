"""Scalars of one shard's batch; a mean over nothing is left out, not written as 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.rollout.extra_groups import SurplusExchange
from planish.stages.rollout.groups import Fate, Group, Slot
from planish.stages.rollout.sampler import Batch


def batch_metrics(batch: Batch, exchange: SurplusExchange | None = None) -> dict[str, float]:
    """Return counts, shares of the fates of groups, and lengths.

    Response lengths and accuracy cover all complete groups that were generated, not only the kept
    ones, so they describe the policy; `kept_*` describe the batch. `exchange` is None without
    reuse of surplus groups.
    """
    groups = batch.generated()
    complete = [g for g in groups if g.fate is not Fate.INCOMPLETE]
    kept = [*(exchange.used if exchange else ()), *batch.kept]
    metrics: dict[str, float] = {
        "num_groups": len(kept),
        "num_rollouts": sum(len(g.slots) for g in kept),
        "num_generated_groups": len(groups),
        "num_generated_rollouts": sum(len(g.slots) for g in groups),
        "num_generated_tokens": sum(g.num_tokens for g in groups),
        "num_kept_tokens": sum(g.num_tokens for g in kept),
        "num_verifier_errors": sum(v.error for g in groups for v in g.verdicts),
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
        slots = [slot for group in complete for slot in group.slots]
        logprobs = sum(sum(slot.logprobs.tolist()) for slot in slots)
        metrics["accuracy_mean"] = sum(g.num_right for g in complete) / len(slots)
        metrics |= _response_metrics(slots)
        metrics["logprob_mean"] = logprobs / sum(group.num_tokens for group in complete)
    if exchange is not None:
        # num_groups + dropped + surplus + expired = generated + taken
        metrics["num_dropped_groups"] = len(batch.dropped)
        metrics["ds/surplus"] = len(exchange.carried) + exchange.num_undrawn
        metrics["ds/surplus_taken"] = exchange.num_taken
        metrics["ds/surplus_used"] = len(exchange.used)
        metrics["ds/surplus_expired"] = exchange.num_expired
    rows = metrics["num_rollouts"]
    if rows:
        metrics["ds/samples_per_trained_sample"] = metrics["num_generated_rollouts"] / rows
        metrics["kept_accuracy_mean"] = sum(g.num_right for g in kept) / rows
        metrics["kept_response_length_mean"] = metrics["num_kept_tokens"] / rows
    return metrics


def _response_metrics(slots: Sequence[Slot]) -> dict[str, float]:
    """Return lengths of responses, and the share that the limit of tokens cut off."""
    lengths = [slot.num_tokens for slot in slots]
    return {
        "response_length_mean": float(np.mean(lengths)),
        "response_length_max": float(max(lengths)),
        "truncated_frac": sum(s.finish is FinishReason.LENGTH for s in slots) / len(slots),
    }


def engine_metrics(stats: Mapping[str, Any], num_tokens: int) -> dict[str, float]:
    """Return the number of decode iterations of the tokens, and their utilisation.

    `slot_utilisation` is tokens per decode iteration, divided by the most rows in the engine at
    once.
    """
    metrics = {"decode_iterations": float(stats["steps"])}
    cells = stats["steps"] * stats["most_rows"]
    if cells:
        metrics["slot_utilisation"] = num_tokens / cells
    return metrics


def staleness_metrics(rollouts: RolloutSet, version: int) -> dict[str, float]:
    """Return mean and maximum age of the response tokens, in policy versions before `version`."""
    ages = version - rollouts.policy_version.values.astype(np.int64)
    if not len(ages):
        return {}
    return {"staleness_mean": float(ages.mean()), "staleness_max": float(ages.max())}


@dataclass(frozen=True)
class Growth:
    """One response before and after its window; both are the same if it failed."""

    group: Group
    before: Slot
    after: Slot

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the window."""
        return self.after.num_tokens - self.before.num_tokens


def window_metrics(
    growths: Sequence[Growth], given: Sequence[Group], kept: Sequence[Group]
) -> dict[str, float]:
    """Return counts of slots, and lengths and accuracy of responses that are finished just now.

    Args:
        growths: one for each slot.
        given: groups of the rollout set.
        kept: groups of the carry set.
    """
    finished = [growth.after for growth in growths if not growth.after.is_open]
    verdicts = [
        growth.after.verdicts[growth.group.verifier]
        for growth in growths
        if not growth.after.is_open
    ]
    given_slots = [slot for group in given for slot in group.slots]
    num_tokens = sum(growth.num_new_tokens for growth in growths)
    num_carried = sum(group.num_open for group in kept)
    metrics: dict[str, float] = {
        "num_groups": len(given),
        "num_rollouts": len(given_slots),
        "num_generated_groups": len({growth.group.ordinal for growth in growths}),
        "num_generated_rollouts": len(growths),
        "num_generated_tokens": num_tokens,
        "num_kept_tokens": sum(slot.num_tokens - slot.start for slot in given_slots),
        "num_live_slots": len(growths),
        "num_continued": sum(growth.before.num_tokens > 0 for growth in growths),
        "num_prefix_tokens": sum(growth.before.num_tokens for growth in growths),
        "num_failed_rows": sum(growth.num_new_tokens == 0 for growth in growths),
        "num_finished": len(finished),
        "num_carried": num_carried,
        "num_waiting": num_carried - (len(growths) - len(finished)),
        "num_verifier_errors": sum(verdict.error for verdict in verdicts),
    }
    if num_tokens:
        logprobs = sum(float(g.after.logprobs[g.before.num_tokens :].sum()) for g in growths)
        metrics["logprob_mean"] = logprobs / num_tokens
    if finished:
        metrics["accuracy_mean"] = float(np.mean([verdict.accuracy for verdict in verdicts]))
        metrics |= _response_metrics(finished)
    return metrics
