"""Scores of an evaluation, for all prompts and for each source of prompts.

Source: avg@n as in DAPO, arXiv 2503.14476, section 4.1; the unbiased pass@k of arXiv 2107.03374,
equation 1; cons@n is the majority vote of arXiv 2203.11171.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planish.records.reports import Scalars
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.evaluate.config import EvaluateConfig
from planish.verifiers import Verdict

Accuracies = npt.NDArray[np.float64]
"""float64 [P, n]: 1 for a right sample of a prompt, else 0."""

_INTEGER = re.compile(r"[+-]?[0-9]{1,64}")


@dataclass(frozen=True)
class Judged:
    """Verified rollouts of an evaluation, n per prompt, group by group.

    Example:
        >>> from planish.records.rollouts import RolloutSet
        >>> Judged(RolloutSet.empty(), [], 1).num_samples
        1
    """

    rollouts: RolloutSet
    verdicts: list[Verdict]
    num_samples: int

    def accuracy(self) -> Accuracies:
        """Return accuracies [P, n]."""
        flat = np.array([v.accuracy for v in self.verdicts], dtype=np.float64)
        return flat.reshape(-1, self.num_samples)

    def marks(self) -> list[str]:
        """Return one text for each prompt, with `1` for a right sample and `0` for any other."""
        return ["".join("1" if x > 0 else "0" for x in row) for row in self.accuracy()]

    def answers(self) -> list[list[str | None]]:
        """Return the extracted answers as P lists of n; None is an invalid answer."""
        answers = [None if v.invalid or v.error else v.extracted for v in self.verdicts]
        step = self.num_samples
        return [answers[start : start + step] for start in range(0, len(answers), step)]


def scalars(
    sampled: Judged, greedy: Judged | None, rows: Sequence[int], config: EvaluateConfig, seed: int
) -> Scalars:
    """Return every score over the prompts `rows`, at least one.

    The scores are `accuracy` (avg@n) with its errors, `pass@k`, `cons@n`, shares, lengths, and
    `greedy` if the greedy responses are given; `seed` seeds the bootstrap.
    """
    n = sampled.num_samples
    accuracy = sampled.accuracy()[rows]
    error, (low, high) = bootstrap(accuracy, num_resamples=config.num_resamples, seed=seed)
    answers = sampled.answers()
    chosen = (np.asarray(rows)[:, None] * n + np.arange(n)).ravel()
    finish = sampled.rollouts.finish[chosen]
    lengths = sampled.rollouts.response_tokens.lengths[chosen]
    verdicts = [sampled.verdicts[row] for row in chosen]
    scores: Scalars = {
        "accuracy": average(accuracy),
        "accuracy_bootstrap_error": error,
        "accuracy_bootstrap_low": low,
        "accuracy_bootstrap_high": high,
        f"cons@{n}": consensus(accuracy, [answers[row] for row in rows]),
        "num_prompts": float(len(rows)),
        "num_samples": float(n),
        "invalid_fraction": float(np.mean([v.invalid for v in verdicts])),
        "truncated_fraction": float((finish == FinishReason.LENGTH).mean()),
        "refused_fraction": float((finish == FinishReason.ABORT).mean()),
        "verifier_errors": float(sum(v.error for v in verdicts)),
        "verifier_timeouts": float(sum(v.timeout for v in verdicts)),
        "response_length_mean": float(lengths.mean()),
        "num_generated_tokens": float(lengths.sum()),
    }
    if n > 1:
        scores["accuracy_standard_error"] = sampling_error(accuracy)
    for k in config.pass_at:
        if k <= n:
            scores[f"pass@{k}"] = mean_pass_at_k(accuracy, k)
    if greedy is not None:
        scores["greedy"] = average(greedy.accuracy()[rows])
    return scores


def rise_error(before: Sequence[str], after: Sequence[str]) -> float:
    """Return the standard error of the rise of avg@n between two policies, for fixed prompts.

    `before` and `after` are the results of `Judged.marks` on the same prompts. Sample k of a prompt
    has the same seed under both policies, so their noise is correlated: the error is computed from
    the differences sample by sample.

    Example:
        >>> rise_error(["01", "11"], ["01", "11"])
        0.0
    """
    tables = [np.array([[float(mark) for mark in row] for row in rows]) for rows in (before, after)]
    return sampling_error(tables[1] - tables[0])


def average(accuracy: Accuracies) -> float:
    """Return avg@n of accuracies [P, n]: the mean over prompts of the mean over samples."""
    return float(accuracy.mean(axis=1).mean())


def sampling_error(accuracy: Accuracies) -> float:
    """Return the standard error of avg@n for fixed prompts, NaN for n = 1.

    It is sqrt(sum_p var_p / n) / P, where var_p is the sample variance of prompt p. The values
    [P, n] are accuracies, or differences of two policies whose samples share their seeds.
    """
    num_prompts, num_samples = accuracy.shape
    if num_samples < 2:
        return math.nan
    variances = accuracy.var(axis=1, ddof=1)
    return float(math.sqrt(variances.sum() / num_samples) / num_prompts)


def bootstrap(
    accuracy: Accuracies, *, num_resamples: int, seed: int
) -> tuple[float, tuple[float, float]]:
    """Bootstrap over prompts: draw P of them with replacement and compute avg@n of each draw.

    Returns:
        Standard deviation of avg@n over the draws, and its 2.5 % and 97.5 % quantiles.
    """
    means = accuracy.mean(axis=1)
    generator = np.random.default_rng(seed)
    draws = [
        float(means[generator.integers(0, len(means), len(means))].mean())
        for _ in range(num_resamples)
    ]
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(np.std(draws, ddof=1)), (float(low), float(high))


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the probability that k samples, drawn without replacement, include a right one.

    That is 1 - C(n - c, k) / C(n, k), which is 1 when fewer than k samples are wrong; k is in 1..n.

    Example:
        >>> round(pass_at_k(16, 4, 8), 6)
        0.961538
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(accuracy: Accuracies, k: int) -> float:
    """Return pass@k averaged over prompts, from accuracies [P, n]."""
    num_samples = accuracy.shape[1]
    correct = (accuracy > 0.0).sum(axis=1)
    return float(np.mean([pass_at_k(num_samples, int(c), k) for c in correct]))


def majority(answers: Sequence[str | None]) -> int | None:
    """Return the position of the first answer of the largest class; None without a valid answer.

    An invalid answer, None, forms no class. Integers are compared as numbers, anything else as
    text; of equal classes the one that occurs first wins.
    """
    classes: dict[str, list[int]] = {}
    for position, answer in enumerate(answers):
        if answer is not None:
            key = str(int(answer)) if _INTEGER.fullmatch(answer) else answer
            classes.setdefault(key, []).append(position)
    # Dictionaries keep the order of first occurrence, and max takes the first of equals.
    return max(classes.values(), key=len)[0] if classes else None


def consensus(accuracy: Accuracies, answers: Sequence[Sequence[str | None]]) -> float:
    """Return cons@n of accuracies [P, n]: the share of prompts whose largest class is right."""
    votes = [majority(row) for row in answers]
    right = [0.0 if v is None else float(accuracy[p, v] > 0.0) for p, v in enumerate(votes)]
    return float(np.mean(right))
