"""One simulated job from its seed."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from planish.minder.detect.frame import align
from planish.minder.detect.metrics_table import METRICS, PUBLISHED_ORDER
from planish.minder.lab.cases import DETECTABLE_SECONDS, Truth
from tests.minder_lab.simulator import sampling
from tests.minder_lab.simulator.case import SimulatedCase
from tests.minder_lab.simulator.faults import (
    Fault,
    apply,
    draw_duration,
    draw_fault,
    draw_kind,
)
from tests.minder_lab.simulator.noise import Values
from tests.minder_lab.simulator.schedule import Layout, draw_layout, states
from tests.minder_lab.simulator.shapes import SHAPES, State

SIMULATED = (*PUBLISHED_ORDER, "memory_usage", "tcp_throughput")
"""Metrics of a case where none are named."""

EPOCH = 1_700_000_000
"""Unix second before which no trace begins."""
_CONCURRENT = 0.01


def simulate(
    seed: int,
    *,
    machines: int | None = None,
    minutes: float | None = None,
    fault: str | None = None,
    metrics: Sequence[str] = SIMULATED,
    keep_samples: bool = False,
) -> SimulatedCase:
    """Return one job; equal arguments give equal cases.

    Args:
        seed: of everything that is random.
        machines: how many; drawn from 4 .. 64 when not given.
        minutes: length of the trace; drawn from 20 .. 60 when not given.
        fault: key of `FAULTS`, `any` for one drawn by its published share, None for none.
        metrics: that are wanted.
        keep_samples: also return what the machines sent, unaligned.
    """
    rng = np.random.default_rng([seed, 0x6D696E])
    layout = draw_layout(rng, machines)
    seconds, span = _spans(rng, minutes)
    start = EPOCH + int(rng.integers(10_000_000))
    kind = draw_kind(rng) if fault == "any" else fault
    faults = _faults(rng, layout, kind, span) if kind else []
    if faults and minutes is None:
        # The trace goes on for a few minutes after the halt.
        halt = min(faults[0].halt, span[1])
        seconds = max(1200, halt + int(rng.integers(120, 361)))
    values = _values(rng, layout, seconds, faults, tuple(metrics))
    names = tuple(f"node-{i:03d}" for i in range(layout.machines))
    lost = gone(rng, values, layout.machines, faults)
    series = sampling.sent(rng, start, values, lost)
    samples = {name: dict(zip(names, found, strict=True)) for name, found in series.items()}
    frame = align(f"sim-{seed}", start, start + seconds, names, samples)
    stage_of = layout.stage_of
    stages = {n: f"stage-{stage_of[i]}" for i, n in enumerate(names)} if layout.stages > 1 else {}
    truth = _truth(faults, names, start, seconds)
    return SimulatedCase(
        frame, truth, stages, str(seed), seed=seed, samples=samples if keep_samples else {}
    )


def _spans(rng: Generator, minutes: float | None) -> tuple[int, tuple[int, int]]:
    """Return the length of the trace, and onset and halt of a fault, all in seconds."""
    seconds = int(60 * minutes) if minutes is not None else int(rng.integers(1200, 3601))
    duration = draw_duration(rng)
    if minutes is None:
        onset = int(rng.integers(300, 1500))
        return seconds, (onset, onset + duration)
    duration = min(duration, int(0.7 * seconds))
    onset = int(rng.integers(seconds // 5, max(seconds // 5 + 1, seconds - duration - 30)))
    return seconds, (onset, onset + duration)


def _faults(rng: Generator, layout: Layout, kind: str, span: tuple[int, int]) -> list[Fault]:
    count = 2 if layout.machines > 4 and rng.random() < _CONCURRENT else 1
    chosen = rng.choice(layout.machines, count, replace=False).tolist()
    found = [draw_fault(rng, kind, one, layout.group(one), span) for one in chosen]
    # One halt and one pattern for the whole job.
    first = found[0]
    return [first] + [
        dataclasses.replace(one, halt=first.halt, slow=first.slow) for one in found[1:]
    ]


def _values(
    rng: Generator, layout: Layout, seconds: int, faults: list[Fault], metrics: tuple[str, ...]
) -> Values:
    """Return what happens on each machine, before it is sampled."""
    state, phase = states(rng, layout, seconds, faults)
    stage_of = layout.stage_of
    imbalance = 1 + rng.uniform(0, 0.15) * (stage_of / max(1, layout.stages - 1) - 0.5)
    busy_cpu = 1 + (rng.uniform(0, 0.15) if layout.stages > 1 else 0.0) * (stage_of == 0)
    ripple = 1 + 0.06 * np.sin(2 * np.pi * rng.integers(2, 9) * phase)
    spin = {"gpu_power_draw": rng.uniform(0.4, 0.6), "cpu_usage": rng.uniform(0.8, 1.15)}
    values: Values = {}
    idle: dict[str, float] = {}
    for name, shape in SHAPES.items():
        # All levels are drawn, so that those of a case do not depend on the metrics wanted.
        level = rng.uniform(*shape.level)
        gains = 1 + shape.spread * rng.standard_normal(layout.machines)
        if name not in metrics:
            continue
        shares = np.array(shape.states)
        shares[State.SPIN] = spin.get(name, shares[State.SPIN])
        idle[name] = level * shares[State.IDLE]
        by_stage = level * shares[state]
        if shape.stage > 0.2:
            by_stage = np.where(state == State.COMPUTE, by_stage * ripple, by_stage)
        gains = gains * (1 + shape.stage * (imbalance - 1))
        if name == "cpu_usage":
            gains = gains * busy_cpu
        values[name] = (by_stage[:, stage_of] * gains).astype(np.float32)
    for fault in faults:
        apply(fault, values, idle)
    return sampling.as_measured(rng, values, layout.machines)


def gone(
    rng: Generator, values: Values, machines: int, faults: list[Fault]
) -> dict[str, np.ndarray]:
    """Return [T, N] by metric, samples that never arrive."""
    seconds = len(next(iter(values.values())))
    # A sample is lost with the whole scrape of one exporter: of the host or of its GPUs.
    host, gpu = (sampling.lost(rng, seconds, machines) for _ in range(2))
    for fault in faults:
        if fault.silent:
            host[fault.onset :, fault.machine] = gpu[fault.onset :, fault.machine] = True
    return {name: gpu if METRICS[name].is_gpu else host for name in values}


def _truth(faults: list[Fault], names: tuple[str, ...], start: int, seconds: int) -> Truth:
    if not faults:
        return Truth()
    visible: dict[str, int] = {}
    for fault in faults:
        for name, length in fault.visible.items():
            visible[name] = max(visible.get(name, 0), length)
        if fault.silent:
            visible = {"silent": seconds - fault.onset}
    first = faults[0]
    return Truth(
        machines=tuple(sorted(names[fault.machine] for fault in faults)),
        kind=first.kind,
        onset=start + first.onset,
        halt=start + min(first.halt, seconds),
        visible=visible,
        detectable=not first.others and max(visible.values(), default=0) >= DETECTABLE_SECONDS,
    )
