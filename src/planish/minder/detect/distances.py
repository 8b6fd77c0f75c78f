"""Distances: how unlike its peers each machine is, in each window of one metric.

Source: Minder, arXiv 2411.01791, section 4.4. A machine's sum is the sum of its distances to all
others; its normal score is the z-score of that sum among all machines. Floors, stages and baselines
are ours.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planish.minder.detect.config import DetectConfig
from planish.minder.detect.denoise import WINDOW, Denoiser, T, windows_of
from planish.minder.detect.frame import F32, F64, I64, Job, Mask
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.preprocess import Prepared

MAX_MASKED_SHARE = 0.2
"""Share of masked machines above which a window neither counts nor ends a run."""
_DEFAULT_FLOOR = 0.05
"""Floor of metrics that `floors` does not name."""
_BLOCK_WINDOWS = 64
"""Windows that are denoised and compared as one batch."""
_CENTRES = 3
"""Iterations that estimate a group's median and the shares of the offsets that machines show."""
_LEAST_SHOWN = 0.5
_TINY = 1e-3
"""Smallest offset by which a share of it is divided."""
_BLOCK_BYTES = 256 << 10
"""Memory of one block of pairwise distances, which stays in the cache."""


@dataclass
class Trace:
    """Distances and scores of one metric; row w is the window that begins at second w of the
    frame.
    """

    sums: F32
    """[W, N], sum of the distances to the peers with which each machine is compared."""
    scores: F32
    """[W, N], normal scores."""
    above: F32
    """[W, N], distance above the median machine, in normalised units."""
    present: Mask
    """[W, N], True where every second of the machine's window is known."""
    embedded: F32
    """[W, N, d], the compared vectors."""

    @classmethod
    def empty(cls, present: Mask, width: int) -> Trace:
        """Return a trace of zeros; `width` is d."""
        numbers = np.zeros((3, *present.shape), np.float32)
        embedded = np.zeros((*present.shape, width), np.float32)
        return cls(numbers[0], numbers[1], numbers[2], present, embedded)

    def put(self, cells: Any, sums: F32) -> None:
        """Store sums of distances [R, C] at `cells` (rows of windows, columns of one group) with
        the scores that follow.
        """
        here = self.present[cells]
        self.sums[cells] = sums
        self.scores[cells] = normal_scores(sums, here)
        self.above[cells] = distances_above_median(sums, here)


def comparison_groups(machines: Sequence[str], config: DetectConfig, job: Job) -> list[I64]:
    """Return the groups of machines that are compared with each other, as column numbers.

    Each pipeline stage is a group if all stages have enough machines. Otherwise there is one
    group.
    """
    everything = np.arange(len(machines))
    if not (config.compare_within_stage and job.stages):
        return [everything]
    stages = [job.stages.get(name, "") for name in machines]
    groups = [np.flatnonzero([s == stage for s in stages]) for stage in sorted(set(stages))]
    if len(groups) < 2 or min(map(len, groups)) < fewest_of_group(config):
        return [everything]
    return groups


def fewest_of_group(config: DetectConfig) -> int:
    """Return the smallest number of machines of a group."""
    return max(4, config.min_machines)


def compared_values(
    prepared: Prepared, name: str, config: DetectConfig, job: Job, groups: Sequence[I64]
) -> F32:
    """Return the compared values [T, N]: the metric without the known offsets of healthy machines.

    Only the part of an offset that the machine shows is subtracted. A machine whose offset vanishes
    while all machines wait would otherwise seem unlike.
    """
    values = prepared.values[name]
    known = job.baseline.get(name, {}) if config.role_baseline else {}
    mine = np.array([known.get(m, 0.0) for m in prepared.frame.machines], np.float32)
    if not mine.any():
        return values
    # The offset of a GPU vanishes when its work stops; the offset of a host may not.
    sure = () if METRICS[name].is_gpu else job.mature
    is_sure = np.array([m in sure for m in prepared.frame.machines])
    compared = values.copy()
    for columns in groups:
        masked = of_group(prepared.masked[name], columns)
        compared[:, columns] -= shown_offsets(
            of_group(values, columns), masked, mine[columns], is_sure[columns]
        )
    return compared


def shown_offsets(values: F32, masked: Mask, known: F32, is_sure: Mask) -> F32:
    """Return [T, N], the part of its known offset [N] that each machine of a group shows.

    Offsets are measured from the median of the values without them. A plain median would move when
    a machine changes to its other side. Where `is_sure` [N], a machine's share is at least half of
    the median share, so that a machine that alone loses its offset does not hide it.
    """
    weight, sign = np.where(masked, 0, np.abs(known)), np.sign(known)
    share = np.zeros((len(values), 1), np.float32)
    for _ in range(_CENTRES):
        centre = fleet_median(values - share * known, masked)
        shown = np.clip((values - centre[:, None]) * sign, 0, weight)
        shares = shown / np.maximum(weight, _TINY)
        share = np.nan_to_num(median_of_known(shares, weight > _TINY))[:, None]
    shown = np.maximum(shown, _LEAST_SHOWN * share * weight * is_sure)
    offsets: F32 = (shown * sign).astype(np.float32)
    return offsets


def away_from_peers(values: F32, masked: Mask, groups: Sequence[I64]) -> F32:
    """Return [T, N], the distance of each machine above the median of its group."""
    if len(groups) == 1:
        return values - fleet_median(values, masked)[:, None]
    away = values.copy()
    for columns in groups:
        away[:, columns] -= fleet_median(values[:, columns], masked[:, columns])[:, None]
    return away


def of_group(values: NDArray[T], columns: I64) -> NDArray[T]:
    """Return the columns of a group; the array itself if the group has all machines."""
    return values if len(columns) == values.shape[1] else values[:, columns]


def fleet_median(values: F32, masked: Mask) -> F32:
    """Return [T], the median over the known machines; 0 where no machine is known."""
    return np.nan_to_num(median_of_known(values, ~masked))


def median_of_known(values: F32, known: Mask) -> F32:
    """Return the median of the known numbers of each row; NaN where no number is known."""
    ordered = np.sort(np.where(known, values, np.inf), axis=1)
    counts = known.sum(axis=1)
    rows = np.arange(len(values))
    low = ordered[rows, np.maximum(counts - 1, 0) // 2]
    high = ordered[rows, counts // 2 % max(1, values.shape[1])]
    return np.where(counts > 0, (low + high) / 2, np.nan).astype(np.float32)


def fill_trace(
    trace: Trace,
    touched: Mask,
    values: F32,
    denoiser: Denoiser,
    groups: Sequence[I64],
    config: DetectConfig,
) -> float:
    """Denoise the windows that are `touched`, compare them with those of the same second, and store
    both in the trace. Return the seconds that denoising took.

    Args:
        trace: gets the new rows; its `present` says which machines are known.
        touched: [W, N], True for windows that have changed.
        values: [T, N] in 0 .. 1.
        denoiser: denoiser of the metric.
        groups: machines that are compared with each other, as column numbers.
        config: distance between two embeddings, and the number of peers.
    """
    windows, seconds = windows_of(values), 0.0
    which = np.flatnonzero(touched.any(axis=1))
    for start in range(0, len(which), _BLOCK_WINDOWS):
        rows = which[start : start + _BLOCK_WINDOWS]
        block, changed, embedded = windows[rows], touched[rows], trace.embedded[rows]
        begun = time.perf_counter()
        if changed.all():
            embedded = denoiser.embed(block.reshape(-1, WINDOW)).reshape(embedded.shape)
        else:
            embedded[changed] = denoiser.embed(block[changed])
        seconds += time.perf_counter() - begun
        trace.embedded[rows] = embedded
        for columns in groups:
            cells = np.ix_(rows, columns)
            here, peers = trace.present[cells], peers_of(len(columns), config)
            group = of_group(embedded, columns)
            trace.put(cells, distance_sums(group, here, peers))
    return seconds


def peers_of(machines: int, config: DetectConfig) -> I64:
    """Return the places of the peers with which each machine of a group is compared, evenly
    spaced.
    """
    count = min(machines, config.max_peers or machines)
    return np.linspace(0, machines - 1, count).round().astype(np.int64)


def distance_sums(embeddings: F32, present: Mask | None = None, peers: I64 | None = None) -> F32:
    """Return [W, N], the sum of the distances from each machine to all others, of [W, N, d].

    Machines that are not `present` [W, N] are left out and have sum 0. If `peers` are given, the
    mean distance to the peers replaces the mean distance to all machines. Euclidean distances are
    computed from products of the centred vectors: without centring, the squares of equal vectors
    would cancel badly.

    Example:
        >>> distance_sums(np.array([[[0.0], [3.0], [4.0]]], np.float32))
        array([[7., 4., 5.]], dtype=float32)
    """
    windows, machines, _ = embeddings.shape
    here = np.ones((windows, machines), np.float32)
    if present is not None:
        here = present.astype(np.float32)
    chosen = np.arange(machines) if peers is None else peers
    weights = here[:, chosen]
    sums = np.empty((windows, machines), np.float32)
    left, right = _factors(embeddings, here, chosen)
    rows = max(1, min(machines, _BLOCK_BYTES // (4 * len(chosen))))
    span = max(1, _BLOCK_BYTES // (4 * len(chosen) * rows))
    for first in range(0, windows, span):
        some = slice(first, first + span)
        for start in range(0, machines, rows):
            mine = slice(start, start + rows)
            block = np.matmul(left[some, mine], right[some])
            np.maximum(block, 0.0, out=block)
            # Rounding must not give a machine a distance to itself.
            own = np.flatnonzero((chosen >= start) & (chosen < start + rows))
            block[:, chosen[own] - start, own] = 0.0
            np.sqrt(block, out=block)
            sums[some, mine] = np.matmul(block, weights[some, :, None])[..., 0]
    # The sum over the peers is scaled to a sum over all machines but itself.
    seen = weights.sum(axis=1, keepdims=True) - np.isin(np.arange(machines), chosen) * here
    sums *= here * (here.sum(axis=1, keepdims=True) - 1) / np.maximum(seen, 1)
    return sums


def _factors(x: F32, here: F32, peers: I64) -> tuple[F32, F32]:
    """Return left [W, N, d + 2] and right [W, d + 2, P], whose product is the squared distances."""
    weight = here[..., None]
    width = x.shape[2]
    centre = np.matmul(here[:, None], x) / np.maximum(weight.sum(1, keepdims=True), 1)
    left = np.ones((*x.shape[:2], width + 2), np.float32)
    x = np.subtract(x, centre, out=left[..., :width])
    x *= weight
    squares = np.einsum("wnd,wnd->wn", x, x)
    left[..., width] = squares
    right = np.empty((len(x), width + 2, len(peers)), np.float32)
    np.multiply(x[:, peers].transpose(0, 2, 1), -2, out=right[:, :width])
    right[:, width] = 1.0
    right[:, width + 1] = squares[:, peers]
    return left, right


def normal_scores(sums: F32, present: Mask | None = None) -> F32:
    """Return [W, N], how many standard deviations each machine's sum lies above the mean of all.

    The score is 0 in windows whose machines are all alike, and for machines that are not
    `present`.
    """
    exact = sums.astype(np.float64)
    here = np.ones(sums.shape, bool) if present is None else present
    count = np.maximum(here.sum(axis=1, keepdims=True), 1)
    mean = (exact * here).sum(axis=1, keepdims=True) / count
    centred = np.where(here, exact - mean, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    # Sums that differ only by rounding are equal.
    alike = deviation <= 1e-6 * np.maximum(mean, 1e-12)
    scores = np.divide(centred, deviation, out=np.zeros_like(centred), where=~alike)
    result: F32 = scores.astype(np.float32)
    return result


def distances_above_median(sums: F32, here: Mask) -> F32:
    """Return [W, N], the distance of each machine's sum above the median sum, in normalised units.

    The difference is divided by the number of peers and by the root of the window's length. Only
    machines in `here` count.
    """
    median = np.nan_to_num(median_of_known(sums, here))[:, None]
    count = here.sum(axis=1, keepdims=True)
    peers = np.maximum(count - 1, 1) * np.float32(np.sqrt(WINDOW))
    return np.where(here, (sums - median) / peers, 0.0).astype(np.float32)


def threshold(theta: float, kappa: float | None, machines: int) -> float:
    """Return the normal score above which a machine of a job with N machines is a candidate.

    No score exceeds sqrt(N - 1), so a fixed theta could never be reached in a small job.

    Example:
        >>> round(threshold(2.0, 0.9, 4), 3), threshold(2.0, 0.9, 64)
        (1.559, 2.0)
    """
    if kappa is None:
        return theta
    return min(theta, kappa * math.sqrt(machines - 1))


def thresholds(config: DetectConfig, groups: Sequence[I64], gone: Mask) -> F64:
    """Return [N], the threshold of each machine, from the number of machines in its group without
    those that are `gone`.
    """
    result = np.full(len(gone), np.inf)
    for columns in groups:
        count = int((~gone[columns]).sum())
        if count > 1:
            result[columns] = threshold(config.theta, config.kappa, count)
    return result


def floor_of(name: str, config: DetectConfig) -> float:
    """Return the smallest distance above the median that counts; -inf if floors are off."""
    if config.floors is None:
        return -np.inf
    return config.floors.get(METRICS[name].name, _DEFAULT_FLOOR)


def activity(name: str, prepared: Prepared, config: DetectConfig) -> F64:
    """Return [W], the fleet's level in a metric as a share of its usual level, at most 1.

    The usual level is the 75 % quantile over the windows. In a large job the peers of `peers_of`
    represent all machines.
    """
    some = peers_of(prepared.frame.num_machines, config)
    median = fleet_median(prepared.values[name][:, some], prepared.masked[name][:, some])
    level = windows_of(median[:, None])[:, 0].mean(axis=1, dtype=np.float64)
    usual = np.quantile(level, 0.75) if len(level) else 0.0
    return np.minimum(1.0, level / usual) if usual > 0 else np.ones(len(level))


def floors_of(
    name: str, machines: Sequence[str], share: F64, config: DetectConfig, job: Job
) -> F64:
    """Return [W, N], the smallest distance that counts for each window and machine.

    It is the metric's floor plus the machine's usual distance; while its role is unknown, plus the
    distance that a role may have. GPUs at rest differ less, so that distance is scaled by `share`
    [W], the metric's `activity`.
    """
    if not METRICS[name].is_gpu:
        share = np.ones_like(share)
    unknown = set(job.unknown.get(name, ()))
    # A machine that is too far away for a role is judged without waiting for its role.
    open_ = unknown - set(job.refused.get(name, ()))
    usual = job.usual.get(name, {}) if config.usual_distance else {}
    lift = np.array([0.0 if m in unknown else max(0.0, usual.get(m, 0.0)) for m in machines])
    roles = np.array([config.role_distance(name) if m in open_ else 0.0 for m in machines])
    least = floor_of(name, config) + lift
    if not roles.any():
        return np.broadcast_to(least, (len(share), len(least)))
    floors: F64 = least + share[:, None] * roles
    return floors


def candidates(trace: Trace, theta: F64, far: Mask, *, only_most_unlike: bool) -> Mask:
    """Return [W, N], True where a machine is a candidate.

    A candidate is `far` [W, N] and has a normal score above `theta` [N]. With `only_most_unlike`,
    each window has at most one candidate: the machine with the highest score in units of its
    threshold; among equal scores, the first by name.
    """
    over: Mask = far & (trace.scores > theta)
    if not only_most_unlike or not over.size:
        return over
    ratio = np.where(trace.present, trace.scores / theta, -np.inf)
    best = np.zeros_like(over)
    rows = np.arange(len(best))
    best[rows, ratio.argmax(axis=1)] = True
    return best & over


def without(trace: Trace, gone: Mask, groups: Sequence[I64]) -> Trace:
    """Return a trace in which the machines `gone` [N] have no influence on the scores of the
    others.
    """
    if not gone.any():
        return trace
    result = Trace.empty(trace.present & ~gone, 0)
    result.sums[:] = trace.sums
    for columns in groups:
        result.put((slice(None), columns), trace.sums[:, columns])
    return result
