"""How unlike its peers each machine is, in each window of one metric.

Source: Minder, arXiv 2411.01791, section 4.4: the sum of a machine's distances to all others, and
its normal score among these sums. Floors, stages and baselines are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from planish.minder.detect.config import DetectConfig
from planish.minder.detect.denoise import WINDOW, Denoiser, windows_of
from planish.minder.detect.frame import F32, F64, I64, Job, Mask
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.preprocess import Prepared

Distance = Literal["euclidean", "manhattan", "chebyshev"]

_BLOCK_WINDOWS = 64
"""Windows that are denoised and compared together."""
_BLOCK_BYTES = 256 << 10
"""Pairwise distances of one block stay in the cache."""


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
        """Take in sums of distances [R, C] of windows and of machines that are compared."""
        here = self.present[cells]
        self.sums[cells] = sums
        self.scores[cells] = normal_scores(sums, here)
        self.above[cells] = distances_above_median(sums, here)


def comparison_groups(machines: Sequence[str], config: DetectConfig, job: Job) -> list[I64]:
    """Return the columns of machines that are compared with each other.

    Pipeline stages stand alone where each of them has at least four machines.
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

    Only as much of a machine's known offset is taken away as it shows: one that loses its offset
    while all wait must not seem unlike for that.
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
    """Return the median of the known numbers of each row; NaN where none is."""
    ordered = np.sort(np.where(known, values, np.inf), axis=1)
    counts = known.sum(axis=1)
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum(counts - 1, 0) // 2]
    high = ordered[rows, counts // 2 % max(1, values.shape[1])]
    return np.where(counts > 0, (low + high) / 2, np.nan).astype(np.float32)


def known_windows(masked: Mask) -> Mask:
    """Return [W, N], machines of which the whole window is known, from [T, N]."""
    return np.asarray(~windows_of(masked).any(axis=2))


def fill_trace(
    trace: Trace,
    which: I64,
    values: F32,
    masked: Mask,
    denoiser: Denoiser,
    groups: Sequence[I64],
    distance: Distance,
) -> float:
    """Denoise and compare the windows `which`, and return the seconds that denoising took.

    Args:
        trace: gets their rows.
        which: windows, ascending.
        values: [T, N] in 0 .. 1.
        masked: [T, N], True where nothing is known.
        denoiser: of the metric.
        groups: columns that are compared with each other.
        distance: between two embeddings.
    """
    windows, unknown = windows_of(values), windows_of(masked)
    machines, seconds = values.shape[1], 0.0
    for start in range(0, len(which), _BLOCK_WINDOWS):
        rows = which[start : start + _BLOCK_WINDOWS]
        trace.present[rows] = ~unknown[rows].any(axis=2)
        block = np.ascontiguousarray(windows[rows]).reshape(-1, WINDOW)
        begun = time.perf_counter()
        embedded = denoiser.embed(block).reshape(len(rows), machines, -1)
        seconds += time.perf_counter() - begun
        for columns in groups:
            cells = np.ix_(rows, columns)
            here = trace.present[cells]
            trace.put(cells, distance_sums(embedded[:, columns], distance, here))
    return seconds


def distance_sums(
    embeddings: F32, distance: Distance = "euclidean", present: Mask | None = None
) -> F32:
    """Return [W, N], the sum of the distances from each machine to all others, of [W, N, d].

    Machines that are not `present` [W, N] are not compared, and have 0. Euclidean distances come
    from products, after the mean over the machines has been taken away: the squares of equal
    machines would cancel badly without.

    Example:
        >>> distance_sums(np.array([[[0.0], [3.0], [4.0]]], np.float32))
        array([[7., 4., 5.]], dtype=float32)
    """
    windows, machines, _ = embeddings.shape
    here = np.ones((windows, machines), np.float32)
    if present is not None:
        here = present.astype(np.float32)
    sums = np.empty((windows, machines), np.float32)
    if distance == "euclidean":
        left, right = _factors(embeddings, here)
    rows = max(1, min(machines, _BLOCK_BYTES // (4 * machines)))
    pairs = np.empty((rows, machines), np.float32)
    for window in range(windows):
        for start in range(0, machines, rows):
            stop = min(machines, start + rows)
            block = pairs[: stop - start]
            if distance == "euclidean":
                np.matmul(left[window, start:stop], right[window], out=block)
                np.maximum(block, 0.0, out=block)
                # Rounding must not give a machine a distance from itself.
                block[np.arange(stop - start), np.arange(start, stop)] = 0.0
                np.sqrt(block, out=block)
            else:
                _grid_distances(embeddings[window], start, distance, block)
            np.matmul(block, here[window], out=sums[window, start:stop])
    sums *= here
    return sums


def _factors(x: F32, here: F32) -> tuple[F32, F32]:
    """Return [W, N, d + 2] and [W, d + 2, N] whose products are the squared distances."""
    weight = here[..., None]
    x = x - (x * weight).sum(1, keepdims=True) / np.maximum(weight.sum(1, keepdims=True), 1)
    x = (x * weight).astype(np.float32)
    squares = np.einsum("wnd,wnd->wn", x, x)[..., None]
    ones = np.ones_like(squares)
    left = np.concatenate([-2 * x, squares, ones], axis=2)
    right = np.concatenate([x, ones, squares], axis=2).transpose(0, 2, 1)
    return left, np.ascontiguousarray(right)


def _grid_distances(x: F32, start: int, distance: Distance, out: F32) -> None:
    """Write the distances of some machines from all others, one coordinate at a time."""
    out[:] = 0.0
    for place in range(x.shape[1]):
        gap = np.abs(x[start : start + len(out), None, place] - x[None, :, place])
        if distance == "manhattan":
            out += gap
        else:
            np.maximum(out, gap, out=out)


def normal_scores(sums: F32, present: Mask | None = None) -> F32:
    """Return how many standard deviations each machine's sum [W, N] lies above the mean of all.

    It is 0 in windows whose machines are all alike, and for machines that are not `present`.
    """
    exact = sums.astype(np.float64)
    here = np.ones(sums.shape, bool) if present is None else present
    count = np.maximum(here.sum(axis=1, keepdims=True), 1)
    mean = (exact * here).sum(axis=1, keepdims=True) / count
    centred = np.where(here, exact - mean, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    # Sums that differ by rounding alone are equal.
    alike = deviation <= 1e-6 * np.maximum(mean, 1e-12)
    scores = np.divide(centred, deviation, out=np.zeros_like(centred), where=~alike)
    result: F32 = scores.astype(np.float32)
    return result


def distances_above_median(sums: F32, here: Mask) -> F32:
    """Return each machine's sum [W, N] above the median one, in the unit of the normalised metric.

    That is per peer, and per root of the samples of a window. Machines `here` count.
    """
    if here.all():
        median = np.median(sums, axis=1, keepdims=True)
    else:
        # A window of which nothing is known has no median, and needs none.
        known = here | ~here.any(axis=1, keepdims=True)
        median = np.nanmedian(np.where(known, sums, np.nan), axis=1, keepdims=True)
    count = here.sum(axis=1, keepdims=True)
    peers = np.maximum(count - 1, 1) * np.float32(np.sqrt(WINDOW))
    return np.where(here, (sums - median) / peers, 0.0).astype(np.float32)


def threshold(theta: float, kappa: float | None, machines: int) -> float:
    """Return the score above which a machine of a job with N is a candidate.

    No score exceeds sqrt(N - 1), so a fixed theta could never fire in a small job.

    Example:
        >>> round(threshold(2.0, 0.9, 4), 3), threshold(2.0, 0.9, 64)
        (1.559, 2.0)
    """
    if kappa is None:
        return theta
    return min(theta, kappa * math.sqrt(machines - 1))


def thresholds(config: DetectConfig, groups: Sequence[I64], gone: Mask) -> F64:
    """Return [N] the thresholds of machines, each by the number of its group that is not `gone`."""
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


def activity(name: str, prepared: Prepared) -> F64:
    """Return [W], what the machines do in a metric as a share of what they mostly do, at most 1."""
    if name not in prepared.values:
        return np.ones(max(0, prepared.frame.num_seconds - WINDOW + 1))
    median = fleet_median(prepared.values[name], prepared.masked[name])
    level = windows_of(median[:, None])[:, 0].mean(axis=1, dtype=np.float64)
    usual = np.quantile(level, 0.75) if len(level) else 0.0
    return np.minimum(1.0, level / usual) if usual > 0 else np.ones(len(level))


def floors_of(
    name: str, machines: Sequence[str], share: F64, config: DetectConfig, job: Job
) -> F64:
    """Return for each window and machine [W, N] the distance that counts.

    It is the floor above the machine's usual distance, or above what its role may be as long as
    that is not known. GPUs at rest differ less, as `share` [W], the metric's `activity`, tells.
    """
    if name not in METRICS or not METRICS[name].is_gpu:
        share = np.ones_like(share)
    usual = job.usual.get(name, {}) if config.usual_distance else {}
    unknown = set(job.unknown.get(name, ()))
    lift = np.array([0.0 if m in unknown else max(0.0, usual.get(m, 0.0)) for m in machines])
    roles = np.array([config.role_distance(name) if m in unknown else 0.0 for m in machines])
    floors: F64 = floor_of(name, config) + lift + share[:, None] * roles
    return floors


def candidates(trace: Trace, theta: F64, floor: F64, *, only_most_unlike: bool) -> Mask:
    """Return [W, N], which machines are candidates in each window.

    Their normal score lies above `theta` [N] and their distance above `floor` [W, N]. With
    `only_most_unlike` it is at most one a window, with the highest score in units of its threshold;
    of equal ones the first by name.
    """
    over = trace.present & (trace.scores > theta) & (trace.above > floor)
    if not only_most_unlike or not over.size:
        return over
    ratio = np.where(trace.present, trace.scores / theta, -np.inf)
    best = np.zeros_like(over)
    rows = np.arange(len(best))
    best[rows, ratio.argmax(axis=1)] = True
    return best & over


def without(trace: Trace, gone: Mask, groups: Sequence[I64]) -> Trace:
    """Return a trace in which some machines [N] no longer weigh in the others' scores."""
    if not gone.any():
        return trace
    result = Trace.empty(*trace.sums.shape)
    result.sums[:], result.present[:] = trace.sums, trace.present & ~gone
    for columns in groups:
        result.put((slice(None), columns), trace.sums[:, columns])
    return result
