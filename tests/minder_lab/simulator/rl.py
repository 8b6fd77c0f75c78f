"""Jobs of reinforcement learning: machines sample each at its own pace, wait, judge and train.

What they do differs from a job of synchronous training in four ways: a machine ends its rollouts
when its own longest response ends, and waits for the others; rewards keep GPUs idle; some machines
only sample while others train (ahead); and a dead machine is missed only at the end of a phase.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from planish.minder.detect.frame import align
from planish.minder.detect.runs import stretches
from planish.minder.lab.cases import DETECTABLE_SECONDS, Truth
from tests.minder_lab.simulator import sampling
from tests.minder_lab.simulator.case import SimulatedCase
from tests.minder_lab.simulator.faults import Fault, apply, draw_duration, draw_fault, draw_kind
from tests.minder_lab.simulator.job import EPOCH, SIMULATED, gone
from tests.minder_lab.simulator.noise import Values
from tests.minder_lab.simulator.shapes import SHAPES, State

I64 = NDArray[np.int64]

SAMPLE, DRAINED, WAIT, JUDGE = 9, 10, 11, 12
"""More states than those of synchronous training: decoding with full rows, with the last row,
waiting without a collective, and judging on the CPU."""
_SHARES = {
    "pfc_tx_packet_rate": (0.4, 0.3, 0.05, 0.1),
    "cpu_usage": (1.1, 1.0, 0.5, 2.0),
    "gpu_duty_cycle": (0.99, 0.85, 0.0, 0.0),
    "gpu_power_draw": (0.85, 0.45, 0.24, 0.24),
    "gpu_graphics_engine_activity": (0.97, 0.6, 0.0, 0.0),
    "gpu_tensor_core_activity": (0.3, 0.02, 0.0, 0.0),
    "gpu_nvlink_bandwidth": (0.3, 0.05, 0.0, 0.0),
}
"""Share of the level in each of these states, by metric; others are as in computing."""


@dataclass(frozen=True)
class Plan:
    """One job of this kind."""

    machines: int
    tail: float
    """Seconds between the first and the last machine that ends its rollouts."""
    judging: float
    """Seconds of rewards in each iteration; 0 for none."""
    samplers: int
    """Machines that only sample, while the others train; 0 where all do both."""
    spins: bool
    """Machines wait within a collective, and do not say that they wait."""
    is_labelled: bool
    """Ranks say that they wait, and which machines only sample."""


def draw_plan(rng: Generator, machines: int | None = None) -> Plan:
    """Draw a job."""
    count = machines or int(rng.choice([8, 12, 16, 24]))
    ahead = rng.random() < 0.25
    return Plan(
        machines=count,
        tail=float(rng.uniform(0, 240)),
        judging=float(rng.uniform(40, 120)) if rng.random() < 0.4 else 0.0,
        samplers=count // 2 if ahead else 0,
        spins=bool(rng.random() < 0.3),
        is_labelled=bool(rng.random() < 0.5),
    )


def simulate_rl(
    seed: int, *, machines: int | None = None, fault: str | None = None, plan: Plan | None = None
) -> SimulatedCase:
    """Return one job; equal arguments give equal cases. See `simulate`."""
    rng = np.random.default_rng([seed, 0x726C])
    drawn = draw_plan(rng, machines)
    plan = plan or drawn
    seconds = int(rng.integers(2400, 3601))
    onset = int(rng.integers(600, 1600))
    span = (onset, onset + draw_duration(rng))
    kind = draw_kind(rng) if fault == "any" else fault
    faults: list[Fault] = []
    if kind:
        machine = int(rng.integers(plan.machines))
        faults = [draw_fault(rng, kind, machine, list(range(plan.machines)), span)]
        faults = [dataclasses.replace(faults[0], others=())]
        seconds = max(1500, min(faults[0].halt, span[1]) + int(rng.integers(120, 361)))
    state, live, place = _states(rng, plan, seconds, faults)
    values = _values(rng, plan, state, live, place, faults)
    start = EPOCH + int(rng.integers(10_000_000))
    names = tuple(f"node-{i:03d}" for i in range(plan.machines))
    series = sampling.sent(rng, start, values, gone(rng, values, plan.machines, faults))
    samples = {name: dict(zip(names, found, strict=True)) for name, found in series.items()}
    frame = align(f"rl-{seed}", start, start + seconds, names, samples)
    stages = {}
    if plan.is_labelled and plan.samplers:
        stages = {n: "rollout" if i < plan.samplers else "train" for i, n in enumerate(names)}
    waiting = {}
    if plan.is_labelled:
        for name, flags in zip(names, (state == WAIT).T, strict=True):
            # Metrics of ranks are scraped every five seconds.
            late = [(-(-low // 5) * 5, -(-high // 5) * 5) for low, high in stretches(flags)]
            waiting[name] = [(start + low, start + high) for low, high in late if high > low]
    truth = _truth(faults, names, start, seconds)
    return SimulatedCase(frame, truth, stages, str(seed), waiting=waiting, seed=seed)


def _truth(faults: list[Fault], names: tuple[str, ...], start: int, seconds: int) -> Truth:
    if not faults:
        return Truth()
    fault = faults[0]
    visible = {"silent": seconds - fault.onset} if fault.silent else dict(fault.visible)
    return Truth(
        machines=(names[fault.machine],),
        kind=fault.kind,
        onset=start + fault.onset,
        halt=start + min(fault.halt, seconds),
        visible=visible,
        detectable=max(visible.values(), default=0) >= DETECTABLE_SECONDS,
    )


def _states(
    rng: Generator, plan: Plan, seconds: int, faults: list[Fault]
) -> tuple[I64, NDArray[np.float64], NDArray[np.float64]]:
    """Return [T, N] states and shares of rows that live, and [T] the place within a step."""
    count = plan.machines
    live = np.ones((seconds, count))
    state = np.full((seconds, count), WAIT if not plan.spins else int(State.SPIN))
    sampling_seconds, training = rng.uniform(200, 420), rng.uniform(120, 260)
    step = rng.uniform(6.0, 30.0)
    place: NDArray[np.float64] = np.mod(np.arange(seconds) / step, 1.0)
    fault = faults[0] if faults else None
    slow = np.ones(count)
    at = 0
    while at < seconds:
        if fault is not None and fault.slow and at >= fault.onset:
            slow[fault.machine] = 1 + fault.slow
        ends = _ends(rng, plan, sampling_seconds, slow)
        samplers = range(plan.samplers) if plan.samplers else range(count)
        for machine in samplers:
            end = at + int(ends[machine])
            state[at:end, machine] = SAMPLE
            left = 1 - np.arange(end - at) / max(1, end - at)
            rows = rng.uniform(0.85, 1.0) * left ** rng.uniform(0.7, 2.5)
            live[at:end, machine] = rows[: max(0, seconds - at)]
        last = at + int(max(ends[machine] for machine in samplers))
        trainers = range(plan.samplers, count) if plan.samplers else range(count)
        begin = at if plan.samplers else last + int(rng.integers(3, 20))
        if plan.judging:
            begin = max(begin, last if not plan.samplers else at)
            state[begin : begin + int(plan.judging), trainers] = JUDGE
            begin += int(plan.judging)
        length = int(training * slow.max() * rng.uniform(0.95, 1.05))
        for machine in trainers:
            state[begin : begin + length, machine] = State.COMPUTE
        exchange = np.zeros(seconds, bool)
        exchange[begin : begin + length] = place[begin : begin + length] > 0.85
        state[np.ix_(exchange, list(trainers))] = State.EXCHANGE
        saved = begin + length
        state[saved : saved + 15, trainers] = State.CHECKPOINT
        at = max(saved + 15, last) + int(rng.integers(5, 25))
    if fault is not None:
        _stop(state, plan, fault)
    return state, live, place


def _ends(
    rng: Generator, plan: Plan, seconds: float, slow: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return [N] the seconds after which each machine's longest response ends."""
    shape = rng.choice(3)
    if shape == 0:
        late = rng.uniform(0, 1, plan.machines)
    elif shape == 1:
        late = rng.beta(1, 5, plan.machines)
    else:
        late = rng.beta(5, 1, plan.machines)
    late = (late - late.min()) / max(1e-9, float(late.max() - late.min()))
    return (seconds + plan.tail * late) * slow


def _stop(state: I64, plan: Plan, fault: Fault) -> None:
    """Let the others miss the faulty machine: in a collective at once, else at the next wait."""
    if not fault.slow:
        rows = np.arange(len(state))
        works = np.isin(state, (State.COMPUTE, State.EXCHANGE))
        for machine in range(plan.machines):
            after = np.flatnonzero(works[:, machine] & (rows > fault.onset))
            if len(after):
                state[after[0] : fault.halt, machine] = State.SPIN
    state[fault.halt :] = State.IDLE


def _values(
    rng: Generator,
    plan: Plan,
    state: I64,
    live: NDArray[np.float64],
    place: NDArray[np.float64],
    faults: list[Fault],
) -> Values:
    ripple = 1 + 0.06 * np.sin(2 * np.pi * rng.integers(2, 9) * place)[:, None]
    values: Values = {}
    idle: dict[str, float] = {}
    for name in SIMULATED:
        shape = SHAPES[name]
        level = rng.uniform(*shape.level)
        gains = 1 + shape.spread * rng.standard_normal(plan.machines)
        shares = np.array([*shape.states, *_SHARES.get(name, (1.0, 1.0, 1.0, 1.0))])
        idle[name] = level * shares[State.IDLE]
        drained = live * shares[SAMPLE] + (1 - live) * shares[DRAINED]
        array = level * np.where(state == SAMPLE, drained, shares[state])
        if shape.stage > 0.2:
            array = np.where(state == State.COMPUTE, array * ripple, array)
        values[name] = (array * gains).astype(np.float32)
    for fault in faults:
        apply(fault, values, idle)
    return sampling.as_measured(rng, values, plan.machines)
