"""Runs: consecutive windows in which one machine is a candidate in one metric.

Source: Minder, arXiv 2411.01791, section 4.5 (continuity of four minutes). Tolerance of gaps and
of held samples is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from planish.minder.detect.config import DetectConfig
from planish.minder.detect.denoise import WINDOW
from planish.minder.detect.frame import COARSE_SECONDS, F64, I64, Mask
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.preprocess import Prepared

_TOLERATED_SHARE = 0.02
"""Gaps in a run may be at most this share of it."""
_SAMPLE_SHARE = 0.12
"""Where samples are held, one that lacks the candidate may be at most this share of a run."""
_MOMENT = 20
"""For so many windows another machine may hide one that is far away."""
BEYOND_TURNS = 1.75
"""Where machines differ in turn, a faulty one differs for longer than so many of their turns."""
LONG_TURN = 60.0
"""Where machines differ in turn for so long, a part of them does too."""
FEWEST_WINDOWS = 30
"""A shorter run is not reported as a candidate."""


@dataclass(frozen=True)
class Run:
    """Consecutive windows in which one machine is a candidate."""

    machine: int
    first: int
    last: int
    """Last window in which the machine is a candidate."""
    length: int
    """Windows that counted, tolerated gaps included, masked windows not."""


def stretches(flags: Mask) -> list[tuple[int, int]]:
    """Return `start <= i < stop` of each stretch of set flags.

    Example:
        >>> stretches(np.array([True, True, False, True]))
        [(0, 2), (3, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def runs(
    machine: int, named: Mask, masked: Mask, *, gap_tolerance: int = 0, sample: int = 0
) -> list[Run]:
    """Return the runs of one machine, in order.

    A window in which it is not `named` [W] as a candidate ends a run, unless tolerated: at most
    `gap_tolerance` such windows, and at most 2 % of the run. `masked` windows, of which too little
    is known, neither count nor end anything. Where samples are held, each touches `sample` windows,
    else 0: one sample in a run may lack the candidate if both what lies before it and what lies
    after it last longer than one sample. A burst that a single sample has met is no part of a run.
    """
    known = np.flatnonzero(~masked)
    joined: list[tuple[int, int]] = []
    gaps = 0
    for start, stop in stretches(named[known]):
        gap = start - joined[-1][1] if joined else 0
        length = stop - joined[-1][0] if joined else 0
        tolerated = min(gap_tolerance, _TOLERATED_SHARE * length)
        if joined and min(joined[-1][1] - joined[-1][0], stop - start) > sample:
            tolerated = max(tolerated, min(sample, _SAMPLE_SHARE * length))
        if joined and gaps + gap <= tolerated:
            joined[-1], gaps = (joined[-1][0], stop), gaps + gap
        else:
            joined.append((start, stop))
            gaps = 0
    return [
        Run(machine, int(known[start]), int(known[stop - 1]), stop - start)
        for start, stop in joined
    ]


Interval = TypeVar("Interval", float, F64)


def growth(interval: Interval) -> Interval:
    """Return the seconds by which held samples lengthen everything."""
    return 1.5 * (interval - 1.0)


@dataclass(frozen=True)
class Rule:
    """How long machines must be candidates in a metric."""

    needed: F64
    """[N], windows: a held sample makes everything look longer."""
    samples: I64
    """[N], windows that one held sample touches; 0 where samples are a second apart."""
    resting: Mask
    """[W], windows that count for candidates and say nothing of other machines."""
    gap_tolerance: int
    """Windows in a run that may lack the candidate, see `runs`."""

    @classmethod
    def of(cls, name: str, prepared: Prepared, share: F64, rules: DetectConfig) -> Rule:
        """Return the rule of a metric in one call; `share` is its `activity`."""
        intervals = prepared.intervals.get(name, np.ones(prepared.frame.num_machines))
        held = (intervals > COARSE_SECONDS) & (rules.gap_tolerance > 0)
        touched = np.where(held, intervals + WINDOW - 1, 0).astype(np.int64)
        needed = rules.continuity_seconds + growth(intervals)
        return cls(needed, touched, resting(share, rules), rules.gap_tolerance)

    def runs(self, machine: int, named: Mask, masked: Mask) -> list[Run]:
        """Return the runs of one machine, see `runs`."""
        return runs(
            machine,
            named,
            masked | (self.resting & ~named),
            gap_tolerance=self.gap_tolerance,
            sample=int(self.samples[machine]),
        )


def runs_of(
    named: Mask, rule: Rule, unknown: Mask, present: Mask, far: Mask
) -> dict[int, list[Run]]:
    """Return the runs of each machine that was a candidate in at least `FEWEST_WINDOWS`.

    A window neither counts nor ends a run where the machine is not present, as while it waits, nor
    for a moment in which another machine spreads the scores.

    Args:
        named: [W, N], candidates.
        rule: of the metric.
        unknown: [W], windows of which too little is known.
        present: [W, N], machines of which the whole window is known.
        far: [W, N], machines whose distance counts.
    """
    often = np.flatnonzero(np.count_nonzero(named, axis=0) >= FEWEST_WINDOWS)
    # What is known of one machine lies together in memory.
    mine, here, away = (np.ascontiguousarray(flags[:, often].T) for flags in (named, present, far))
    masked = np.broadcast_to(unknown, mine.shape)
    if rule.gap_tolerance:
        masked = masked | ~here | short_stretches(away & ~mine, _MOMENT)
    return {
        machine: rule.runs(machine, mine[place], masked[place])
        for place, machine in enumerate(often.tolist())
    }


def short_stretches(flags: Mask, longest: int) -> Mask:
    """Return [N, W], the stretches of set flags that are no longer than `longest`.

    Example:
        >>> short_stretches(np.array([[True, True, True, False, True]]), 2)
        array([[False, False, False, False,  True]])
    """
    edges = np.diff(flags.astype(np.int8), axis=1, prepend=0, append=0)
    rows, starts = np.nonzero(edges > 0)
    stops = np.nonzero(edges < 0)[1]
    long = stops - starts > longest
    edges[rows[long], starts[long]] = 0
    edges[rows[long], stops[long]] = 0
    short: Mask = edges.cumsum(axis=1, dtype=np.int8)[:, :-1] > 0
    return short


def long_runs(runs: Mapping[int, Sequence[Run]], rule: Rule) -> list[Run]:
    """Return the first run of each machine that is long enough, the earliest first."""
    result = []
    for machine, found in runs.items():
        result += [run for run in found if run.length > rule.needed[machine]][:1]
    return sorted(result, key=lambda run: (run.first, run.machine))


def resting(share: F64, rules: DetectConfig) -> Mask:
    """Return [W], windows of short stretches in which the machines do less than they mostly do."""
    low = share < rules.rest_share
    return np.asarray(short_stretches(low[None], rules.idle_seconds)[0])


def turn_of(name: str, turns: Mapping[str, int], machine: str, *, is_again: bool = False) -> float:
    """Return for how long a machine must differ in a metric of a job whose machines do in turn.

    In metrics of GPUs the longest turn of the others counts, once two machines had long ones: that
    is how each of them waits for the rest. Elsewhere the second longest does, since a host may have
    been busy for a while. For one that differs again and again the longest counts anyway.
    """
    long = [turn for place, turn in turns.items() if place and turn >= LONG_TURN]
    others = sorted(turn for place, turn in turns.items() if place not in (machine, ""))
    if is_again:
        return BEYOND_TURNS * max(others, default=0)
    if METRICS[name].is_gpu:
        return BEYOND_TURNS * others[-1] if len(long) > 1 and others else 0.0
    return BEYOND_TURNS * others[-2] if len(others) > 1 else 0.0
