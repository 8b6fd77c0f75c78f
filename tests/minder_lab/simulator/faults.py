"""Kinds of faults: how often, which metrics show them, whether the job halts or goes on slowly.

Source: Minder, arXiv 2411.01791: shares of the kinds, which indicators show them, the two patterns.
How strongly a metric shows a fault is ours.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.random import Generator

from tests.minder_lab.simulator.shapes import SHAPES, scale_of


@dataclass(frozen=True)
class Kind:
    """One kind of fault; probabilities that a group of metrics shows it."""

    share: float
    """Of all faults."""
    cpu: float = 0.0
    gpu: float = 0.0
    pfc: float = 0.0
    throughput: float = 0.0
    memory: float = 0.0
    disk: float = 0.0
    slow: float = 0.0
    """Probability that the job goes on slowly in place of hanging."""
    spreads: float = 0.0
    """Probability that other machines of the parallel group show it too."""
    silent: float = 0.0
    """Probability that the machine stops reporting."""


FAULTS: dict[str, Kind] = {
    "ecc-error": Kind(0.389, 0.80, 0.66, 0.08, 0.46, 0.57, 0.08, slow=0.03),
    "pcie-downgrading": Kind(0.066, 0.0, 0.10, 0.97, 0.33, 0.0, 0.0, slow=1.0, spreads=0.2),
    "nic-dropout": Kind(0.057, 0.97, 0.97, 0.0, 0.97, 0.95, 0.1),
    "gpu-card-drop": Kind(0.020, 0.75, 0.70, 0.05, 0.25, 0.55, 0.05),
    "nvlink-error": Kind(0.017, 0.70, 0.65, 0.1, 0.25, 0.5, 0.0, slow=0.2),
    "aoc-error": Kind(0.009, 0.25, 0.25, 0.25, 0.25, 0.25, 0.1, slow=0.5),
    "cuda-error": Kind(0.146, 0.65, 0.65, 0.05, 0.35, 0.5, 0.05),
    "gpu-execution-error": Kind(0.077, 0.50, 0.55, 0.1, 0.3, 0.4, 0.0, slow=0.1, spreads=0.3),
    "hdfs-error": Kind(0.057, 0.90, 0.30, 0.0, 0.90, 0.3, 0.1),
    "machine-unreachable": Kind(0.060, 0.95, 0.95, 0.3, 0.95, 0.9, 0.2, silent=0.5),
    "other": Kind(0.102, 0.45, 0.45, 0.15, 0.3, 0.3, 0.1, slow=0.2),
}
"""By name; shares are the published ones."""


@dataclass(frozen=True)
class Fault:
    """One fault of one machine."""

    kind: str
    machine: int
    onset: int
    """Second of the trace."""
    halt: int
    """Second of the trace at which the job stops; beyond its end where it goes on."""
    slow: float = 0.0
    """How much longer iterations become; 0: the job hangs."""
    silent: bool = False
    shows: frozenset[str] = frozenset()
    """Groups of metrics that show it."""
    others: tuple[int, ...] = ()
    """Machines of the parallel group that show it too."""
    seed: int = 0
    """Of the strength in each metric."""
    visible: dict[str, int] = field(default_factory=dict)
    """Metric to seconds, filled in by `apply`."""


def draw_kind(rng: Generator) -> str:
    """Return a kind by its published share."""
    shares = np.array([kind.share for kind in FAULTS.values()])
    return str(rng.choice(list(FAULTS), p=shares / shares.sum()))


def draw_duration(rng: Generator) -> int:
    """Return the seconds from onset to halt: median nine minutes, one in twelve under 4.5."""
    return int(np.clip(rng.lognormal(np.log(540), 0.5), 120, 2400))


def draw_fault(
    rng: Generator, name: str, machine: int, group: list[int], span: tuple[int, int]
) -> Fault:
    """Draw the particulars of a fault.

    Args:
        rng: source of chance.
        name: kind.
        machine: that has it.
        group: machines of its parallel group.
        span: seconds of onset and halt in the trace.
    """
    kind = FAULTS[name]
    shows = {
        key
        for key in ("cpu", "gpu", "pfc", "throughput", "memory", "disk")
        if rng.random() < getattr(kind, key)
    }
    slow = float(rng.uniform(0.25, 1.0)) if rng.random() < kind.slow else 0.0
    if slow and "gpu" in shows:
        shows.add("tensor")
    if slow and name == "pcie-downgrading":
        shows -= {"memory", "disk"}
    others: tuple[int, ...] = ()
    peers = [one for one in group if one != machine]
    if peers and rng.random() < kind.spreads:
        count = min(len(peers), int(rng.integers(1, 4)))
        others = tuple(sorted(rng.choice(peers, count, replace=False).tolist()))
    # A job that only slows down may go on for as long as it is watched.
    halt = span[1] if not slow or rng.random() < 0.5 else 1 << 30
    return Fault(
        kind=name,
        machine=machine,
        onset=span[0],
        halt=halt,
        slow=slow,
        silent=bool(rng.random() < kind.silent),
        shows=frozenset(shows),
        others=others,
        seed=int(rng.integers(1 << 31)),
    )


@dataclass(frozen=True)
class _Effect:
    """What a fault does to one metric of one machine: value * factor + shift."""

    factor: float = 1.0
    shift: float = 0.0
    seconds: int = 1 << 30
    """For how long."""
    delay: int = 0


def apply(fault: Fault, values: dict[str, np.ndarray], idle: dict[str, float]) -> None:
    """Let the metrics of the faulty machine show the fault, and note for how long they do.

    Args:
        fault: whose `visible` is filled in.
        values: metric to [T, N], changed in place.
        idle: metric to what a machine shows whose processes are gone.
    """
    rng = np.random.default_rng(fault.seed)
    effects = {name: _effect(rng, fault, name) for name in sorted(SHAPES)}
    bad_gpus = 8 if rng.random() < 0.5 else int(rng.choice([1, 1, 1, 2, 3, 4, 6]))
    stuck = rng.random() < 0.15
    for name, array in values.items():
        shape, effect = SHAPES[name], effects[name]
        if effect is None:
            continue
        start, stop = fault.onset + effect.delay, min(fault.halt, len(array))
        stop = min(stop, start + effect.seconds)
        for place, machine in enumerate((fault.machine, *fault.others)):
            piece = array[start:stop, machine]
            before = piece.copy()
            if shape.group == "gpu" and not fault.slow:
                share = bad_gpus / 8
                # A stuck kernel keeps the engine busy; only power and memory traffic fall.
                if stuck and name in _BUSY:
                    share = 0.0
                piece *= 1 - share
                piece += share * idle[name]
            else:
                weight = 1.0 if place == 0 else float(rng.uniform(0.6, 1.0))
                piece *= 1 + weight * (effect.factor - 1)
                piece += weight * effect.shift
            if place == 0:
                fault.visible[name] = int((_difference(name, before, piece) > _SEEN).sum())


_BUSY = ("gpu_duty_cycle", "gpu_graphics_engine_activity", "gpu_sm_activity", "gpu_clocks")
_SEEN = 0.03
"""A difference of so much of the normalised metric shows."""


def _difference(name: str, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Return how far apart two stretches of a metric are when it is normalised."""
    if SHAPES[name].group == "pfc":
        before, after = (np.log1p(np.maximum(one, 0)) for one in (before, after))
    return np.asarray(np.abs(after - before) / scale_of(name))


def _effect(rng: Generator, fault: Fault, name: str) -> _Effect | None:
    """Draw what the fault does to a metric; None for nothing."""
    group = SHAPES[name].group
    draws = rng.random(6)
    if group not in fault.shows:
        return None
    delay = int(rng.integers(0, 6))
    if group == "cpu":
        if draws[0] < 0.2:
            return _Effect(shift=20 + 30 * draws[1], delay=delay)
        weak = draws[0] < 0.5
        factor = 0.6 + 0.25 * draws[1] if weak else 0.15 + 0.45 * draws[1]
        return _Effect(factor=factor, delay=delay)
    if group == "gpu":
        if draws[0] < 0.12:
            return None
        return _Effect(factor=0.8 + 0.15 * draws[1] if fault.slow else 0.0, delay=delay)
    if group == "tensor":
        return _Effect(factor=0.55 + 0.3 * draws[1], delay=delay) if fault.slow else None
    if group == "pfc":
        return _Effect(shift=300 + 4700 * draws[1] ** 2, delay=delay)
    if group == "throughput":
        if fault.slow:
            return _Effect(factor=0.5 + 0.25 * draws[1], delay=delay)
        # Logs and memory are uploaded for a while, or nothing is sent any more.
        if draws[0] < 0.5:
            seconds = int(30 + 170 * draws[2]) if draws[3] < 0.6 else 1 << 30
            return _Effect(shift=30 + 270 * draws[1], seconds=seconds, delay=delay)
        return _Effect(factor=0.1 * draws[1], delay=delay)
    if group == "memory":
        return _Effect(shift=-(5 + 20 * draws[1]), delay=delay)
    return _Effect(shift=0.5 + 2.5 * draws[1], delay=delay)
