"""Finished runs, and what can be said of several seeds of them."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.studies.arms import Arm, result_file
from tests.benchmarks.studies.runner import is_pretraining

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
NORMAL_QUANTILE = 1.96
"""The same for more."""

RULE = (
    "yes: the 95 % t interval of the differences lies wholly on the published side of 0; "
    "no: wholly on the other side; within noise: it holds 0. Differences are taken seed by seed, "
    "between runs that begin with the same policy. Of ratios the logarithms are what is compared "
    "with 0, and a mean is geometric."
)
"""When a published direction counts as seen."""


@dataclass(frozen=True)
class Interval:
    """Mean of a few values with its 95 % interval."""

    mean: float
    low: float
    high: float
    values: tuple[float, ...]
    """One for each seed."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON; a single value has no interval."""
        bounds = [self.low, self.high] if len(self.values) > 1 else None
        return {"mean": self.mean, "interval_95": bounds, "by_seed": list(self.values)}


def interval(values: Iterable[float]) -> Interval:
    """Return mean and 95 % t interval; infinite for a single value.

    Example:
        >>> found = interval([1.0, 2.0, 3.0])
        >>> found.mean, round(found.high - found.mean, 3)
        (2.0, 2.484)
    """
    sample = tuple(values)
    mean = statistics.fmean(sample)
    if len(sample) < 2:
        return Interval(mean, -math.inf, math.inf, sample)
    freedom = len(sample) - 1
    quantile = T_QUANTILES[freedom - 1] if freedom <= len(T_QUANTILES) else NORMAL_QUANTILE
    half = quantile * statistics.stdev(sample) / math.sqrt(len(sample))
    return Interval(mean, mean - half, mean + half, sample)


def ratio_interval(ratios: Iterable[float]) -> Interval:
    """Return geometric mean and 95 % t interval of ratios: the interval of their logarithms.

    On this scale a ratio and its inverse weigh the same.

    Example:
        >>> found = ratio_interval([2.0, 8.0])
        >>> round(found.mean, 9), ratio_interval([0.5, 0.125]).mean
        (4.0, 0.25)
    """
    sample = tuple(ratios)
    found = interval(math.log(ratio) for ratio in sample)
    return Interval(math.exp(found.mean), math.exp(found.low), math.exp(found.high), sample)


def verdict(difference: Interval, *, sign: int) -> str:
    """Return `yes`, `no` or `within noise` by `RULE`.

    Args:
        difference: of the arm that the paper prefers and the other.
        sign: 1 where the paper says more, -1 where it says less.

    Example:
        >>> verdict(interval([0.1, 0.11, 0.12]), sign=1)
        'yes'
        >>> verdict(interval([-0.1, 0.11, 0.12]), sign=-1)
        'within noise'
    """
    low, high = sorted((sign * difference.low, sign * difference.high))
    if low > 0:
        return "yes"
    return "no" if high < 0 else "within noise"


@dataclass(frozen=True)
class Run:
    """One finished run."""

    raw: Mapping[str, Any]

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """Scores of the start and of later policies, in order."""
        found: list[dict[str, float]] = self.raw["evaluations"]
        return found

    def final(self, key: str) -> float:
        """Return a score of the last policy."""
        return self.evaluations[-1][key]

    def rise(self, key: str = "accuracy") -> float:
        """Return by how much a score has risen since the start."""
        return self.evaluations[-1][key] - self.evaluations[0][key]

    def scores(self, key: str) -> list[float]:
        """Return one score of each evaluated policy."""
        return [scores[key] for scores in self.evaluations]

    def spent(self, stage: str, key: str) -> list[float]:
        """Return how much of a metric was used up before each evaluation, pretraining included."""
        rows = self.raw["rows"]
        return [
            sum(row[stage].get(key, 0.0) for row in rows if row["iteration"] <= scores["iteration"])
            for scores in self.evaluations
        ]

    def updates(self) -> list[float]:
        """Return the iterations that trained the policy before each evaluation."""
        rows = [row for row in self.raw["rows"] if not is_pretraining(row)]
        return [
            float(sum(row["iteration"] <= scores["iteration"] for row in rows))
            for scores in self.evaluations
        ]

    def tokens(self) -> list[float]:
        """Return the response tokens generated before each evaluation."""
        return self.spent("rollout", "num_generated_tokens")

    def seconds(self) -> list[float]:
        """Return the CPU seconds of one thread spent on rollout and training before each."""
        parts = [self.spent(stage, "cpu_seconds") for stage in ("rollout", "reward", "train")]
        return [sum(part) for part in zip(*parts, strict=True)]

    def trained(self, stage: str, key: str) -> list[float]:
        """Return a metric of each iteration that trained the policy."""
        rows = [row for row in self.raw["rows"] if not is_pretraining(row)]
        return [row[stage][key] for row in rows]


Runs = Mapping[str, Sequence[Run]]
"""Label of an arm to its runs, in the order of the seeds."""


def read_run(arm: Arm, seed: int) -> Run:
    """Return a finished run."""
    return Run(json.loads(result_file(arm, seed).read_text("utf-8")))


def over_seeds(runs: Sequence[Run], value: Callable[[Run], float]) -> Interval:
    """Return mean and interval of one figure."""
    return interval([value(run) for run in runs])


def differences(
    runs: Sequence[Run], others: Sequence[Run], value: Callable[[Run], float]
) -> Interval:
    """Return mean and interval of `value(run) - value(other)`, paired by seed."""
    return interval([value(a) - value(b) for a, b in zip(runs, others, strict=True)])


def at(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return y at x on the line through points of rising x; the ends beyond them.

    Example:
        >>> at(1.5, [0, 1, 2], [0, 10, 30])
        20.0
    """
    if x <= xs[0]:
        return float(ys[0])
    for (x0, y0), (x1, y1) in zip(
        zip(xs, ys, strict=True), zip(xs[1:], ys[1:], strict=True), strict=False
    ):
        if x <= x1:
            return float(y0 + (y1 - y0) * (x - x0) / (x1 - x0)) if x1 > x0 else float(y1)
    return float(ys[-1])


def first_reaching(y: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the x at which the line through the points first reaches y; NaN if it never does.

    Example:
        >>> first_reaching(20, [0, 1, 2], [0, 10, 30])
        1.5
    """
    if ys[0] >= y:
        return float(xs[0])
    for index in range(1, len(ys)):
        if ys[index] >= y:
            rise = ys[index] - ys[index - 1]
            return float(xs[index - 1] + (xs[index] - xs[index - 1]) * (y - ys[index - 1]) / rise)
    return math.nan
