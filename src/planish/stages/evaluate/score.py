"""Scalars of one evaluation, for all prompts and for each source of prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planish.records.reports import Scalars
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.evaluate import metrics
from planish.stages.evaluate.config import EvaluateConfig
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

    def marks(self) -> list[str]:
        """Return one text a prompt, with a 1 for each right sample and a 0 for each other."""
        return ["".join("1" if x > 0 else "0" for x in row) for row in self.accuracy()]

    def answers(self) -> list[list[str | None]]:
        """Return [P] lists of n extracted answers; None is invalid."""
        answers = [None if v.invalid or v.error else v.extracted for v in self.verdicts]
        step = self.num_samples
        return [answers[start : start + step] for start in range(0, len(answers), step)]


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
    chosen = (np.asarray(rows)[:, None] * n + np.arange(n)).ravel()
    finish = sampled.rollouts.finish[chosen]
    lengths = sampled.rollouts.response_tokens.lengths[chosen]
    verdicts = [sampled.verdicts[row] for row in chosen]
    scores: Scalars = {
        "accuracy": metrics.average(accuracy),
        "accuracy_bootstrap_error": error,
        "accuracy_bootstrap_low": low,
        "accuracy_bootstrap_high": high,
        f"cons@{n}": metrics.consensus(accuracy, [answers[row] for row in rows]),
        "num_prompts": float(len(rows)),
        "num_samples": float(n),
        "invalid_fraction": float(np.mean([v.invalid for v in verdicts])),
        "truncated_fraction": float((finish == FinishReason.LENGTH).mean()),
        "refused_fraction": float((finish == FinishReason.ABORT).mean()),
        "verifier_errors": float(sum(v.error for v in verdicts)),
        "response_length_mean": float(lengths.mean()),
        "num_generated_tokens": float(lengths.sum()),
    }
    if n > 1:
        scores["accuracy_standard_error"] = metrics.sampling_error(accuracy)
    for k in config.pass_at:
        if k <= n:
            scores[f"pass@{k}"] = metrics.mean_pass_at_k(accuracy, k)
    if greedy is not None:
        scores["greedy"] = metrics.average(greedy.accuracy()[rows])
    return scores


def rise_error(before: Sequence[str], after: Sequence[str]) -> float:
    """Return the standard error of the rise of avg@n between two policies, prompts held fixed.

    Sample k of a prompt has the same seed under both, so that much of their noise is common: the
    error is that of the differences, sample by sample.

    Args:
        before: what `Judged.marks` returned of the first policy.
        after: the same of the second, on the same prompts.

    Example:
        >>> rise_error(["01", "11"], ["01", "11"])
        0.0
    """
    tables = [np.array([[float(mark) for mark in row] for row in rows]) for rows in (before, after)]
    return metrics.sampling_error(tables[1] - tables[0])


def rows_by_source(sources: Sequence[str]) -> dict[str, list[int]]:
    """Return the prompt indices of each source, sources sorted.

    Example:
        >>> rows_by_source(["b", "a", "b"])
        {'a': [1], 'b': [0, 2]}
    """
    rows: dict[str, list[int]] = {}
    for row, source in enumerate(sources):
        rows.setdefault(source, []).append(row)
    return dict(sorted(rows.items()))
