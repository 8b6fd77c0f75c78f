"""Search for the deployment with the best tokens per second per GPU, per cost or per watt.

The search tries every pair of GPU types, degree of tensor parallelism, number of attention replicas
and number of micro-batches, each with the largest batch that memory and the time between tokens
allow.

Source: MegaScale-Infer, arXiv 2504.02263, algorithm 1. The time of an iteration follows the exact
formula, so a plan may miss a condition of full overlap; its flags show that.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from planish.base.errors import ConfigError
from planish.engines.planner.deployment import Deployment, Times, expert_bytes
from planish.engines.planner.gpus import Gpu
from planish.engines.planner.performance import free_bytes, most_rows
from planish.engines.planner.query import FIGURES, Objective, Query, Space

MOST_REPLICAS = 1024
"""Most attention replicas that are tried, if nothing else ends the search."""
AROUND = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)
"""Numbers of attention replicas to try, as multiples of the balanced number, at which attention and
experts take equally long."""
MAX_BATCH = 1 << 20
"""Most rows of one micro-batch, even if memory has room for more."""
WORTH = 1.02
"""If a batch a quarter larger would improve the result by more than this factor, the limit of the
batch is the limit of the plan."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One deployment with its largest feasible batch."""

    deployment: Deployment
    m: int
    b_a: int
    """Rows of a micro-batch on one attention replica; the largest number if they differ."""
    batch: int
    times: Times
    total: float
    """Seconds of an iteration, i.e. the time between two tokens of a response."""
    limit: str
    """`memory` or `slo` if a larger batch would improve the plan; else the slowest of `attention`,
    `experts` and `network`."""

    @property
    def gpus(self) -> int:
        """Number of GPUs of the deployment."""
        return self.deployment.gpus

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one iteration divided by its seconds."""
        return self.batch / self.total

    @property
    def per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.tokens_per_second / self.gpus

    @property
    def per_cost(self) -> float:
        """Tokens per second and unit of price."""
        return self.tokens_per_second / self.deployment.sum_of("price")

    @property
    def per_watt(self) -> float:
        """Tokens per second and watt."""
        return self.tokens_per_second / self.deployment.sum_of("watts")

    def value(self, objective: Objective) -> float:
        """Return the figure that the search maximises."""
        value: float = getattr(self, f"per_{objective}")
        return value

    def flags(self) -> dict[str, bool | float]:
        """Return the paper's conditions of full overlap, with their values."""
        times = self.times
        slowest = max(times.attention, times.expert)
        gap = abs(times.attention - times.expert) / slowest
        return {
            "imbalance": gap,
            "balanced": gap <= 0.25,
            "network_hidden": times.network < slowest,
            "enough_micro_batches": self.m * slowest >= 2 * (slowest + times.network),
        }


@dataclass
class Search:
    """Result of a search."""

    plans: list[Plan]
    """Every feasible deployment, the best first."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Reason to the number of deployments that it excluded."""
    edge: str = ""
    """Message if the best deployment lies at an end of the tried range, so that a better one may
    lie beyond; else ""."""

    @property
    def best(self) -> Plan | None:
        """The best deployment; None if none is feasible."""
        return self.plans[0] if self.plans else None


def search(query: Query) -> Search:
    """Evaluate every deployment of a query; among equal ones, prefer fewer GPUs, then fewer
    micro-batches.

    Raises:
        ConfigError: a GPU lacks the figure of the objective, or expert nodes do not divide the
            experts.
    """
    gpus = {gpu.name: gpu for gpu in (*query.attention_gpus, *query.expert_gpus)}
    figure = FIGURES[query.objective]
    unknown = [gpu.name for gpu in gpus.values() if not getattr(gpu, figure)]
    if unknown:
        raise ConfigError(
            f"the objective `{query.objective}` needs the {figure} of each GPU, got none for "
            f"{', '.join(unknown)}; none is published: give yours, prices in units of an L20, "
            f"with `--gpu-data {unknown[0]}.{figure}=...`, or choose another objective"
        )
    experts = query.model.num_experts
    nodes = query.space.expert_nodes or [
        count
        for count in range(8 if experts > 32 else experts, experts + 1)
        if experts % count == 0
    ]
    uneven = [count for count in nodes if experts % count]
    if uneven:
        raise ConfigError(
            f"`--expert-nodes` must divide the {experts} experts of {query.model.name}, got "
            f"{', '.join(map(str, uneven))}; choose divisors"
        )
    found = Search([])
    for pair in itertools.product(query.attention_gpus, query.expert_gpus):
        for tp_a, tp_e, n_e in fitting_sizes(query, pair, nodes, found.rejected):
            make = functools.partial(
                Deployment,
                model=query.model,
                workload=query.workload,
                constants=query.constants,
                profiles=query.profiles,
                attention_gpu=pair[0],
                expert_gpu=pair[1],
                tp_a=tp_a,
                tp_e=tp_e,
                n_e=n_e,
            )
            try_replicas(make, query.space, query.objective, found)

    def rank(plan: Plan) -> tuple[float | str, ...]:
        one = plan.deployment
        names = (one.attention_gpu.name, one.expert_gpu.name)
        return (-plan.value(query.objective), one.gpus, plan.m, *names, *one.sizes.values())

    found.plans.sort(key=rank)
    found.edge = edge_of(found, query.space)
    return found


def try_replicas(
    make: Callable[..., Deployment], space: Space, objective: Objective, found: Search
) -> None:
    """Try numbers of attention replicas for one choice of GPUs and sizes."""
    values: dict[int, float] = {}

    def attempt(counts: Iterable[int]) -> None:
        for n_a in sorted(set(counts) - values.keys()):
            values[n_a] = 0.0
            one = make(n_a=n_a)
            for m in space.micro_batches:
                made = plan(one, m, space)
                if isinstance(made, Plan):
                    found.plans.append(made)
                    values[n_a] = max(values[n_a], made.value(objective))
                else:
                    found.rejected[made] += 1

    if isinstance(space.replicas, tuple):
        attempt(space.replicas)
        return
    one = make(n_a=1)
    # n_a = k1 E / (k3 K): both stages grow equally with the rows.
    even = one.attention.seconds_per_row() / (one.experts.seconds_per_row() * one.expert_rows)
    even = min(float(MOST_REPLICAS), even)
    attempt({max(1, math.floor(even)), max(1, math.ceil(even))})
    if space.replicas == "balance":
        return
    attempt(max(1, round(even * share)) for share in AROUND)
    while (best := max(values, key=lambda n: (values[n], -n))) < MOST_REPLICAS and values[best]:
        # Next: beyond the last or before the first number, or into the gaps next to the best one.
        tried = sorted(values)
        place = tried.index(best)
        low = tried[place - 1] if place else best // 2
        high = tried[place + 1] if best < tried[-1] else min(MOST_REPLICAS, 2 * best)
        new = {(low + best) // 2, low, (best + high + 1) // 2, high} - {0} - values.keys()
        if not new:
            break
        attempt(new)


def edge_of(found: Search, space: Space) -> str:
    """Return a message if the best plan has the largest or smallest tried number of attention
    replicas; else "".
    """
    if found.best is None or space.replicas == "balance":
        return ""
    best = found.best.deployment
    ends = (1, MOST_REPLICAS) if space.replicas == "around" else space.replicas
    if best.n_a == max(ends) and not 0 < space.max_gpus < best.gpus + best.tp_a:
        return f"the best plan has the most attention replicas that were tried, {best.n_a}"
    if best.n_a == min(ends) > 1:
        return f"the best plan has the fewest attention replicas that were tried, {best.n_a}"
    return ""


def fitting_sizes(
    query: Query, gpus: tuple[Gpu, Gpu], nodes: Sequence[int], rejected: Counter[str]
) -> list[tuple[int, int, int]]:
    """Return (tp_a, tp_e, n_e) for which the weights fit; count the reasons against the others."""
    (attention_gpu, expert_gpu), model = gpus, query.model
    halves: list[int] = []
    for tp in query.space.tp_attention:
        if tp > attention_gpu.per_node:
            why = f"tp_a={tp} is more than the {attention_gpu.per_node} GPUs of a node"
        elif not model.splits_over(tp):
            heads = f"{model.num_heads} heads and {model.num_kv_heads} KV heads"
            why = f"{heads} do not split over tp_a={tp}"
        elif free_bytes(attention_gpu, model.attention_bytes(tp), query.constants) <= 0:
            why = f"attention weights do not fit tp_a={tp} of {attention_gpu.name}"
        else:
            halves.append(tp)
            continue
        rejected[why] += 1
    others: list[tuple[int, int]] = []
    for tp, n_e in itertools.product(query.space.tp_experts, nodes):
        memory = tp * expert_gpu.memory_bytes * (1 - query.constants.memory_reserve)
        if tp > expert_gpu.per_node:
            why = f"tp_e={tp} is more than the {expert_gpu.per_node} GPUs of a node"
        elif model.expert_size % tp:
            why = f"experts of width {model.expert_size} do not split over tp_e={tp}"
        elif expert_bytes(model, n_e, query.workload.redundancy) >= memory:
            local = model.num_experts // n_e
            why = f"{local} experts a layer do not fit tp_e={tp} of {expert_gpu.name}"
        else:
            others.append((tp, n_e))
            continue
        rejected[why] += 1
    return [(tp_a, tp_e, n_e) for tp_a in halves for tp_e, n_e in others]


def plan(one: Deployment, m: int, space: Space) -> Plan | str:
    """Return the plan with `m` micro-batches of the largest size, or the reason why there is
    none.
    """
    if space.max_gpus and one.gpus > space.max_gpus:
        return f"more than {space.max_gpus} GPUs"
    most = min(one.most_rows(m), MAX_BATCH)
    if most < 1:
        return f"the cache of one row in each of {m} micro-batches does not fit"
    batch, stop = space.batch, "memory"
    if batch:
        # Of uneven micro-batches, the largest determines the time.
        rows = math.ceil(batch / (m * one.n_a))
        if batch < m * one.n_a:
            return f"more micro-batches (m={m} on n_a={one.n_a}) than rows"
        if rows > most:
            return f"the cache of a batch of {batch} does not fit"
        if one.total(rows, m) > space.slo_seconds:
            return f"a batch of {batch} takes longer than the time between tokens"
    else:
        rows = most
        if one.total(rows, m) > space.slo_seconds:
            stop = "slo"
            rows = most_rows(lambda rows: one.total(rows, m), space.slo_seconds, most)
            if rows < 1:
                return "one row takes longer than the time between tokens"
        batch = rows * m * one.n_a
    times = one.times(rows)
    total = one.total(rows, m)
    larger = 1.25 * rows / one.total(1.25 * rows, m) * total / rows
    if space.batch or larger < WORTH:
        stages = {"attention": times.attention, "experts": times.expert, "network": times.network}
        stop = max(stages, key=lambda name: stages[name])
    return Plan(one, m, rows, batch, times, total, stop)
