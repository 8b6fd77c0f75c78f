"""What makes machines of a healthy job unlike: lasting offsets, drift, short jitter, bursts."""

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tests.minder_lab.simulator.shapes import SHAPES, scale_of, upper_bound

Values = dict[str, NDArray[np.float32]]

_RACK = 8


def add_unevenness(rng: Generator, values: Values, machines: int) -> None:
    """Add what distinguishes healthy machines for as long as the job runs, in place."""
    seconds = len(next(iter(values.values())))
    odd = rng.random(machines) < 0.3
    cpu = np.where(odd, rng.choice([-1, 1], machines) * rng.uniform(1, 9, machines), 0.0)
    watts = rng.uniform(-5, 5, machines)
    capped = np.where(rng.random(machines) < 0.05, 1 - rng.uniform(0.03, 0.12, machines), 1.0)
    degrees = rng.uniform(-1, 1, machines) * rng.uniform(3, 7)
    racks = np.arange(machines) // _RACK
    hot = racks == rng.integers(racks.max() + 1) if rng.random() < 0.25 else np.zeros(machines)
    pfc = 1 + hot * rng.uniform(0.5, 3.0)
    collector = np.zeros(machines)
    if rng.random() < 0.4:
        collector[0] = rng.uniform(0.3, 1.0)
    drift = np.linspace(-0.5, 0.5, seconds)[:, None] * rng.normal(0, 1, machines)
    for name, array in values.items():
        if name == "cpu_usage":
            # An offset of a busy host: an idle one has little of it.
            busy = np.minimum(1.0, array / max(1e-6, float(np.median(array))))
            array += busy * (cpu + 10 * collector)
        elif name == "gpu_power_draw":
            array *= capped
            array += watts
        elif name == "gpu_temperature":
            array += degrees + drift
        elif name == "memory_usage":
            array += np.linspace(0, rng.uniform(0, 1.0), seconds)[:, None] + 4 * collector
        elif name == "tcp_throughput":
            array *= 1 + 3 * collector
        elif SHAPES[name].group == "pfc":
            array *= pfc
        if name in ("cpu_usage", "gpu_power_draw"):
            array += 0.005 * scale_of(name) * drift * (rng.random(machines) < 0.1)


def add_noise(rng: Generator, values: Values) -> None:
    """Add what changes from second to second, in place."""
    for name, array in values.items():
        shape = SHAPES[name]
        if shape.noise:
            array *= 1 + shape.noise * rng.standard_normal(array.shape, np.float32)
        if shape.heavy:
            array *= np.exp(shape.heavy * rng.standard_normal(array.shape, np.float32))
        if shape.group == "pfc":
            # Bursts of a few seconds on any machine.
            starts = np.argwhere(rng.random(array.shape) < 1 / 240)
            for start, machine in starts.tolist():
                length = int(rng.integers(1, 6))
                array[start : start + length, machine] += rng.uniform(100, 4000)


def add_jitter(rng: Generator, values: Values, machines: int) -> None:
    """Add short events, one for each machine and hour: log-normal lengths below four minutes."""
    seconds = len(next(iter(values.values())))
    for _ in range(int(rng.poisson(machines * seconds / 3600))):
        machine, start = int(rng.integers(machines)), int(rng.integers(seconds))
        length = int(np.clip(rng.lognormal(np.log(18), 1.0), 2, 230))
        what, size, choice = rng.choice(5, p=[0.35, 0.2, 0.15, 0.15, 0.15]), *rng.random(2)
        rows = slice(start, start + length)
        if what == 0:
            _add(values, "cpu_usage", rows, machine, 8 + 27 * size)
        elif what == 1:
            _add(values, "pfc_tx_packet_rate", rows, machine, 300 + 5700 * size)
        elif what == 2 and "gpu_power_draw" in values:
            values["gpu_power_draw"][start : start + 3, machine] = 0 if choice < 0.5 else 420
        elif what == 3:
            _add(values, "tcp_throughput", rows, machine, 50 + 250 * size)
            _add(values, "cpu_usage", rows, machine, 5 * size)
        elif what == 4:
            for name, array in values.items():
                if SHAPES[name].group in ("gpu", "tensor"):
                    array[rows, machine] *= 0.55 + 0.3 * size


def _add(values: Values, name: str, rows: slice, machine: int, amount: float) -> None:
    if name in values:
        values[name][rows, machine] += amount


def smooth(values: Values) -> None:
    """Average over as many seconds as each sensor does, in place; then keep to its range."""
    for name, array in values.items():
        width = SHAPES[name].smooth
        if width > 1:
            padded = np.concatenate([np.repeat(array[:1], width - 1, axis=0), array])
            total = np.cumsum(padded, axis=0, dtype=np.float64)
            total = np.concatenate([np.zeros((1, array.shape[1])), total])
            array[:] = (total[width:] - total[:-width]) / width
        np.clip(array, 0.0, upper_bound(name), out=array)
