"""Simulation of a plan on ranks: random lengths, jitter, uneven experts, dead ranks.

All requests exist from the start, as in a rollout; a request keeps its slot until it ends. An
iteration begins when the previous one has ended on all ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

from planish.base.errors import ConfigError
from planish.base.text import Table, seconds_text
from planish.engines.config import DEAD_S
from planish.engines.planner.cli import Progress, write_output
from planish.engines.planner.documents import PlannedRun, read_plan
from planish.engines.planner.pipeline import Pipeline, Work

NUM_FACTORS = 8191
"""Number of jitter factors, used in turn; a prime, so that a rank does not repeat its factors."""


@dataclass(frozen=True)
class Death:
    """A rank that ends `seconds` after the start of the run."""

    role: str
    rank: int
    seconds: float


def read_death(text: str) -> Death:
    """Return the death that a text such as `attention:2@1.5` or `experts:0@3` describes, or raise
    ConfigError.
    """
    role, _, rest = text.partition(":")
    rank, _, seconds = rest.partition("@")
    try:
        when = float(seconds)
    except ValueError:
        when = math.nan
    if role not in ("attention", "experts") or not rank.isdecimal() or not 0 <= when < math.inf:
        raise ConfigError(
            f"`--dead` must be attention:<rank>@<seconds> or experts:<rank>@<seconds>, got {text!r}"
        )
    return Death(role, int(rank), when)


@dataclass(frozen=True)
class Disturbances:
    """Disturbances that a plan ignores."""

    jitter: float = 0.0
    """Standard deviation of the logarithm of each time on a rank or link."""
    imbalance: float = 1.0
    """Load of the busiest expert rank divided by the mean; each layer has another busiest rank."""
    length_spread: float = 0.0
    """Standard deviation of the logarithm of the response length; the mean length does not
    change."""
    deaths: tuple[Death, ...] = ()
    seed: int = 0


@dataclass
class SimulatedRun:
    """Result of a simulated run."""

    pipeline: Pipeline
    iterations: list[float] = field(default_factory=list)
    tokens: int = 0
    """Tokens of all responses, without those that a dead rank lost."""
    lost_tokens: int = 0
    finished: int = 0
    """Requests with a complete response."""
    errors: int = 0
    """Requests that ended because their rank died."""
    seconds: float = 0.0
    failed: bool = False
    """True if an expert rank died and no other rank has its experts."""


@dataclass
class _Slot:
    """The requests of one micro-batch on one attention rank."""

    rank: int
    requests: list[tuple[int, int]] = field(default_factory=list)
    """Cached tokens of each request, now and at the end of its response."""

    @property
    def cached(self) -> int:
        """Cached tokens of all requests."""
        return sum(now for now, _ in self.requests)


def run(
    planned: PlannedRun,
    num_requests: int,
    disturbed: Disturbances,
    progress: Progress = lambda *_: None,
) -> SimulatedRun:
    """Decode requests, which all exist at the start, on the ranks of a plan."""
    one, load = planned.deployment, planned.workload
    prompt_tokens = round(load.input_tokens)
    draw = random.Random(disturbed.seed)
    sigma = disturbed.length_spread
    waiting = deque(
        max(1, round(load.output_tokens * math.exp(draw.gauss(-sigma * sigma / 2, sigma))))
        for _ in range(num_requests)
    )
    sigma = disturbed.jitter
    factors = [math.exp(draw.gauss(-sigma * sigma / 2, sigma)) for _ in range(NUM_FACTORS)]
    outcome = SimulatedRun(Pipeline(one.n_a, one.n_e))
    slots = [[_Slot(rank) for rank in range(one.n_a)] for _ in range(planned.plan.m)]
    deaths = sorted(disturbed.deaths, key=lambda death: death.seconds)
    alive = [True] * one.n_e
    while not outcome.failed:
        admit(slots, waiting, planned.plan.b_a, prompt_tokens)
        active = [row for row in slots if any(slot.requests for slot in row)]
        if not active:
            break
        hot = [draw.randrange(sum(alive)) for _ in range(one.model.layers)]
        work = [work_of(planned, row, hot, alive, disturbed.imbalance) for row in active]
        shift = draw.randrange(NUM_FACTORS)
        turned = factors[shift:] + factors[:shift] if disturbed.jitter else (1.0,)
        end = outcome.pipeline.iteration(outcome.seconds, work, one.model.layers, turned)
        lost: list[int] = []
        while deaths and deaths[0].seconds < end:
            death = deaths.pop(0)
            # The others wait for the dead rank's frames until they time out.
            end = max(end, death.seconds + DEAD_S)
            if death.role == "experts":
                alive[death.rank] = False
                outcome.failed = load.redundancy < 1 or not any(alive)
            else:
                lost.append(death.rank)
        outcome.iterations.append(end - outcome.seconds)
        outcome.seconds = end
        for slot in (slot for row in slots for slot in row):
            if slot.rank in lost or outcome.failed:
                made = slot.cached - prompt_tokens * len(slot.requests)
                outcome.errors += len(slot.requests)
                outcome.lost_tokens += made
                outcome.tokens -= made
            else:
                step(slot, outcome)
        slots = [[slot for slot in row if slot.rank not in lost] for row in slots]
        progress("requests", outcome.finished + outcome.errors, num_requests)
    outcome.errors += len(waiting)
    return outcome


def admit(
    slots: Sequence[Sequence[_Slot]], waiting: deque[int], rows: int, prompt_tokens: int
) -> None:
    """Assign waiting requests to the slots with room, those with the fewest cached tokens first."""
    while waiting:
        room = [slot for row in slots for slot in row if len(slot.requests) < rows]
        if not room:
            return
        slot = min(room, key=lambda one: one.cached)
        slot.requests.append((prompt_tokens, prompt_tokens + waiting.popleft()))


def step(slot: _Slot, outcome: SimulatedRun) -> None:
    """Add a token to each request of a slot."""
    kept = [(now + 1, end) for now, end in slot.requests if now + 1 < end]
    outcome.tokens += len(slot.requests)
    outcome.finished += len(slot.requests) - len(kept)
    slot.requests = kept


def work_of(
    planned: PlannedRun,
    row: Sequence[_Slot],
    hot: Sequence[int],
    alive: Sequence[bool],
    imbalance: float,
) -> Work:
    """Return the times of one micro-batch, which is a `row` of slots of all living attention ranks.

    `hot` is the busiest expert rank of each layer, among the `alive` ones; the others share the
    remaining rows. `imbalance` is the load of the busiest rank divided by the mean.
    """
    one = planned.deployment
    attention, dispatch, outside = ([0.0] * one.n_a for _ in range(3))
    busy = [slot for slot in row if slot.requests]
    for slot in busy:
        rows = len(slot.requests)
        # Tokens beyond the length for which the stage was computed.
        extra = slot.cached - rows * planned.workload.length
        attention[slot.rank] = one.attention.seconds(rows) + extra * planned.cache_seconds
        dispatch[slot.rank] = one.network.seconds(rows)
        outside[slot.rank] = one.outside.seconds(rows)
    total = sum(len(slot.requests) for slot in busy)
    living = [rank for rank, lives in enumerate(alive) if lives]
    mean = total * one.model.experts_per_token / len(living)
    busiest = min(imbalance, len(living))
    others = (len(living) - busiest) / max(1, len(living) - 1)
    combine, cold, heat = [0.0] * one.n_e, [0.0] * one.n_e, one.experts.seconds(mean * busiest)
    for rank in living:
        # If micro-batches are equal, the network time is the time for one replica's rows.
        combine[rank] = one.network.seconds(total / len(busy))
        cold[rank] = one.experts.seconds(mean * others)
    experts = [list(cold) for _ in hot]
    for layer, place in zip(experts, hot, strict=True):
        layer[living[place]] = heat
    return Work(attention, dispatch, experts, combine, outside)


def simulate(options: argparse.Namespace, progress: Progress) -> Iterator[Table | str]:
    """Run the plan of a file on simulated ranks, and yield tables."""
    planned = read_plan(options.plan)
    disturbed = read_disturbances(options, planned)
    requests = options.requests or 2 * planned.places
    outcome = run(planned, requests, disturbed, progress)
    document = describe(planned, outcome, requests, disturbed)
    write_output("--json", options.json, json.dumps(document, allow_nan=False) + "\n")
    iteration = document["iteration_s"]
    planned_text = seconds_text(iteration["planned"])
    rows = [
        ["tokens/s", round(document["tokens_per_s"]), round(planned.tokens_per_s)],
        ["places in use, mean", f"{document['places_in_use']:.0%}", "100%"],
        *(
            [f"iteration, {name}", seconds_text(iteration[name]), planned_text]
            for name in ("first", "mean", "p99")
        ),
        ["requests finished", outcome.finished, requests],
        ["requests in error", outcome.errors, 0],
        ["seconds of the run", round(outcome.seconds, 1), ""],
    ]
    yield Table(f"{planned.model.name} (simulated)", ("", "run", "plan"), rows)
    shares = []
    for kind, found in document["busy"].items():
        cells = [f"{share:.0%}" for share in (found["mean"], found["least"], found["most"])]
        shares.append([kind, len(found["ranks"]), *cells, f"{1 - found['mean']:.0%}"])
    yield Table("busy", ("", "ranks", "mean", "least", "most", "bubble"), shares)
    if outcome.failed:
        yield "an expert rank died and nobody else has its experts: all its requests are in error"
    elif any(one.role == "experts" and one.seconds < outcome.seconds for one in disturbed.deaths):
        yield (
            "an expert rank died and others have its experts: this is what a deployment could do; "
            "the engines `disagg` and `vllm_disagg` end with the first expert rank that they lose"
        )


def read_disturbances(options: argparse.Namespace, planned: PlannedRun) -> Disturbances:
    """Return the disturbances of the options, or raise ConfigError."""
    if not 0 <= options.jitter <= 2 or not 0 <= options.spread <= 2:
        raise ConfigError(
            f"`--jitter` and `--spread` must be from 0 to 2, got {options.jitter:g} and "
            f"{options.spread:g}; correct them"
        )
    if options.imbalance < 1:
        raise ConfigError(f"`--imbalance` must be at least 1, got {options.imbalance:g}")
    deaths = tuple(read_death(text) for text in options.dead)
    ranks = {"attention": planned.plan.n_a, "experts": planned.plan.n_e}
    for death in deaths:
        if death.rank >= ranks[death.role]:
            raise ConfigError(
                f"`--dead` must name a rank of the plan, which has {ranks[death.role]} of "
                f"{death.role}, got {death.rank}; ranks count from 0"
            )
    return Disturbances(options.jitter, options.imbalance, options.spread, deaths, options.seed)


def describe(
    planned: PlannedRun, outcome: SimulatedRun, num_requests: int, disturbed: Disturbances
) -> dict[str, Any]:
    """Return the result of a run as JSON values.

    Busy shares refer to the time of the whole run; the rest is idle time.
    """
    times, seconds = sorted(outcome.iterations), outcome.seconds
    busy = {}
    for kind, ranks in outcome.pipeline.busy.items():
        shares = [spent / seconds for spent in ranks]
        ends = {"mean": fmean(shares), "least": min(shares), "most": max(shares)}
        busy[kind] = {"ranks": shares, **ends}
    return {
        "label": "simulated",
        "disturbances": asdict(disturbed),
        "num_requests": num_requests,
        "finished": outcome.finished,
        "errors": outcome.errors,
        "failed": outcome.failed,
        "tokens": outcome.tokens,
        "lost_tokens": outcome.lost_tokens,
        "seconds": seconds,
        "tokens_per_s": outcome.tokens / seconds,
        "planned_tokens_per_s": planned.tokens_per_s,
        "num_iterations": len(times),
        "places_in_use": (outcome.tokens + outcome.lost_tokens) / planned.places / len(times),
        "iteration_s": {
            "planned": planned.times_s["total"],
            "first": outcome.iterations[0],
            "mean": fmean(times),
            "p50": times[len(times) // 2],
            "p99": times[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)],
            "longest": times[-1],
        },
        "busy": busy,
    }
