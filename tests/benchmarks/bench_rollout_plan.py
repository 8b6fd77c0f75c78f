"""The planner of disaggregated rollouts: its figures beside published ones, and its speed.

python -m tests.benchmarks.bench_rollout_plan [--draw] [--busy]

All figures but seconds are simulated: they come from data sheets and one set of constants. Seconds
are measured on one core, after a check that the machine is idle (`--busy` leaves that out).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from typing import Any

from planish.engines.planner.documents import PlannedRun, PlannedSizes
from planish.engines.planner.gpus import GPUS
from planish.engines.planner.models import MODELS, MoeModel
from planish.engines.planner.performance import Constants, Workload
from planish.engines.planner.pipeline import Pipeline, Work, iteration_seconds
from planish.engines.planner.query import Query, Space
from planish.engines.planner.search import search
from planish.engines.planner.simulate import Disturbances, run
from tests.benchmarks.facts import RESULTS, require_idle_machine, write_result
from tests.benchmarks.rollout_plan import tables
from tests.benchmarks.rollout_plan.conclusions import sensitivity
from tests.benchmarks.rollout_plan.pictures import draw, draw_pairs_of_all_models
from tests.unit.engines.planner import brute_force

NAME = "rollout_plan"
MODULE = "tests.benchmarks.bench_rollout_plan"
NUM_PLANS = 100_000
NUM_PROBLEMS = 50
NUM_LAWS = 2000
TARGETS = {
    "100,000 plans, s": 10.0,
    "1,000 requests, 60 layers, 8 + 8 ranks, s": 10.0,
    "law against event simulation, largest relative error": 1e-9,
    "problems of 50 in which brute force disagrees": 0.0,
    "balance alone below the best, largest share": 0.10,
    "ratio to the ideal baseline, largest relative error to published": tables.TOLERANCE,
}
"""At most."""


def timed_plans() -> dict[str, float]:
    """Evaluate at least 100,000 plans, with their tables of times, and return the seconds."""
    gpus, evaluated, feasible = list(GPUS.values()), 0, 0
    space = Space(slo_seconds=tables.SLO_SECONDS, replicas=tuple(range(1, 33)))
    began, processor = time.perf_counter(), time.process_time()
    for model in MODELS.values():
        found = search(Query(model, gpus, gpus, space=space))
        evaluated += len(found.plans) + sum(found.rejected.values())
        feasible += len(found.plans)
        if evaluated >= NUM_PLANS:
            break
    wall, used = time.perf_counter() - began, time.process_time() - processor
    return {
        "evaluated": evaluated,
        "feasible": feasible,
        "seconds": wall,
        "cpu_seconds": used,
        "seconds_of_100000": wall * NUM_PLANS / evaluated,
    }


def timed_simulation() -> dict[str, float]:
    """Simulate 1,000 requests of random length on 8 + 8 ranks with jitter."""
    model = MoeModel(**{**vars(MODELS["mixtral-8x22b"]), "layers": 60})
    sizes = {"tp_a": 2, "tp_e": 1, "n_a": 8, "n_e": 8, "m": 3, "b_a": 50}
    planned = PlannedRun(
        schema="rollout-plan/1",
        plan=PlannedSizes(attention_gpu="a800", expert_gpu="a800", **sizes),
        times_s={"total": 0.1},
        tokens_per_s=1.0,
        model=model,
        workload=Workload(),
        constants=Constants(),
        gpus={"a800": GPUS["a800"]},
        profiles=[],
        verdict="disaggregate",
    )
    disturbed = Disturbances(jitter=0.1, imbalance=1.25, length_spread=0.5)
    began, processor = time.perf_counter(), time.process_time()
    found = run(planned, 1000, disturbed)
    return {
        "seconds": time.perf_counter() - began,
        "cpu_seconds": time.process_time() - processor,
        "iterations": len(found.iterations),
        "tokens": found.tokens,
        "finished": found.finished,
    }


def law_error() -> float:
    """Return the largest relative difference of law and event simulation on random cases."""
    source, worst = random.Random(0), 0.0
    for _ in range(NUM_LAWS):
        a, e, c = (source.uniform(1e-6, 3.0) for _ in range(3))
        m, layers = source.randint(1, 6), source.randint(1, 60)
        n_a, n_e = source.randint(1, 4), source.randint(1, 4)
        work = Work([a] * n_a, [c] * n_a, [[e] * n_e] * layers, [c] * n_e, [0.0] * n_a)
        law = iteration_seconds(a, e, c, m, layers)
        worst = max(worst, abs(Pipeline(n_a, n_e).iteration(0.0, [work] * m, layers) / law - 1))
    return worst


def disagreements() -> int:
    """Return how many of the random problems have another best plan by brute force."""
    wrong = 0
    for seed in range(NUM_PROBLEMS):
        problem = brute_force.problem(seed)
        expected, best = brute_force.best(problem), search(problem).best
        if (best is None) != (expected is None):
            wrong += 1
        elif best is not None and expected is not None:
            wrong += abs(best.value(problem.objective) / expected[0] - 1) > 1e-9
    return wrong


def show(result: dict[str, Any]) -> None:
    """Print the figures that the page quotes."""
    for model, row in result["ratios"].items():
        print(
            f"{model:<14} ideal {row['ideal']:.2f}x (published {row['published']['ideal']:.2f}x), "
            f"framework {row['framework']:.2f}x ({row['published']['framework']:.2f}x), "
            f"strongest colocated form {row['strongest']:.2f}x"
        )
    for model, row in result["heterogeneous"].items():
        for objective in ("cost", "watt"):
            cells = ", ".join(f"{name} {value:.4g}" for name, value in row[objective].items())
            print(f"{model:<14} per {objective}: {cells}")
    for model, row in result["micro_batches"].items():
        gains = ", ".join(f"{step}: {value:.2f}x" for step, value in row["fixed_size"].items())
        rates = ", ".join(f"{m}: {rate:.0f}" for m, rate in row["fixed_batch_per_gpu"].items())
        print(
            f"{model:<14} micro-batches of equal size {gains}; of an equal batch, per GPU {rates}"
        )
    for model, row in result["replicas"].items():
        even = row["attention_over_experts_at_peak"]
        print(f"{model:<14} best at {row['peak']} replicas of {row['tp_a']}, T_a / T_e {even:.2f}")
    for name, turned in result["sensitivity"]["turned"].items():
        print(f"{name:<26} turns: {'; '.join(turned) or 'none'}")
    for name, check in result["targets"].items():
        word = "met" if check["met"] else "MISSED"
        print(f"{word:<7}{name}: {check['value']:.3g} (at most {check['target']:g})")


def draw_all(result: dict[str, Any]) -> None:
    """Draw both pictures."""
    draw(result, RESULTS / f"{NAME}.svg")
    draw_pairs_of_all_models(result["pairs"], RESULTS / f"{NAME}_pairs.svg")


def main() -> int:
    """Compute, measure, print, write and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw the last result")
    parser.add_argument("--busy", action="store_true", help="do not ask for an idle machine")
    options = parser.parse_args()
    path = RESULTS / f"{NAME}.json"
    if options.draw:
        draw_all(json.loads(path.read_text("utf-8"))["result"])
        return 0
    busy = None if options.busy else require_idle_machine()
    world = tables.World()
    result: dict[str, Any] = {
        "busy_cores_before": busy,
        "load_before": os.getloadavg()[0],
        "plans": timed_plans(),
        "simulation": timed_simulation(),
        "law_error": law_error(),
        "brute_force_disagreements": disagreements(),
        "ratios": tables.ratios(world),
        "heterogeneous": tables.heterogeneous(world),
        "micro_batches": tables.micro_batches(world),
        "replicas": tables.replicas(world),
        "balance": tables.balance(world),
        "pairs": tables.all_pairs(world),
        "sensitivity": sensitivity(),
        "constants": vars(world.constants),
    }
    errors = [abs(row["error_of_ideal"]) for row in result["ratios"].values()]
    values = (
        result["plans"]["seconds_of_100000"],
        result["simulation"]["seconds"],
        result["law_error"],
        float(result["brute_force_disagreements"]),
        1 - min(result["balance"].values()),
        max(errors),
    )
    result["targets"] = {
        name: {"value": value, "target": TARGETS[name], "met": value <= TARGETS[name]}
        for name, value in zip(TARGETS, values, strict=True)
    }
    show(result)
    write_result(NAME, "simulated", result, MODULE)
    draw_all(result)
    print(f"written to {path} and pictures beside it")
    return 0 if all(check["met"] for check in result["targets"].values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
