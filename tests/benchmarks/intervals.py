"""Mean and 95 % interval of a few measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179)
"""97.5 % quantiles of Student's t for 1, 2, ... degrees of freedom."""
NORMAL_QUANTILE = 1.96
"""The same for more."""


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
