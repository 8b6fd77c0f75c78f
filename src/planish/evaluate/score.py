"""Scalars of one evaluation, for all prompts and for each source of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planish.evaluate import metrics
from planish.evaluate.config import EvaluateConfig
from planish.records.reports import Scalars
from planish.records.rollouts import FinishReason, RolloutSet
from planish.verifiers import Verdict


@dataclass(frozen=True)
class Judged:
    """Verified rollouts of an evaluation, n per prompt, group by group.

    Example:
        >>> from planish.records.rollouts import RolloutSet
        >>> Judged(RolloutSet.empty(), [], 1).num_samples
        1
    """

    rollouts: RolloutSet
    """P * n rollouts."""
    verdicts: list[Verdict]
    """One per rollout."""
    num_samples: int
    """n."""

    def accuracy(self) -> npt.NDArray[np.float64]:
        """Return accuracies [P, n]."""
        flat = np.array([v.accuracy for v in self.verdicts], dtype=np.float64)
        return flat.reshape(-1, self.num_samples)

    def answers(self) -> list[list[str | None]]:
        """Return [P] lists of n extracted answers; None is invalid."""
        found = [None if v.invalid or v.error else v.extracted for v in self.verdicts]
        step = self.num_samples
        return [found[start : start + step] for start in range(0, len(found), step)]


def scalars(
    sampled: Judged, greedy: Judged | None, rows: Sequence[int], config: EvaluateConfig, seed: int
) -> Scalars:
    """Compute every score over the prompts `rows`.

    Args:
        sampled: the n sampled responses per prompt.
        greedy: one greedy response per prompt, or None.
        rows: indices of prompts, at least one.
        config: which k and how many resamples.
        seed: of the bootstrap.

    Returns:
        `accuracy` (avg@n) with its errors, `pass@k`, `cons@n`, shares and lengths; `greedy` where
        it was measured.
    """
    n = sampled.num_samples
    accuracy = sampled.accuracy()[rows]
    error, (low, high) = metrics.bootstrap(accuracy, num_resamples=config.num_resamples, seed=seed)
    answers = sampled.answers()
    found: Scalars = {
        "accuracy": metrics.average(accuracy),
        "accuracy_bootstrap_error": error,
        "accuracy_bootstrap_low": low,
        "accuracy_bootstrap_high": high,
        f"cons@{n}": metrics.consensus(accuracy, [answers[row] for row in rows]),
        "num_prompts": float(len(rows)),
        "num_samples": float(n),
        **_response_facts(sampled, rows),
    }
    if n > 1:
        found["accuracy_standard_error"] = metrics.sampling_error(accuracy)
    for k in config.pass_at:
        if k <= n:
            found[f"pass@{k}"] = metrics.mean_pass_at_k(accuracy, k)
    if greedy is not None:
        found["greedy"] = metrics.average(greedy.accuracy()[rows])
    return found


def _response_facts(sampled: Judged, rows: Sequence[int]) -> Scalars:
    n = sampled.num_samples
    chosen = (np.asarray(rows)[:, None] * n + np.arange(n)).ravel()
    finish = sampled.rollouts.finish[chosen]
    lengths = sampled.rollouts.response_tokens.lengths[chosen]
    verdicts = [sampled.verdicts[row] for row in chosen]
    return {
        "invalid_fraction": float(np.mean([v.invalid for v in verdicts])),
        "truncated_fraction": float((finish == FinishReason.LENGTH).mean()),
        "refused_fraction": float((finish == FinishReason.ABORT).mean()),
        "verifier_errors": float(sum(v.error for v in verdicts)),
        "response_length_mean": float(lengths.mean()),
        "num_generated_tokens": float(lengths.sum()),
    }


def rows_by_source(sources: Sequence[str]) -> dict[str, list[int]]:
    """Return the prompt indices of each source, sources sorted.

    Example:
        >>> rows_by_source(["b", "a", "b"])
        {'a': [1], 'b': [0, 2]}
    """
    found: dict[str, list[int]] = {}
    for row, source in enumerate(sources):
        found.setdefault(source, []).append(row)
    return dict(sorted(found.items()))
