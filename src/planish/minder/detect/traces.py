"""One metric of one job, window by window: distances, scores, candidates.

Source: Minder, arXiv 2411.01791, section 4.4. Floors, stages and baselines are ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from planish.minder.detect.config import DetectConfig
from planish.minder.detect.denoise import WINDOW, Denoiser, windows_of
from planish.minder.detect.distances import (
    distance_sums,
    distances_above_median,
    normal_scores,
    threshold,
)
from planish.minder.detect.frame import F32, F64, I64, Mask
from planish.minder.detect.preprocess import Prepared

_BLOCK_WINDOWS = 64


@dataclass(frozen=True)
class Job:
    """What is known of a job besides its metrics."""

    stages: Mapping[str, str] = field(default_factory=dict)
    """Machine to pipeline stage."""
    baseline: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric to machine to what it has differed by in healthy history, normalised."""
    usual: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric to machine to the distance above the median machine that it has had when healthy."""
    started: int = 0
    """Unix seconds of the last start; 0 when not known."""
    since: Mapping[str, int] = field(default_factory=dict)
    """Machine to the unix second from which on it counts; from the beginning where not named."""
    unknown: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Metric to the machines of which nobody knows yet what they differ by when healthy."""
    board: str = ""
    """Model of the boards that it runs on; empty when not known."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Metric to the factor by which its limits are too narrow for this job."""
    ignored: Sequence[tuple[int, int]] = ()
    """Stretches `start <= t < end` (unix seconds) in which nobody is a candidate."""


@dataclass
class Trace:
    """One metric; row w is the window that begins at second w of the frame."""

    sums: F32
    """[W, N], sum of the distances to the machines that each is compared with."""
    scores: F32
    """[W, N], normal scores."""
    above: F32
    """[W, N], distance above the median machine in normalised units."""
    present: Mask
    """[W, N], machines of which the whole window is known."""

    @classmethod
    def empty(cls, windows: int, machines: int) -> Trace:
        """Return a trace of windows that have not been looked at."""
        numbers = np.zeros((3, windows, machines), np.float32)
        return cls(numbers[0], numbers[1], numbers[2], np.zeros((windows, machines), bool))

    def put(self, cells: Any, sums: F32) -> None:
        """Take in sums of distances, and what follows from them.

        Args:
            cells: index of the windows and of the machines that are compared with each other.
            sums: [R, C], of the cells.
        """
        here = self.present[cells]
        self.sums[cells] = sums
        self.scores[cells] = normal_scores(sums, here)
        self.above[cells] = distances_above_median(sums, WINDOW, here)


def comparison_groups(machines: Sequence[str], config: DetectConfig, job: Job) -> list[I64]:
    """Return the columns of machines that are compared with each other.

    Pipeline stages stand alone where each of them has at least four machines; otherwise all
    machines are one group.
    """
    everything = np.arange(len(machines))
    if not (config.compare_within_stage and job.stages):
        return [everything]
    stages = [job.stages.get(name, "") for name in machines]
    groups = [np.flatnonzero([s == stage for s in stages]) for stage in sorted(set(stages))]
    if len(groups) < 2 or min(map(len, groups)) < max(4, config.min_machines):
        return [everything]
    return groups


def compared_values(prepared: Prepared, name: str, config: DetectConfig, job: Job) -> F32:
    """Return the values [T, N] that are compared: without what is known of healthy machines.

    Only as much of a machine's distance from the fleet's median is taken away as it shows: a
    machine that loses its offset, e.g. while all wait, must not seem unlike for that.
    """
    values = prepared.values[name]
    known = job.baseline.get(name, {}) if config.role_baseline else {}
    offsets = np.array([known.get(m, 0.0) for m in prepared.frame.machines], np.float32)
    columns = np.flatnonzero(offsets)
    if not len(columns):
        return values
    away = values[:, columns] - fleet_median(values, prepared.masked[name])[:, None]
    mine = offsets[columns]
    away = np.clip(away, np.minimum(mine, 0), np.maximum(mine, 0))
    result = values.copy()
    result[:, columns] -= np.where(prepared.masked[name][:, columns], 0, away)
    return result


def fleet_median(values: F32, masked: Mask) -> F32:
    """Return [T], the median over the machines that are known; 0 where none is."""
    if not masked.any():
        return np.median(values, axis=1).astype(np.float32)
    return np.nan_to_num(median_of_known(values, ~masked))


def median_of_known(values: F32, known: Mask) -> F32:
    """Return the median of the known numbers of each row; NaN where none is.

    Example:
        >>> rows = np.array([[3.0, 1.0, 9.0]], np.float32)
        >>> median_of_known(rows, np.array([[True, True, False]]))
        array([2.], dtype=float32)
    """
    ordered = np.sort(np.where(known, values, np.inf), axis=1)
    counts = known.sum(axis=1)
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum(counts - 1, 0) // 2]
    high = ordered[rows, counts // 2 % max(1, values.shape[1])]
    return np.where(counts > 0, (low + high) / 2, np.nan).astype(np.float32)


def known_windows(masked: Mask) -> Mask:
    """Return [W, N], machines of which the whole window is known, from [T, N]."""
    unknown = windows_of(masked.astype(np.float32))
    return np.asarray(unknown.max(axis=2, initial=0.0) == 0.0)


def fill_trace(
    result: Trace,
    which: I64,
    values: F32,
    masked: Mask,
    denoiser: Denoiser,
    groups: Sequence[I64],
    config: DetectConfig,
) -> None:
    """Look at some windows.

    Args:
        result: gets their rows.
        which: windows to look at, ascending.
        values: [T, N] in 0 .. 1.
        masked: [T, N], True where nothing is known.
        denoiser: of the metric.
        groups: columns that are compared with each other.
        config: distance.
    """
    windows, unknown = windows_of(values), windows_of(masked.astype(np.float32))
    machines = values.shape[1]
    for start in range(0, len(which), _BLOCK_WINDOWS):
        rows = which[start : start + _BLOCK_WINDOWS]
        result.present[rows] = unknown[rows].max(axis=2, initial=0.0) == 0.0
        block = np.ascontiguousarray(windows[rows]).reshape(-1, WINDOW)
        embedded = denoiser.embed(block).reshape(len(rows), machines, -1)
        for columns in groups:
            cells = np.ix_(rows, columns)
            here = result.present[cells]
            result.put(cells, distance_sums(embedded[:, columns], config.distance, here))


def without(one: Trace, gone: Mask, groups: Sequence[I64]) -> Trace:
    """Return a trace in which some machines [N] no longer weigh in the others' scores."""
    if not gone.any():
        return one
    result = Trace.empty(*one.sums.shape)
    result.sums[:], result.present[:] = one.sums, one.present & ~gone
    for columns in groups:
        result.put((slice(None), columns), one.sums[:, columns])
    return result


def thresholds(config: DetectConfig, groups: Sequence[I64], gone: Mask) -> F64:
    """Return for each machine [N] the score above which it is a candidate."""
    result = np.full(len(gone), np.inf)
    for columns in groups:
        count = int((~gone[columns]).sum())
        if count > 1:
            result[columns] = threshold(config.theta, config.kappa, count)
    return result


def floor_of(name: str, config: DetectConfig) -> float:
    """Return the smallest distance above the median that counts; -inf when floors are off."""
    if config.floors is None:
        return -np.inf
    return config.floors.get(name, config.default_floor)


def floors_of(name: str, machines: Sequence[str], config: DetectConfig, job: Job) -> F64:
    """Return for each machine [N] the distance that counts: the floor above its usual one."""
    floor = np.full(len(machines), floor_of(name, config))
    known = job.usual.get(name, {}) if config.usual_distance else {}
    if known:
        floor += [max(0.0, known.get(machine, 0.0)) for machine in machines]
    return floor


def candidates(one: Trace, theta: F64, floor: F64, *, only_most_unlike: bool) -> Mask:
    """Return [W, N], which machines are candidates in each window.

    Args:
        one: trace of a metric.
        theta: [N], thresholds of the normal score.
        floor: [N], smallest distance above the median machine.
        only_most_unlike: at most one machine a window, the one whose score is highest in units of
            its threshold; of equal ones the first by name.
    """
    over = one.present & (one.scores > theta) & (one.above > floor)
    if not only_most_unlike or not over.size:
        return over
    ratio = np.where(one.present, one.scores / theta, -np.inf)
    best = np.zeros_like(over)
    rows = np.arange(len(best))
    best[rows, ratio.argmax(axis=1)] = True
    return best & over
