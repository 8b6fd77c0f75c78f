"""Scores of a detector over labelled cases: precision, recall, F1, delays, false alarms.

A case is one job with its truth. A fault is found if a faulty machine is named within [onset, halt
+ 8 min]. An alarm is false if it names a healthy machine, if it comes before the onset, or if the
case has no fault. `first` counts only the first alarm of a case, `strict` every machine that is
named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from planish.minder.lab.cases import Truth
from planish.minder.lab.replay import Alarm

GRACE_SECONDS = 480
"""Seconds after the job has halted in which a faulty machine may still be named."""
RESAMPLES = 2_000
"""Number of bootstrap samples of the cases."""

Counting = Literal["first", "strict"]
Counts = NDArray[np.float64]
"""[..., 3]: true positives, false positives, false negatives."""


@dataclass(frozen=True)
class CaseOutcome:
    """Alarms of one detector in one case."""

    case: str
    fault: Truth | None
    """The fault; None for a healthy job."""
    machines: int
    seconds: int
    """Length of the trace in seconds."""
    alarms: tuple[Alarm, ...]
    """First alarm of each machine, sorted by time, then by name."""
    call_seconds: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def right(self) -> tuple[Alarm, ...]:
        """Alarms that name a faulty machine in time."""
        fault = self.fault
        if fault is None:
            return ()
        return tuple(
            alarm
            for alarm in self.alarms
            if alarm.machine in fault.machines
            and fault.onset <= alarm.time <= fault.halt + GRACE_SECONDS
        )

    @property
    def wrong(self) -> tuple[Alarm, ...]:
        """False alarms.

        A faulty machine that is named too late is neither right nor wrong. An event of the whole
        job is wrong only before the onset or in a case without a fault.
        """
        fault = self.fault
        if fault is None:
            return self.alarms
        return tuple(
            alarm
            for alarm in self.alarms
            if alarm.time < fault.onset or (alarm.machine and alarm.machine not in fault.machines)
        )

    def counts(self, counting: Counting) -> tuple[int, int, int]:
        """Return true positives, false positives and false negatives of this case."""
        right, wrong = self.right, self.wrong
        if counting == "first":
            judged = [alarm for alarm in self.alarms if alarm in right or alarm in wrong][:1]
            right = tuple(alarm for alarm in judged if alarm in right)
            wrong = tuple(alarm for alarm in judged if alarm in wrong)
        hit = int(bool(right))
        return hit, len(wrong), int(self.fault is not None and not hit)

    @property
    def delay(self) -> int | None:
        """Seconds from the onset to the first right alarm; None if there is none."""
        if self.fault is None or not self.right:
            return None
        return self.right[0].time - self.fault.onset


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % bootstrap interval over cases."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """Return text such as `0.950 (0.920-0.970)`."""
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


def score(
    outcomes: Sequence[CaseOutcome], counting: Counting, *, detectable: bool = False
) -> Score:
    """Return precision, recall and F1 with intervals.

    With `detectable`, faults that no detector of these metrics could name are neither hits nor
    misses; false alarms in their cases still count.
    """
    total, samples = bootstrap(outcomes, counting, detectable=detectable)
    hits, false, missed = (int(value) for value in total)
    precision, recall, harmonic = (
        interval(figure(total), figure(samples)) for figure in (_precision, _recall, f1)
    )
    return Score(hits, false, missed, precision, recall, harmonic)


def bootstrap(
    outcomes: Sequence[CaseOutcome], counting: Counting, *, detectable: bool = False
) -> tuple[Counts, Counts]:
    """Return counts [3] over all cases, and [RESAMPLES, 3] over resampled cases.

    Cases with and without a fault are resampled separately.
    """
    counts = np.array([outcome.counts(counting) for outcome in outcomes], np.float64).reshape(-1, 3)
    if detectable:
        hidden = np.array(
            [outcome.fault is not None and not outcome.fault.detectable for outcome in outcomes]
        )
        counts[hidden, 0::2] = 0.0
    with_fault = np.array([outcome.fault is not None for outcome in outcomes], bool)
    generator = np.random.default_rng(0)
    samples = np.zeros((RESAMPLES, 3))
    for rows in (np.flatnonzero(with_fault), np.flatnonzero(~with_fault)):
        if len(rows):
            drawn = generator.choice(rows, (RESAMPLES, len(rows)))
            samples += counts[drawn].sum(axis=1)
    return counts.sum(axis=0), samples


def interval(value: Counts, samples: Counts) -> Interval:
    """Return a figure with the interval that contains 95 % of its bootstrap samples."""
    low, high = np.quantile(samples, [0.025, 0.975])
    return Interval(float(value), float(low), float(high))


def f1(counts: Counts) -> Counts:
    """Return the harmonic mean of precision and recall; 0 without any hit."""
    twice = 2 * counts[..., 0]
    return _share(twice, twice + counts[..., 1] + counts[..., 2])


def _precision(counts: Counts) -> Counts:
    """Return the share of right alarms; 1 if no machine was named, since no name was wrong."""
    named = counts[..., 0] + counts[..., 1]
    return np.where(named > 0, _share(counts[..., 0], named), 1.0)


def _recall(counts: Counts) -> Counts:
    return _share(counts[..., 0], counts[..., 0] + counts[..., 2])


def _share(part: Counts, whole: Counts) -> Counts:
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=np.asarray(whole > 0))


def summary(outcomes: Sequence[CaseOutcome]) -> dict[str, Any]:
    """Return every figure of one detector as JSON values."""
    delays = [outcome.delay for outcome in outcomes if outcome.delay is not None]
    calls = [cost for outcome in outcomes for cost in outcome.call_seconds]
    hours = sum(outcome.machines * outcome.seconds for outcome in outcomes) / 3600
    false = sum(len(outcome.wrong) for outcome in outcomes)
    quiet = [not outcome.alarms for outcome in outcomes if outcome.fault is None]
    return {
        **_numbers_of_cases(outcomes),
        "first": asdict(score(outcomes, "first")),
        "strict": asdict(score(outcomes, "strict")),
        "detectable_first": asdict(score(outcomes, "first", detectable=True)),
        "detectable_strict": asdict(score(outcomes, "strict", detectable=True)),
        "by_kind": _grouped(outcomes, lambda outcome: outcome.fault.kind if outcome.fault else ""),
        "by_size": _grouped(outcomes, lambda outcome: size_name(outcome.machines)),
        "delay_median_s": float(np.median(delays)) if delays else None,
        "delay_p90_s": float(np.quantile(delays, 0.9)) if delays else None,
        "call_mean_s": float(np.mean(calls)) if calls else None,
        "call_max_s": float(np.max(calls)) if calls else None,
        "calls": len(calls),
        "machine_hours": hours,
        "false_alarms_per_1000_machine_hours": 1000 * false / hours if hours else 0.0,
        "normal_without_alert": float(np.mean(quiet)) if quiet else 1.0,
    }


def size_name(machines: int) -> str:
    """Return the name of a group of sizes, e.g. 4-7 or 64+."""
    if machines < 4:
        return "<4"
    low = min(64, 1 << machines.bit_length() - 1)
    return "64+" if low == 64 else f"{low}-{2 * low - 1}"


def _grouped(outcomes: Sequence[CaseOutcome], key: Callable[[CaseOutcome], str]) -> dict[str, Any]:
    """Return the figures of each group of cases; the group "" is left out."""
    groups: dict[str, list[CaseOutcome]] = defaultdict(list)
    for outcome in outcomes:
        groups[key(outcome)].append(outcome)
    return {
        name: {
            **_numbers_of_cases(members),
            "first": asdict(score(members, "first")),
            "detectable_recall": score(members, "first", detectable=True).recall.value,
            "false_alarms": sum(len(outcome.wrong) for outcome in members),
        }
        for name, members in sorted(groups.items())
        if name
    }


def _numbers_of_cases(outcomes: Sequence[CaseOutcome]) -> dict[str, int]:
    faults = [outcome.fault for outcome in outcomes if outcome.fault is not None]
    return {
        "cases": len(outcomes),
        "faults": len(faults),
        "detectable_faults": sum(fault.detectable for fault in faults),
    }
