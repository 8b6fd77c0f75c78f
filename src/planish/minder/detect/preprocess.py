"""Preprocessing: fill short gaps, scale values to 0 .. 1, decide which metrics are usable.

Source: Minder, arXiv 2411.01791, section 4.1 (nearest padding, min-max by the limits of the
metric). Limits on gaps, usability and silence are ours.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.frame import COARSE_SECONDS, COARSEST_SECONDS, F32, F64, I64, Frame, Mask
from planish.minder.detect.metrics_table import METRICS, Metric, columns_of

MIN_KNOWN_SHARE = 0.9
"""Share of seconds that must be known, after filling short gaps, before a metric is used."""
_MIN_MACHINE_SHARE = 0.8
"""Share of the machines for which `MIN_KNOWN_SHARE` must hold; never fewer than four machines."""
OUTAGE_SHARE = 0.2
"""Share of silent machines above which the telemetry is taken to have failed."""
_STEP = 1.1
"""Base of the powers by which limits are widened; limits that are too narrow by less stay."""
_TOP_QUANTILE = 0.99
"""Quantile of a machine's samples above which values may be glitches."""
_FEWEST_CHANGES = 4
"""Fewest changes of a machine's samples from which their spacing is computed."""
_ADJACENT_SHARE = 0.1
"""Share of changes in consecutive seconds from which samples are taken to come every second."""
_DEAD_SHARE = 0.35
"""Share of its earlier activity below which a job has lost machines."""
_FRESH_ROWS = 10
"""Seconds after its last sample for which a machine is taken to still send; a silent machine does
not count as standing still."""

Limits = Mapping[str, tuple[float, float]]
"""Map from metric to the transformed values that scale to 0 and 1."""


@dataclass(frozen=True)
class Prepared:
    """Preprocessed metrics: the input of the detector."""

    frame: Frame
    values: dict[str, F32]
    """Map from usable metric to values [T, N] in 0 .. 1; 0 where `masked`."""
    masked: dict[str, Mask]
    """Usable metric to [T, N], True where nothing is known even after filling."""
    skipped: dict[str, str]
    """Map from unusable metric to the reason: absent, missing, flat, coarse or limits."""
    clipped: dict[str, float]
    """Map from usable metric to the share of values outside its limits before they are widened."""
    broken: dict[str, tuple[str, ...]]
    """Map from metric to machines whose exporter is broken: it sends 0, or repeats its values."""
    intervals: dict[str, F64]
    """Usable metric to [N], seconds from one distinct sample of a machine to the next."""
    silent_seconds: F64
    """[N], seconds from each machine's last sample of any metric to the end of the frame."""
    frozen: tuple[str, ...] = ()
    """Machines with an exporter that repeats its values."""
    known: dict[str, float] = field(default_factory=dict)
    """Map from metric to its `known_share`, for metrics that were skipped as missing or coarse."""


def prepare(
    frame: Frame,
    config: MinderConfig,
    limits: Limits,
    *,
    board: str = "",
    scales: Mapping[str, float] | None = None,
) -> Prepared:
    """Return the preprocessed metrics of `detect.metrics` for the frame of one job.

    `limits` are the fitted limits of metrics that have no fixed ones. `scales` maps a metric to the
    factor by which its limits are widened for this job.
    """
    rules = config.preprocess
    broken = broken_exporters(frame) if rules.mask_broken_exporter else {}
    frozen = frozen_exporters(frame, rules.frozen_after_seconds)
    still = tuple(sorted({name for machines in frozen.values() for name in machines}))
    ready = Prepared(frame, {}, {}, {}, {}, broken, {}, silent_seconds(frame), still)
    for name in columns_of(config.detect.metrics, frame.values):
        if name not in frame.values:
            ready.skipped[name] = "absent"
            continue
        real = frame.mask[name].copy()
        real[:, [frame.machines.index(m) for m in broken.get(name, ())]] = False
        for machine, first in frozen.get(name, {}).items():
            real[first:, frame.machines.index(machine)] = False
        filled, unknown = fill(frame.values[name], real, rules.max_gap_seconds)
        reason = unusable(frame.values[name], real, unknown)
        bounds = limits_of(METRICS[name], config, limits, board)
        if not reason and (bounds is None or bounds[0] >= bounds[1]):
            reason = "limits"
        if reason:
            ready.skipped[name] = reason
            if reason in ("missing", "coarse"):
                ready.known[name] = known_share(unknown)
            continue
        assert bounds is not None
        intervals = np.maximum(sample_intervals(filled, unknown), frame.held.get(name, 1.0))
        ready.intervals[name] = intervals
        if config.detect.gap_tolerance and METRICS[name].kind == "gauge":
            filled = steadied(filled, unknown, intervals)
        for machine, first in frozen.get(name, {}).items():
            unknown[first:, frame.machines.index(machine)] = True
        scaled = transformed(filled, METRICS[name])
        scaled = (scaled - np.float32(bounds[0])) / np.float32(bounds[1] - bounds[0])
        is_known = ~unknown
        beyond = is_known & ((scaled < 0) | (scaled > 1))
        ready.clipped[name] = float(beyond.sum() / max(1, is_known.sum()))
        scaled = np.clip(scaled / np.float32((scales or {}).get(METRICS[name].name, 1.0)), 0.0, 1.0)
        scaled[unknown] = 0.0
        ready.values[name], ready.masked[name] = scaled.astype(np.float32), unknown
    for name, machines in frozen.items():
        broken[name] = tuple(sorted({*broken.get(name, ()), *machines}))
    return ready


def limits_of(
    metric: Metric, config: MinderConfig, fitted: Limits, board: str = ""
) -> tuple[float, float] | None:
    """Return the transformed values that scale to 0 and 1; None if they are not known.

    The limits are those of the board; without these, those of the site, of the metric, or of the
    models, in this order.
    """
    site = config.site_limits(metric.name, board)
    if site is not None:
        low, high = transformed(np.array(site, np.float32), metric).tolist()
        return low, high
    return metric.limits or fitted.get(metric.name)


def needed_scale(
    frame: Frame, metric: Metric, limits: tuple[float, float], known: float = 1.0
) -> float:
    """Return the factor by which the limits of a job must be widened: a power of 1.1, at least 1.

    Limits are widened if most machines exceed them clearly in more than one second of a hundred.
    Such machines have other hardware and are not faulty. `known` is the factor of the last call.
    """
    low, high = limits
    values, real = frame.values[metric.name], frame.mask[metric.name]
    top = low + (high - low) * known * _STEP
    raw_top = np.expm1(top) if metric.transform == "log1p" else top
    counts = real.sum(axis=0)
    beyond = (real & (values > np.float32(raw_top))).sum(axis=0)
    heard = counts > 0
    if 2 * np.count_nonzero(beyond > (1 - _TOP_QUANTILE) * counts) <= np.count_nonzero(heard):
        return known
    seen = np.where(real, transformed(values, metric), np.nan)[:, heard]
    reached = float(np.median(np.nanquantile(seen, _TOP_QUANTILE, axis=0)))
    steps = math.ceil(math.log((reached - low) / (high - low)) / math.log(_STEP))
    return max(known, round(_STEP**steps, 4))


def transformed(values: F32, metric: Metric) -> F32:
    """Return values on the scale on which limits are defined."""
    if metric.transform == "log1p":
        return np.log1p(np.maximum(values, 0.0)).astype(np.float32)
    return values.astype(np.float32)


def fill(values: F32, real: Mask, max_gap_seconds: int) -> tuple[F32, Mask]:
    """Fill each gap with the nearest sample of the same machine; of equally near samples, the
    earlier.

    Gaps of more than `max_gap_seconds` stay; 0 fills every gap. A gap at the border of the frame is
    measured from the border.

    Returns:
        The filled values [T, N], and a mask that is True where nothing is known.
    """
    count = len(values)
    filled = values.astype(np.float32)
    unknown = np.zeros(values.shape, bool)
    # Machines are laid out one after the other, so a gap's neighbours are adjacent in `known`.
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


def sample_intervals(values: F32, unknown: Mask) -> F64:
    """Return [N], the seconds from one distinct sample of each machine to the next.

    A server repeats a sample until the next one comes, so timestamps do not show the spacing;
    changes of the value do. A machine whose samples hardly change gets the median spacing of the
    others. `values` [T, N] have their gaps filled; `unknown` is True where nothing is known.
    """
    changed = (values[1:] != values[:-1]) & ~(unknown[1:] | unknown[:-1])
    counts = changed.sum(axis=0)
    adjacent = (changed[1:] & changed[:-1]).sum(axis=0)
    result = np.where(adjacent >= _ADJACENT_SHARE * counts, 1.0, np.nan)
    result[counts < _FEWEST_CHANGES] = np.nan
    for place in np.flatnonzero(np.isnan(result) & (counts >= _FEWEST_CHANGES)).tolist():
        result[place] = np.quantile(np.diff(np.flatnonzero(changed[:, place])), 0.25)
    known = result[np.isfinite(result)]
    usual = float(np.median(known)) if len(known) else 1.0
    return np.minimum(np.where(np.isfinite(result), result, usual), COARSEST_SECONDS)


def steadied(values: F32, unknown: Mask, intervals: F64) -> F32:
    """Return values [T, N] in which each slow sample is the median of itself and its two
    neighbours.

    A window of a repeated sample is a single sample, which may fall on the edge of an iteration. A
    median of three does not shorten a lasting change. Counters need no smoothing, since their rate
    is a mean since the last sample. `intervals` [N] are the seconds between samples.
    """
    result = values.copy()
    rows = np.arange(len(values))
    for place in np.flatnonzero(intervals > COARSE_SECONDS).tolist():
        step, column, gone = round(intervals[place]), values[:, place], unknown[:, place]
        beside = []
        for there in (rows - step, rows + step):
            there = np.where((there < 0) | (there >= len(values)), rows, there)
            beside.append(column[np.where(gone[there], rows, there)])
        result[:, place] = np.median(np.stack([column, *beside]), axis=0)
    return result


def known_share(unknown: Mask) -> float:
    """Return the share of known seconds that every one of the required machines reaches.

    The required machines are the `_MIN_MACHINE_SHARE` with the most known seconds. `unknown` is [T,
    N], True where nothing is known even after filling.
    """
    shares = np.sort((~unknown).mean(axis=0))[::-1]
    enough = max(4, int(np.ceil(_MIN_MACHINE_SHARE * len(shares))))
    return float(shares[:enough].min(initial=1.0))


def unusable(values: F32, real: Mask, unknown: Mask) -> str:
    """Return why a metric [T, N] can not be used in this frame; empty if it can."""
    if not real.any():
        return "missing"
    if known_share(unknown) < MIN_KNOWN_SHARE:
        seconds = next((np.flatnonzero(column) for column in real.T if column.sum() > 2), ())
        # Coarse samples come regularly, but less often than every two seconds.
        return "coarse" if len(seconds) and np.median(np.diff(seconds)) > 2 else "missing"
    seen = values[real]
    return "flat" if seen.min() == seen.max() else ""


def broken_exporters(frame: Frame) -> dict[str, tuple[str, ...]]:
    """Return GPU metrics that are 0 on one machine only while another GPU metric of it changes."""
    gpu = [name for name in frame.values if name in METRICS and METRICS[name].is_gpu]
    broken: dict[str, tuple[str, ...]] = {}
    moves = {}
    for name in gpu:
        values, real = frame.values[name], frame.mask[name]
        low = np.where(real, values, np.inf).min(axis=0, initial=np.inf)
        moves[name] = np.where(real, values, -np.inf).max(axis=0, initial=-np.inf) > low
    for name in gpu:
        values, real = frame.values[name], frame.mask[name]
        zero = real.any(axis=0) & ~((values != 0) & real).any(axis=0)
        others = [moves[other] for other in gpu if other != name]
        if zero.sum() == 1 and others and np.logical_or.reduce(others)[zero].all():
            broken[name] = (frame.machines[int(np.flatnonzero(zero)[0])],)
    return broken


def frozen_exporters(frame: Frame, after_seconds: int) -> dict[str, dict[str, int]]:
    """Return exporters that repeat their values while those of peers change.

    All metrics of an exporter must have stood still for more than `after_seconds` until the end of
    the frame. One of them must be a value that does not stand still on a working machine: a gauge
    between 0 and its upper limit, or `cpu_usage`. Idle GPUs do not match, since their power
    changes. If hardly any machine's values change, all exporters are frozen after three times as
    long, if their values lie strictly inside their earlier range.

    Returns:
        Metric to machine to the first row that stands still.
    """
    frozen: dict[str, dict[str, int]] = {}
    if not after_seconds or frame.num_seconds <= after_seconds:
        return frozen
    for is_gpu in (False, True):
        names = [
            name for name in frame.values if name in METRICS and METRICS[name].is_gpu == is_gpu
        ]
        still = {name: still_since(frame.values[name], frame.mask[name]) for name in names}
        if not still:
            continue
        needed = frame.num_seconds - after_seconds
        since = np.max(np.stack(list(still.values())), axis=0)
        moving = [name for name in names if 2 * (still[name] >= needed).sum() > frame.num_machines]
        if not moving:
            needed -= 2 * after_seconds
        alive = np.zeros(frame.num_machines, bool)
        for name in moving or names:
            metric, last = METRICS[name], _last_values(frame.values[name], frame.mask[name])
            top = metric.limits[1] if metric.limits else np.inf
            between = (last > 0) & (last < top) & (metric.kind == "gauge")
            shown = between | (name == "cpu_usage")
            if not moving:
                # Waiting machines stand still as well, but at values outside their earlier range.
                earlier = frame.mask[name] & (np.arange(frame.num_seconds)[:, None] < since)
                low = np.where(earlier, frame.values[name], np.inf).min(axis=0)
                high = np.where(earlier, frame.values[name], -np.inf).max(axis=0)
                shown &= (since == 0) | ((low < last) & (last < high))
            alive |= shown
        for place in np.flatnonzero(alive & (since < needed)).tolist():
            for name in names:
                if frame.mask[name][:, place].any():
                    frozen.setdefault(name, {})[frame.machines[place]] = int(since[place])
    return frozen


def still_since(values: F32, real: Mask) -> I64:
    """Return [N], the first row from which all samples of a machine are equal.

    The row is T for a silent machine, and 0 for a machine without samples.
    """
    count = len(values)
    last = _last_values(values, real)
    differs = real & (values != last)
    first, ends = last_rows(differs) + 1, last_rows(real)
    return np.where((ends >= 0) & (ends < count - _FRESH_ROWS), count, first)


def last_rows(flags: Mask) -> I64:
    """Return [N], the last row of [T, N] in which the flag of a machine is set; -1 for none."""
    counted = np.arange(1, len(flags) + 1, dtype=np.int32)[:, None]
    last: I64 = (flags * counted).max(axis=0, initial=0).astype(np.int64) - 1
    return last


def _last_values(values: F32, real: Mask) -> F32:
    """Return [N], the last sample of each machine; 0 for a machine without samples."""
    ends = last_rows(real)
    picked = values[np.maximum(ends, 0), np.arange(values.shape[1])]
    return np.where(ends >= 0, picked, np.float32(0)).astype(np.float32)


def silent_seconds(frame: Frame) -> F64:
    """Return [N], the seconds from each machine's last sample of any metric to the end of the
    frame.
    """
    last = np.full(frame.num_machines, -1)
    for real in frame.mask.values():
        last = np.maximum(last, last_rows(real))
    return (frame.num_seconds - 1 - last).astype(np.float64)


def are_dead(prepared: Prepared, named: Collection[str], after_seconds: int) -> bool:
    """Return whether many silent machines are dead, rather than their telemetry.

    They are dead if an earlier call has `named` all of them, if they fell silent one after the
    other, or if the other machines have stopped working since.
    """
    frame, silent = prepared.frame, prepared.silent_seconds > after_seconds
    seconds = prepared.silent_seconds[silent]
    if np.isin(frame.machines, list(named))[silent].all():
        return True
    if 2 * silent.sum() > len(silent):
        return False
    if np.ptp(seconds) > after_seconds:
        return True
    last = frame.num_seconds - int(seconds.min())
    for name, values in frame.values.items():
        rest = np.where(frame.mask[name], values, np.nan)[:, ~silent]
        sides = (rest[:last], rest[last:])
        if name in METRICS and METRICS[name].is_gpu and all(np.isfinite(s).any() for s in sides):
            before, after = (float(np.nanmean(side)) for side in sides)
            if after < _DEAD_SHARE * before:
                return True
    return False


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
