"""Scores of a detector over labelled cases: precision, recall, F1, delays, false alarms.

A case is one job with the truth about it. Its fault is found when a faulty machine is named within
[onset, halt + 8 min]. A false alarm is any other machine, any alert before the onset, and any alert
in a case without a fault. `first` counts the first alert of a case only, `strict` every machine
that is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

GRACE_SECONDS = 480
"""A machine may be named this long after the job has halted."""
SIZES = ((4, 7), (8, 15), (16, 31), (32, 63), (64, 100_000))
"""Smallest and largest number of machines of the rows of a table by size."""
RESAMPLES = 2_000
"""Of the cases, for the intervals."""

Counting = Literal["first", "strict"]


@dataclass(frozen=True)
class Named:
    """One alert.

    Example:
        >>> Named("node-3", 1_000_300, "dissimilar", "cpu_usage").machine
        'node-3'
    """

    machine: str
    """Empty for an event of the whole job."""
    time: int
    """Unix seconds of the call that found it."""
    kind: str
    """dissimilar, silent or job_wide."""
    metric: str
    """Metric that confirmed it; empty for the other kinds."""


@dataclass(frozen=True)
class Fault:
    """What is true of a case with a fault.

    Example:
        >>> Fault(("node-3",), "ecc_error", 100, 700, True).ends
        1180
    """

    machines: tuple[str, ...]
    kind: str
    onset: int
    """Unix seconds."""
    halt: int
    """Unix seconds at which the job stopped, or at which the case ends."""
    detectable: bool
    """Seen for at least 285 s in a metric that is used, or silent."""

    @property
    def ends(self) -> int:
        """Return the last second in which naming the machine counts."""
        return self.halt + GRACE_SECONDS


@dataclass(frozen=True)
class Outcome:
    """One case, one detector."""

    case: str
    """Name of the case."""
    fault: Fault | None
    machines: int
    """N of the job."""
    seconds: int
    """Length of the trace."""
    alerts: tuple[Named, ...]
    """First alert of each machine, in the order of time, then of name."""
    call_seconds: tuple[float, ...] = ()
    """What each call cost."""

    @property
    def right(self) -> tuple[Named, ...]:
        """Return the alerts that name a faulty machine in time."""
        fault = self.fault
        if fault is None:
            return ()
        return tuple(
            one
            for one in self.alerts
            if one.machine in fault.machines and fault.onset <= one.time <= fault.ends
        )

    @property
    def wrong(self) -> tuple[Named, ...]:
        """Return the false alarms.

        A faulty machine that is named too late is neither right nor wrong; an event of the whole
        job, which names nobody, is wrong only where nothing has happened.
        """
        fault = self.fault
        if fault is None:
            return self.alerts
        return tuple(
            one
            for one in self.alerts
            if one.time < fault.onset or (one.machine and one.machine not in fault.machines)
        )

    def counts(self, counting: Counting) -> tuple[int, int, int]:
        """Return true positives, false positives and false negatives of this case."""
        right, wrong = self.right, self.wrong
        if counting == "first":
            naming = [one for one in self.alerts if one in right or one in wrong][:1]
            right = tuple(one for one in naming if one in right)
            wrong = tuple(one for one in naming if one in wrong)
        hit = int(bool(right))
        return hit, len(wrong), int(self.fault is not None and not hit)

    @property
    def delay(self) -> int | None:
        """Return the seconds from the onset to the first right alert."""
        if self.fault is None or not self.right:
            return None
        return self.right[0].time - self.fault.onset


@dataclass(frozen=True)
class Interval:
    """A share with its 95 % bootstrap interval over cases."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return it as `0.95 (0.92-0.97)`."""
        return f"{self.value:.3f} ({self.low:.3f}-{self.high:.3f})"


@dataclass(frozen=True)
class Score:
    """Precision, recall and F1 of some cases."""

    true_positives: int
    false_positives: int
    false_negatives: int
    precision: Interval
    recall: Interval
    f1: Interval


Counts = NDArray[np.float64]


def score(
    outcomes: Sequence[Outcome], counting: Counting, *, detectable: bool = False, seed: int = 0
) -> Score:
    """Return precision, recall and F1 with intervals.

    Args:
        outcomes: one for each case.
        counting: first alerts or all.
        detectable: leave faults that no detector of these metrics could name out of hits and
            misses; their false alarms still count.
        seed: of the resampling; cases with and without a fault are drawn apart.

    Example:
        >>> fault = Fault(("a",), "ecc_error", 100, 700, True)
        >>> hit = Outcome("x", fault, 4, 900, (Named("a", 400, "dissimilar", "cpu_usage"),))
        >>> missed = Outcome("y", fault, 4, 900, ())
        >>> round(score([hit, missed], "first").f1.value, 3)
        0.667
    """
    counts = np.array([one.counts(counting) for one in outcomes], np.float64).reshape(-1, 3)
    if detectable:
        hidden = np.array([one.fault is not None and not one.fault.detectable for one in outcomes])
        counts[hidden, 0::2] = 0.0
    total = counts.sum(axis=0)
    sampled = _resampled(counts, np.array([one.fault is not None for one in outcomes]), seed)
    found = {
        name: Interval(float(rule(total)), *_bounds(rule(sampled)))
        for name, rule in (("precision", _precision), ("recall", _recall), ("f1", _f1))
    }
    whole = [int(value) for value in total]
    return Score(whole[0], whole[1], whole[2], found["precision"], found["recall"], found["f1"])


def _resampled(counts: Counts, with_fault: NDArray[np.bool_], seed: int) -> Counts:
    """Return [RESAMPLES, 3], sums over cases drawn with replacement."""
    generator = np.random.default_rng(seed)
    total = np.zeros((RESAMPLES, 3))
    for rows in (np.flatnonzero(with_fault), np.flatnonzero(~with_fault)):
        if len(rows):
            drawn = generator.choice(rows, (RESAMPLES, len(rows)))
            total += counts[drawn].sum(axis=1)
    return total


def _share(part: Counts, whole: Counts) -> Counts:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def _precision(counts: Counts) -> Counts:
    """Return 1 where nobody was named: nothing said is nothing wrong."""
    said = counts[..., 0] + counts[..., 1]
    return np.where(said > 0, _share(np.asarray(counts[..., 0]), np.asarray(said)), 1.0)


def _recall(counts: Counts) -> Counts:
    return _share(np.asarray(counts[..., 0]), np.asarray(counts[..., 0] + counts[..., 2]))


def _f1(counts: Counts) -> Counts:
    twice = np.asarray(2 * counts[..., 0])
    return _share(twice, np.asarray(twice + counts[..., 1] + counts[..., 2]))


def _bounds(sampled: Counts) -> tuple[float, float]:
    low, high = np.quantile(sampled, [0.025, 0.975])
    return float(low), float(high)


def normal_share(outcomes: Sequence[Outcome]) -> float:
    """Return the share of cases without a fault that have no alert; 1 when there is none."""
    normal = [not one.alerts for one in outcomes if one.fault is None]
    return float(np.mean(normal)) if normal else 1.0


def false_alarm_rate(outcomes: Sequence[Outcome]) -> float:
    """Return false alarms per 1,000 machine-hours, every machine that is named counted."""
    hours = sum(one.machines * one.seconds for one in outcomes) / 3600
    return 1000 * sum(len(one.wrong) for one in outcomes) / hours if hours else 0.0


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return every figure of one detector as plain values."""
    delays = [one.delay for one in outcomes if one.delay is not None]
    calls = [cost for one in outcomes for cost in one.call_seconds]
    return {
        "cases": len(outcomes),
        "faults": sum(one.fault is not None for one in outcomes),
        "detectable_faults": sum(
            one.fault is not None and one.fault.detectable for one in outcomes
        ),
        "first": asdict(score(outcomes, "first")),
        "strict": asdict(score(outcomes, "strict")),
        "detectable_first": asdict(score(outcomes, "first", detectable=True)),
        "detectable_strict": asdict(score(outcomes, "strict", detectable=True)),
        "by_kind": _grouped(outcomes, lambda one: one.fault.kind if one.fault else ""),
        "by_size": _grouped(outcomes, lambda one: size_name(one.machines)),
        "delay_median_s": float(np.median(delays)) if delays else None,
        "delay_p90_s": float(np.quantile(delays, 0.9)) if delays else None,
        "call_mean_s": float(np.mean(calls)) if calls else None,
        "call_max_s": float(np.max(calls)) if calls else None,
        "calls": len(calls),
        "machine_hours": sum(one.machines * one.seconds for one in outcomes) / 3600,
        "false_alarms_per_1000_machine_hours": false_alarm_rate(outcomes),
        "normal_without_alert": normal_share(outcomes),
    }


def size_name(machines: int) -> str:
    """Return the row of a table by size.

    Example:
        >>> size_name(5), size_name(64)
        ('4-7', '64+')
    """
    for low, high in SIZES:
        if low <= machines <= high:
            return f"{low}+" if high == SIZES[-1][1] else f"{low}-{high}"
    return f"<{SIZES[0][0]}"


def _grouped(outcomes: Sequence[Outcome], key: Callable[[Outcome], str]) -> dict[str, Any]:
    """Return the figures of each group of cases; the group "" is left out."""
    groups: dict[str, list[Outcome]] = {}
    for one in outcomes:
        groups.setdefault(key(one), []).append(one)
    return {
        name: {
            "cases": len(members),
            "faults": sum(one.fault is not None for one in members),
            "detectable_faults": sum(
                one.fault is not None and one.fault.detectable for one in members
            ),
            "first": asdict(score(members, "first")),
            "detectable_recall": score(members, "first", detectable=True).recall.value,
            "false_alarms": sum(len(one.wrong) for one in members),
        }
        for name, members in sorted(groups.items())
        if name
    }


def f1_difference(
    ours: Sequence[Outcome], theirs: Sequence[Outcome], counting: Counting, *, seed: int = 0
) -> Interval:
    """Return F1 of one detector minus that of another on the same cases, resampled together.

    Raises:
        ValueError: the cases differ.
    """
    if [one.case for one in ours] != [one.case for one in theirs]:
        raise ValueError("both detectors must have seen the same cases in the same order")
    with_fault = np.array([one.fault is not None for one in ours])
    totals, samples = [], []
    for outcomes in (ours, theirs):
        counts = np.array([one.counts(counting) for one in outcomes], np.float64).reshape(-1, 3)
        totals.append(_f1(counts.sum(axis=0)))
        # An equal seed draws equal cases.
        samples.append(_f1(_resampled(counts, with_fault, seed)))
    return Interval(float(totals[0] - totals[1]), *_bounds(samples[0] - samples[1]))
