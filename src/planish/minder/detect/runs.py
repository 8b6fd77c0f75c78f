"""Runs: consecutive windows in which one machine is a candidate in one metric.

Source: Minder, arXiv 2411.01791, section 4.5 (continuity of four minutes). Tolerance of gaps and of
repeated samples is ours.
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
"""Largest share of a run that gaps may have."""
_SAMPLE_SHARE = 0.12
"""Largest share of a run that a single slow sample without the candidate may have."""
_MOMENT = 20
"""Longest stretch of windows in which another machine may hide a machine that is far away."""
BEYOND_TURNS = 1.75
"""Factor by which a faulty machine must differ for longer than the turns of its peers."""
LONG_TURN = 60.0
"""Turns of at least this many seconds show that parts of the job have different work."""
FEWEST_WINDOWS = 30
"""Fewest windows of a run that is reported as a candidate."""


@dataclass(frozen=True)
class Run:
    """Consecutive windows in which one machine is a candidate."""

    machine: int
    first: int
    last: int
    """Last window in which the machine is a candidate."""
    length: int
    """Number of windows, with tolerated gaps, without masked windows."""


def stretches(flags: Mask) -> list[tuple[int, int]]:
    """Return (start, stop), `start <= i < stop`, of each stretch of set flags.

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

    A window in which the machine is not `named` [W] as a candidate ends a run, unless it is
    tolerated: at most `gap_tolerance` windows and at most 2 % of the run. `masked` windows, of
    which too little is known, neither count nor end a run. `sample` is the number of windows that a
    slow sample touches, else 0. One slow sample in a run may lack the candidate if the windows
    before it and those after it last longer than a sample. A short burst that only one sample shows
    is joined to no run.
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
    """Return the seconds by which slow samples make every run longer."""
    return 1.5 * (interval - 1.0)


@dataclass(frozen=True)
class Rule:
    """Time for which machines must be candidates in a metric."""

    needed: F64
    """[N], windows that a run must exceed; slow samples make runs longer."""
    samples: I64
    """[N], windows that one slow sample touches; 0 for samples every second."""
    resting: Mask
    """[W], windows in which machines rest: they count for a candidate and are unknown for the
    others."""
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


def runs_of(
    named: Mask, rule: Rule, unknown: Mask, present: Mask, far: Mask
) -> dict[int, list[Run]]:
    """Return the runs of each machine that was a candidate in at least `FEWEST_WINDOWS` windows.

    A window neither counts nor ends a run while the machine is not present, e.g. while it waits, or
    for a moment in which the distance of another machine lowers its score.

    Args:
        named: [W, N], candidates.
        rule: rule of the metric.
        unknown: [W], windows of which too little is known.
        present: [W, N], machines whose whole window is known.
        far: [W, N], machines whose distance counts.
    """
    often = np.flatnonzero(np.count_nonzero(named, axis=0) >= FEWEST_WINDOWS)
    # The flags of one machine lie together in memory.
    mine, here, away = (np.ascontiguousarray(flags[:, often].T) for flags in (named, present, far))
    masked = np.broadcast_to(unknown, mine.shape)
    if rule.gap_tolerance:
        masked = masked | ~here | short_stretches(away & ~mine, _MOMENT)
    return {
        machine: runs(
            machine,
            mine[place],
            masked[place] | (rule.resting & ~mine[place]),
            gap_tolerance=rule.gap_tolerance,
            sample=int(rule.samples[machine]),
        )
        for place, machine in enumerate(often.tolist())
    }


def short_stretches(flags: Mask, longest: int) -> Mask:
    """Return [N, W], the stretches of set flags that are at most `longest` long.

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
    """Return [W], windows of short stretches in which the machines do less than usual."""
    low = share < rules.rest_share
    return np.asarray(short_stretches(low[None], rules.idle_seconds)[0])


def turn_of(name: str, turns: Mapping[str, int], machine: str, *, is_again: bool = False) -> float:
    """Return for how many seconds a machine must differ in a job whose machines differ in turn.

    In GPU metrics the limit is a multiple of the longest turn of another machine, once two machines
    had long turns: each machine waits for the others. In other metrics the limit is a multiple of
    the second longest turn, since one host may have been busy for a while. If a machine differed
    several times (`is_again`), the longest turn of another machine counts in every metric.
    """
    long = [turn for place, turn in turns.items() if place and turn >= LONG_TURN]
    others = sorted(turn for place, turn in turns.items() if place not in (machine, ""))
    if is_again:
        return BEYOND_TURNS * max(others, default=0)
    if METRICS[name].is_gpu:
        return BEYOND_TURNS * others[-1] if len(long) > 1 and others else 0.0
    return BEYOND_TURNS * others[-2] if len(others) > 1 else 0.0
