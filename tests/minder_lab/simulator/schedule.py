"""What a job does second by second: iterations, stages, checkpoints, evaluations, stalls, halts."""

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from tests.minder_lab.simulator.faults import Fault
from tests.minder_lab.simulator.shapes import State


@dataclass(frozen=True)
class Layout:
    """Machines of a job and their pipeline stages."""

    machines: int
    stages: int
    """1 for a job without pipeline."""

    @property
    def stage_of(self) -> NDArray[np.int64]:
        """Return [N], the stage of each machine."""
        return np.arange(self.machines) * self.stages // self.machines

    def group(self, machine: int) -> list[int]:
        """Return the machines of one's stage."""
        of = self.stage_of
        return np.flatnonzero(of == of[machine]).tolist()


def draw_layout(rng: Generator, machines: int | None) -> Layout:
    """Draw the number of machines (4 .. 64, small ones as often as large) and of stages."""
    count = machines or round(float(np.exp(rng.uniform(np.log(4), np.log(64.49)))))
    choices = [1] + [s for s in (2, 4, 8) if count >= 4 * s or (s == 2 and count >= 4)]
    stages = 1 if rng.random() < 0.5 else int(rng.choice(choices))
    return Layout(int(np.clip(count, 1, None)), stages)


def states(
    rng: Generator, layout: Layout, seconds: int, faults: list[Fault]
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return [T, S] the state of each stage, and [T, S] the place 0 .. 1 within the iteration."""
    fault = faults[0] if faults else None
    phase = _phases(rng, layout, seconds, fault)
    exchange = rng.uniform(0.10, 0.22)
    bubble = rng.uniform(0.0, 0.10, layout.stages) if layout.stages > 1 else np.array([0.02])
    state = np.full((seconds, layout.stages), int(State.COMPUTE))
    state[phase < bubble] = State.BUBBLE
    state[phase >= 1 - exchange] = State.EXCHANGE
    for start, stop, what in _interruptions(rng, seconds):
        state[start:stop] = what
    if fault is not None:
        if not fault.slow:
            state[fault.onset + 1 : fault.halt] = State.SPIN
        state[fault.halt :] = State.IDLE
    return state, phase


def _phases(
    rng: Generator, layout: Layout, seconds: int, fault: Fault | None
) -> NDArray[np.float64]:
    period = rng.uniform(4.0, 30.0)
    # Iterations differ a little, and slowly.
    drift = 1 + 0.02 * np.sin(2 * np.pi * np.arange(seconds) / rng.uniform(300, 1500))
    rate = drift * (1 + 0.01 * rng.standard_normal(seconds)) / period
    if fault is not None and fault.slow:
        rate[fault.onset :] /= 1 + fault.slow
    shifts = rng.uniform(0.0, 0.12) * np.arange(layout.stages) / max(1, layout.stages - 1)
    phase: NDArray[np.float64] = np.mod(np.cumsum(rate)[:, None] - shifts, 1.0)
    return phase


def _interruptions(rng: Generator, seconds: int) -> list[tuple[int, int, State]]:
    """Draw what stops the iterations of all machines for a while, the later one wins."""
    found: list[tuple[int, int, State]] = []
    stall = float(rng.uniform(120, 900))
    while stall < seconds:
        found.append((int(stall), int(stall + rng.integers(1, 9)), State.STALL))
        stall += rng.uniform(90, 900)
    if rng.random() < 0.4:
        evaluation = float(rng.uniform(300, 1500))
        while evaluation < seconds:
            stop = int(evaluation + rng.integers(20, 121))
            found.append((int(evaluation), stop, State.EVALUATION))
            evaluation += rng.uniform(900, 2400)
    every, length = rng.uniform(480, 1500), int(rng.integers(10, 46))
    save = float(rng.uniform(60, every))
    while save < seconds:
        found.append((int(save), int(save) + length, State.CHECKPOINT))
        save += every
    if rng.random() < 0.12:
        found.append((0, int(rng.integers(30, 150)), State.STARTUP))
    return found
