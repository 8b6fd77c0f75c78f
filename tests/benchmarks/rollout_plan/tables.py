"""Figures of the planner: plans, published ratios, ablations, sweeps."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from planish.engines.planner.baseline import ColocatedPlan, baselines
from planish.engines.planner.gpus import GPUS, Gpu
from planish.engines.planner.models import MODELS
from planish.engines.planner.performance import Constants, Workload
from planish.engines.planner.pipeline import iteration_seconds
from planish.engines.planner.query import BaselineName, Objective, Query, Space
from planish.engines.planner.report import flat
from planish.engines.planner.search import Plan, Search, search

PAPER = ("mixtral-8x22b", "dbrx", "scaled-moe")
SLO_SECONDS = 0.15
PUBLISHED = {
    "mixtral-8x22b": {"ideal": 1.28, "framework": 2.56},
    "dbrx": {"ideal": 1.28, "framework": 2.56},
    "scaled-moe": {"ideal": 1.90, "framework": 7.11},
}
"""Tokens per second per GPU over TensorRT-LLM and over vLLM, up to, decode, on 80 GB Ampere."""
TOLERANCE = 0.30
FIGURES = ("gpu", "cost", "watt")


def speedup(attention: float, experts: float, network: float, layers: int, fewer: int) -> float:
    """Return tokens per second with one micro-batch more over `fewer`, each of the same size."""
    rates = [
        count / iteration_seconds(attention, experts, network, count, layers)
        for count in (fewer + 1, fewer)
    ]
    return rates[0] / rates[1]


@dataclasses.dataclass(frozen=True)
class World:
    """What the figures are computed with; the default is the paper's."""

    gpus: dict[str, Gpu] = dataclasses.field(default_factory=lambda: dict(GPUS))
    """By name."""
    workload: Workload = dataclasses.field(default_factory=Workload)
    """Lengths and imbalance."""
    constants: Constants = dataclasses.field(default_factory=Constants)
    """What data sheets leave out."""

    def search(
        self, model: str, a: str, e: str, objective: Objective = "gpu", **space: Any
    ) -> Search:
        """Return all plans of a model on two types of GPUs."""
        return search(self.query(model, a, e, objective, **space))

    def query(
        self, model: str, a: str, e: str, objective: Objective = "gpu", **space: Any
    ) -> Query:
        """Return the query for all plans of a model on two types of GPUs."""
        return Query(
            MODELS[model],
            [self.gpus[a]],
            [self.gpus[e]],
            workload=self.workload,
            objective=objective,
            space=Space(**{"slo_seconds": SLO_SECONDS, **space}),
            constants=self.constants,
        )

    def colocated(self, model: str, gpu: str, name: BaselineName = "ideal") -> list[ColocatedPlan]:
        """Return the colocated deployments of a model, the best first."""
        return baselines(self.query(model, gpu, gpu), self.gpus[gpu], name)

    def tensor_parallel(
        self, model: str, gpu: str, name: BaselineName = "ideal"
    ) -> ColocatedPlan | None:
        """Return the baseline of the paper."""
        return next((one for one in self.colocated(model, gpu, name) if one.form == "tp"), None)


def short(one: Plan) -> dict[str, Any]:
    """Return what a table shows of a plan."""
    found = flat(one)
    plan, times = found.pop("plan"), found.pop("times_s")
    del found["flags"], found["tokens_per_s"]
    names = {"expert": "experts", "num_gpus": "gpus"}
    return {names.get(key, key): value for key, value in {**plan, **times, **found}.items()}


def all_pairs(world: World) -> dict[str, Any]:
    """Return the best plan of each model on every pair of GPUs, per GPU, cost and watt."""
    table: dict[str, Any] = {}
    for model in MODELS:
        for a in world.gpus:
            for e in world.gpus:
                plans = world.search(model, a, e).plans
                row: dict[str, Any] = {"feasible": len(plans)}
                if plans:
                    row["best"] = short(plans[0])
                    row["per_watt"] = max(one.per_watt for one in plans)
                    if world.gpus[a].price and world.gpus[e].price:
                        row["per_cost"] = max(one.per_cost for one in plans)
                forms = world.colocated(model, a) if a == e else []
                row["colocated"] = {one.form: one.per_gpu for one in reversed(forms)}
                table[f"{model} {a} {e}"] = row
    return table


def ratios(world: World) -> dict[str, Any]:
    """Return tokens per second per GPU over the two calibrations of the baseline, on A800."""
    table = {}
    for model in PAPER:
        best = world.search(model, "a800", "a800").plans[0]
        row: dict[str, Any] = {"plan": short(best), "published": PUBLISHED[model]}
        names: tuple[BaselineName, ...] = ("ideal", "framework")
        for name in names:
            base = world.tensor_parallel(model, "a800", name)
            assert base is not None
            row[name] = best.per_gpu / base.per_gpu
        row["strongest"] = best.per_gpu / world.colocated(model, "a800")[0].per_gpu
        row["error_of_ideal"] = row["ideal"] / PUBLISHED[model]["ideal"] - 1
        row["met"] = abs(row["error_of_ideal"]) <= TOLERANCE
        table[model] = row
    return table


def heterogeneous(world: World) -> dict[str, Any]:
    """Return H20 and L40S in all pairings, and the baseline on each, per cost and per watt."""
    table: dict[str, Any] = {}
    for model in PAPER:
        row: dict[str, Any] = {}
        for objective in FIGURES:
            values = {
                f"{a}+{e}": world.search(model, a, e, objective).plans[0].value(objective)  # type: ignore[arg-type]
                for a in ("h20", "l40s")
                for e in ("h20", "l40s")
            }
            for gpu in ("h20", "l40s"):
                base = world.tensor_parallel(model, gpu)
                if base is not None:
                    values[f"tensor parallel {gpu}"] = getattr(base, f"per_{objective}")
            row[objective] = values
        table[model] = row
    return table


def micro_batches(world: World) -> dict[str, Any]:
    """Return what each further micro-batch gains, on the best plan of each model on A800.

    `fixed_size` keeps the rows of a micro-batch, as the paper's ablation; `fixed_batch` keeps the
    batch, so that more micro-batches are smaller ones.
    """
    table = {}
    for model in PAPER:
        best = world.search(model, "a800", "a800", micro_batches=(3,)).plans[0]
        times = (best.times.attention, best.times.experts, best.times.network)
        layers = MODELS[model].layers
        at = best.deployment
        kept = {"tp_attention": (at.tp_a,), "tp_experts": (at.tp_e,), "replicas": (at.n_a,)}
        # It divides by 1 to 4 micro-batches; without overlap it would miss the time between tokens.
        step = 12 * at.n_a
        free = {**kept, "batch": best.batch // step * step, "slo_seconds": math.inf}
        rates = {
            m: world.search(model, "a800", "a800", micro_batches=(m,), **free).plans[0].per_gpu
            for m in range(1, 5)
        }
        table[model] = {
            "network_over_slowest": times[2] / max(times[:2]),
            "fixed_size": {f"{m} to {m + 1}": speedup(*times, layers, m) for m in (1, 2, 3)},
            "fixed_batch_per_gpu": rates,
        }
    return table


def replicas(world: World) -> dict[str, Any]:
    """Return how rate and times go with the attention replicas, at the best plan's GPUs."""
    table = {}
    for model in PAPER:
        query = world.query(model, "a800", "a800")
        best, rows = search(query).plans[0], []
        at, pair = best.deployment, (world.gpus["a800"], world.gpus["a800"])
        for count in range(1, 17):
            one = query.deploy(pair, tp_a=at.tp_a, tp_e=at.tp_e, n_a=count, n_e=at.n_e)
            times = one.times(best.b_a)
            total = one.total(best.b_a, best.m)
            rate = best.b_a * best.m * count / total / one.gpus
            rows.append(
                {
                    "replicas": count,
                    "attention": times.attention,
                    "experts": times.experts,
                    "total": total,
                    "per_gpu": rate,
                }
            )
        peak = max(rows, key=lambda row: float(row["per_gpu"]))
        table[model] = {
            "tp_a": at.tp_a,
            "rows": best.b_a,
            "sweep": rows,
            "peak": peak["replicas"],
            "attention_over_experts_at_peak": peak["attention"] / peak["experts"],
        }
    return table


def balance(world: World) -> dict[str, float]:
    """Return the share of the best rate that balance alone reaches."""
    found = {}
    for model in PAPER:
        for a, e in (("a800", "a800"), ("h20", "l40s")):
            best = world.search(model, a, e, replicas=tuple(range(1, 33))).plans[0]
            near = world.search(model, a, e, replicas="balance").plans[0]
            found[f"{model} {a} {e}"] = near.per_gpu / best.per_gpu
    return found
