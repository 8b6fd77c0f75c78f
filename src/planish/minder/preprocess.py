"""From a frame to numbers between 0 and 1: fill short gaps, scale, say which metrics will do.

Source: Minder, arXiv 2411.01791, section 4.1 (nearest padding, min-max by the limits of the
metric); limits on gaps, usability and silence are ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planish.minder.config import MinderConfig
from planish.minder.frame import F32, F64, Frame, Mask
from planish.minder.metrics_table import METRICS, Metric

Limits = Mapping[str, tuple[float, float]]
"""Metric to the transformed values that become 0 and 1."""


@dataclass(frozen=True)
class Prepared:
    """What detection looks at."""

    frame: Frame
    """As it was measured."""
    values: dict[str, F32]
    """Usable metric to [T, N] in 0 .. 1; 0 where `masked`."""
    masked: dict[str, Mask]
    """[T, N], True where nothing is known even after filling."""
    skipped: dict[str, str]
    """Other metrics to the reason: absent, missing, flat, coarse, limits."""
    clipped: dict[str, float]
    """Share of values beyond the limits."""
    broken: dict[str, tuple[str, ...]]
    """Metric to machines whose exporter says 0 and can not be believed."""
    silent_seconds: F64
    """[N], how long before the end of the frame each machine gave its last sample of anything."""


def prepare(
    frame: Frame, config: MinderConfig, limits: Limits, *, table: Mapping[str, Metric] = METRICS
) -> Prepared:
    """Clean one frame.

    Args:
        frame: of one job.
        config: of the monitor; only metrics of `detect.metrics` are looked at.
        limits: of metrics whose limits are fitted; others have theirs in `table`.
        table: all metrics.
    """
    values: dict[str, F32] = {}
    masked: dict[str, Mask] = {}
    skipped: dict[str, str] = {}
    clipped: dict[str, float] = {}
    broken = _broken_exporters(frame, table) if config.preprocess.mask_broken_exporter else {}
    for name in config.detect.metrics:
        if name not in frame.values:
            skipped[name] = "absent"
            continue
        real = frame.mask[name].copy()
        real[:, [frame.machines.index(m) for m in broken.get(name, ())]] = False
        reason = unusable(frame.values[name], real, config)
        bounds = table[name].limits or limits.get(name)
        if not reason and (bounds is None or bounds[0] >= bounds[1]):
            reason = "limits"
        if reason:
            skipped[name] = reason
            continue
        assert bounds is not None
        filled, unknown = fill(frame.values[name], real, config.preprocess.max_gap_seconds)
        scaled = transformed(filled, table[name])
        scaled = (scaled - np.float32(bounds[0])) / np.float32(bounds[1] - bounds[0])
        known = ~unknown
        beyond = known & ((scaled < 0) | (scaled > 1))
        clipped[name] = float(beyond.sum() / max(1, known.sum()))
        scaled = np.clip(scaled, 0.0, 1.0)
        scaled[unknown] = 0.0
        values[name], masked[name] = scaled.astype(np.float32), unknown
    return Prepared(frame, values, masked, skipped, clipped, broken, silent_seconds(frame))


def transformed(values: F32, metric: Metric) -> F32:
    """Return values on the scale on which limits are measured."""
    if metric.transform == "log1p":
        return np.log1p(np.maximum(values, 0.0)).astype(np.float32)
    return values.astype(np.float32)


def fill(values: F32, real: Mask, max_gap_seconds: int) -> tuple[F32, Mask]:
    """Fill gaps with the sample of the same machine that is nearest in time, ties with the earlier.

    Args:
        values: [T, N].
        real: [T, N], True for real samples.
        max_gap_seconds: longer gaps stay; 0 fills all. A gap at the border of the frame has one
            end only and counts by its length.

    Returns:
        The filled values and a mask that is True where nothing is known.

    Example:
        >>> v = np.array([[1], [0], [0], [4]], np.float32)
        >>> fill(v, v > 0, 30)[0].ravel()
        array([1., 1., 4., 4.], dtype=float32)
    """
    count = len(values)
    filled = values.astype(np.float32)
    unknown = np.zeros(values.shape, bool)
    # Machine after machine, so that the neighbours of a gap stand beside it.
    known = np.flatnonzero(real.T)
    columns, rows = np.nonzero(~real.T)
    if not len(rows):
        return filled, unknown
    if not len(known):
        return filled, ~unknown
    next_known = np.searchsorted(known, columns * count + rows)
    before = known[np.maximum(next_known - 1, 0)] - columns * count
    before[(next_known == 0) | (before < 0)] = -1
    after = known[np.minimum(next_known, len(known) - 1)] - columns * count
    after[(next_known == len(known)) | (after > count)] = count
    to_before = np.where(before >= 0, rows - before, 2 * count)
    to_after = np.where(after < count, after - rows, 2 * count)
    chosen = np.where(to_before <= to_after, before, after)
    filled[rows, columns] = values[np.clip(chosen, 0, count - 1), columns]
    gone = (before < 0) & (after >= count)
    if max_gap_seconds:
        gone |= after - before - 1 > max_gap_seconds
    unknown[rows, columns] = gone
    return filled, unknown


def unusable(values: F32, real: Mask, config: MinderConfig) -> str:
    """Return why a metric can not be used in this frame; empty when it can."""
    rules = config.preprocess
    if not real.any():
        return "missing"
    machines = values.shape[1]
    good = real.mean(axis=0) >= rules.min_real_share
    if good.sum() < min(machines, max(4, int(np.ceil(rules.min_machine_share * machines)))):
        return "coarse" if _is_coarse(real) else "missing"
    seen = values[real]
    return "flat" if seen.min() == seen.max() else ""


def _is_coarse(real: Mask) -> bool:
    """Tell whether samples come regularly, but less often than every two seconds."""
    for column in real.T:
        rows = np.flatnonzero(column)
        if len(rows) > 2:
            return bool(np.median(np.diff(rows)) > 2)
    return False


def _broken_exporters(frame: Frame, table: Mapping[str, Metric]) -> dict[str, tuple[str, ...]]:
    """Find GPU metrics that are 0 on one machine only, while another one of it moves."""
    gpu = [name for name in frame.values if name in table and table[name].is_gpu]
    found: dict[str, tuple[str, ...]] = {}
    moves = {
        name: _spread(frame.values[name], frame.mask[name]) > 0
        for name in gpu
    }  # fmt: skip
    for name in gpu:
        values, real = frame.values[name], frame.mask[name]
        zero = real.any(axis=0) & ~((values != 0) & real).any(axis=0)
        others = [moves[other] for other in gpu if other != name]
        if zero.sum() == 1 and others and np.logical_or.reduce(others)[zero].all():
            found[name] = (frame.machines[int(np.flatnonzero(zero)[0])],)
    return found


def _spread(values: F32, real: Mask) -> F32:
    low = np.where(real, values, np.inf).min(axis=0, initial=np.inf)
    high = np.where(real, values, -np.inf).max(axis=0, initial=-np.inf)
    return np.where(high >= low, high - low, 0.0).astype(np.float32)


def silent_seconds(frame: Frame) -> F64:
    """Return for each machine the seconds since its last sample of any metric."""
    count = frame.num_seconds
    last = np.full(frame.num_machines, -1)
    rows = np.arange(count)[:, None]
    for real in frame.mask.values():
        if count:
            last = np.maximum(last, np.where(real, rows, -1).max(axis=0))
    return (count - 1 - last).astype(np.float64)


def fit_limits(frames: list[Frame], metric: Metric) -> tuple[float, float]:
    """Return the 0.1 % and 99.9 % quantiles of a metric over training frames, transformed."""
    seen = [
        transformed(frame.values[metric.name][frame.mask[metric.name]], metric)
        for frame in frames
        if metric.name in frame.values
    ]
    together = np.concatenate(seen) if seen else np.zeros(1, np.float32)
    low, high = np.quantile(together, [0.001, 0.999])
    # A rate that can be 0 keeps its natural zero.
    return (min(0.0, float(low)) if metric.nonnegative else float(low)), float(high)
