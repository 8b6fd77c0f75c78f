"""From what happens to what is measured: stagger, held and lost samples, skew, disorder."""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from planish.minder.detect.frame import F64, Frame, align
from tests.minder_lab.simulator import noise
from tests.minder_lab.simulator.noise import Values

MAX_STAGGER = 1.6
"""Seconds by which the sampling of two hosts may differ."""


def as_measured(rng: Generator, values: Values, machines: int) -> Values:
    """Add in place all that measured values have beyond what their machines do; return them."""
    streams = rng.spawn(4)
    noise.add_unevenness(streams[0], values, machines)
    noise.add_noise(streams[1], values)
    noise.add_jitter(streams[2], values, machines)
    noise.smooth(values)
    stagger(streams[3], values, machines)
    return values


def stagger(rng: Generator, values: Values, machines: int) -> None:
    """Let each machine show what happened up to 1.6 s ago; some hold values for 2-5 s; in place."""
    seconds = len(next(iter(values.values())))
    late = rng.uniform(0.0, MAX_STAGGER, machines)
    whole, part = np.floor(late).astype(int), (late % 1.0).astype(np.float32)
    rows = np.arange(seconds)[:, None]
    newer, older = np.maximum(rows - whole, 0), np.maximum(rows - whole - 1, 0)
    hold = np.where(rng.random(machines) < 0.1, rng.integers(2, 6, machines), 1)
    held = rows // hold * hold
    slow = bool((hold > 1).any())
    for array in values.values():
        moved = (1 - part) * np.take_along_axis(array, newer, 0)
        moved += part * np.take_along_axis(array, older, 0)
        array[:] = np.take_along_axis(moved, held, 0) if slow else moved


def lost(rng: Generator, seconds: int, machines: int) -> NDArray[np.bool_]:
    """Return [T, N], samples that never arrive: 0.4-1 % one by one, and gaps of 3-25 s."""
    gone: NDArray[np.bool_] = rng.random((seconds, machines)) < rng.uniform(0.004, 0.01)
    for _ in range(int(rng.poisson(machines * seconds / 3600))):
        start, machine = int(rng.integers(seconds)), int(rng.integers(machines))
        gone[start : start + int(rng.integers(3, 26)), machine] = True
    return gone


def sent(
    rng: Generator, start: int, values: Values, gone: dict[str, NDArray[np.bool_]]
) -> dict[str, list[tuple[F64, F64]]]:
    """Return for each metric and machine the samples in the order in which they arrive.

    Clocks are off (standard deviation 0.25 s), 0.2 % of the samples come twice and 0.5 % late.
    """
    seconds, machines = next(iter(values.values())).shape
    skew = rng.normal(0.0, 0.25, machines)
    ts = start + np.arange(seconds)[:, None] + skew + rng.normal(0, 0.02, (seconds, machines))
    place = np.arange(seconds, dtype=np.float64)[:, None] + np.zeros(machines)
    place[rng.random(place.shape) < 0.005] += 3.5
    order = np.argsort(place, axis=0, kind="stable")
    twice = rng.random(place.shape) < 0.002
    result: dict[str, list[tuple[F64, F64]]] = {}
    for name, array in values.items():
        series = []
        for machine in range(machines):
            rows = order[:, machine]
            rows = rows[~gone[name][rows, machine]]
            rows = np.concatenate([rows, rows[twice[rows, machine]]])
            series.append((ts[rows, machine], array[rows, machine].astype(np.float64)))
        result[name] = series
    return result


def thinned(frame: Frame, rng: Generator, *, every: int = 1, missing: float = 0.0) -> Frame:
    """Return a frame as a slower scrape gives it, of which a share of the samples is lost.

    Args:
        frame: of samples a second apart.
        rng: of the moments at which each machine is asked, and of what is lost.
        every: seconds between two samples of a machine.
        missing: share of the samples.
    """
    phase = rng.integers(every, size=frame.num_machines)
    asked = (np.arange(frame.num_seconds)[:, None] - phase) % every == 0
    samples: dict[str, dict[str, tuple[F64, F64]]] = {}
    for name, array in frame.values.items():
        kept = asked & frame.mask[name] & (rng.random(asked.shape) >= missing)
        samples[name] = {
            machine: (frame.ts[rows].astype(np.float64), array[rows, i].astype(np.float64))
            for i, machine in enumerate(frame.machines)
            for rows in [np.flatnonzero(kept[:, i])]
        }
    start = int(frame.ts[0])
    return align(frame.job, start, start + frame.num_seconds, frame.machines, samples)
