"""Scores of an evaluation as pure functions of accuracies and extracted answers.

Source: avg@n as in DAPO, arXiv 2503.14476, section 4.1; the unbiased pass@k of arXiv 2107.03374,
equation 1; cons@n is the majority vote of arXiv 2203.11171.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from planish.base.errors import ConfigError

Table = npt.NDArray[np.float64]

_INTEGER = re.compile(r"[+-]?[0-9]{1,64}")


def average(accuracy: Table) -> float:
    """Return avg@n: the mean over prompts of the mean accuracy of their samples.

    Args:
        accuracy: [P, n] float64 of 0 and 1.
    """
    return float(accuracy.mean(axis=1).mean())


def sampling_error(accuracy: Table) -> float:
    """Return the standard error of avg@n with the prompts held fixed.

    Args:
        accuracy: [P, n] float64; or the differences of two policies whose samples share their
            seeds, for the error of the difference.

    Returns:
        sqrt(sum_p var_p / n) / P with the sample variance of each prompt; NaN for n = 1.
    """
    num_prompts, num_samples = accuracy.shape
    if num_samples < 2:
        return math.nan
    variances = accuracy.var(axis=1, ddof=1)
    return float(math.sqrt(variances.sum() / num_samples) / num_prompts)


def bootstrap(
    accuracy: Table, *, num_resamples: int, seed: int
) -> tuple[float, tuple[float, float]]:
    """Draw prompts with replacement to see how avg@n depends on the choice of prompts.

    Args:
        accuracy: [P, n] float64.
        num_resamples: number of draws of P prompts.
        seed: of the draws.

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
    """Return the chance that k of the samples, drawn without replacement, hold a right one.

    Returns:
        1 - C(n - c, k) / C(n, k); 1 when fewer than k samples are wrong.

    Raises:
        ConfigError: k is not in 1..n.

    Example:
        >>> round(pass_at_k(16, 4, 8), 6)
        0.961538
    """
    if not 1 <= k <= num_samples:
        raise ConfigError(
            f"k of pass@k must lie in 1..{num_samples}, got {k}; sample more responses"
        )
    if num_samples - num_correct < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def mean_pass_at_k(accuracy: Table, k: int) -> float:
    """Return pass@k averaged over prompts, from accuracies [P, n]."""
    num_samples = accuracy.shape[1]
    correct = (accuracy > 0.0).sum(axis=1)
    return float(np.mean([pass_at_k(num_samples, int(c), k) for c in correct]))


def majority(answers: Sequence[str | None]) -> int | None:
    """Return the position of the first answer of the largest class.

    Args:
        answers: extracted answers in sample order; None is an invalid one and forms no class.
            Integers are compared as numbers, anything else as text.

    Returns:
        None without a valid answer; of equal classes the one that occurs first wins.
    """
    counts: dict[str, int] = {}
    first: dict[str, int] = {}
    for position, answer in enumerate(answers):
        if answer is None:
            continue
        key = str(int(answer)) if _INTEGER.fullmatch(answer) else answer
        counts[key] = counts.get(key, 0) + 1
        first.setdefault(key, position)
    if not counts:
        return None
    # Dictionaries keep the order of first occurrence, and max takes the first of equals.
    return first[max(counts, key=lambda key: counts[key])]


def consensus(accuracy: Table, answers: Sequence[Sequence[str | None]]) -> float:
    """Return cons@n: the share of prompts whose most frequent answer is right.

    Args:
        accuracy: [P, n] float64.
        answers: [P] lists of n extracted answers; None is invalid.
    """
    votes = [majority(row) for row in answers]
    right = [0.0 if v is None else float(accuracy[p, v] > 0.0) for p, v in enumerate(votes)]
    return float(np.mean(right))
