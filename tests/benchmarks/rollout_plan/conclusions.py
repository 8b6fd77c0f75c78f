"""Which conclusions of the planner turn when a figure is off by a quarter."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from planish.engines.planner.performance import Workload
from planish.engines.planner.report import CLEAR_GAIN
from tests.benchmarks.rollout_plan.tables import PAPER, World

SHIFT = 0.25
EVEN = 1.0
UNEVEN = 1.25


def worlds() -> Iterator[tuple[str, World]]:
    """Yield a name and the figures of each variant; the first is the paper's."""
    base = World()
    yield "as published", base
    for factor in (1 - SHIFT, 1 + SHIFT):
        sign = f"{factor - 1:+.0%}"
        for field, name in (("network_rate", "network"), ("link_rate", "NVLink, PCIe")):
            gpus = {
                key: dataclasses.replace(gpu, **{field: getattr(gpu, field) * factor})
                for key, gpu in base.gpus.items()
            }
            yield f"{name} {sign}", dataclasses.replace(base, gpus=gpus)
        for key in ("h20", "l40s"):
            gpu = dataclasses.replace(base.gpus[key], price=base.gpus[key].price * factor)
            changed = {**base.gpus, key: gpu}
            yield f"price of {key} {sign}", dataclasses.replace(base, gpus=changed)
        constants = base.constants
        for field in ("compute_efficiency", "memory_efficiency"):
            value = min(1.0, getattr(constants, field) * factor)
            other = dataclasses.replace(constants, **{field: value})
            words = field.replace("_", " ")
            yield f"{words} {sign}", dataclasses.replace(base, constants=other)
        load = Workload(571 * factor, 159 * factor)
        yield f"lengths {sign}", dataclasses.replace(base, workload=load)
    # Less than even can not be: a quarter more, and half as much again.
    for imbalance in (UNEVEN, 1.5):
        load = Workload(imbalance=imbalance)
        yield f"imbalance {imbalance}", dataclasses.replace(base, workload=load)


def conclusions(world: World) -> dict[str, bool]:
    """Return each conclusion of the page and whether it holds with these figures."""
    best = {model: world.search(model, "a800", "a800").plans[0] for model in PAPER}
    ratio, gain = {}, {}
    for model, one in best.items():
        base = world.tensor_parallel(model, "a800")
        ratio[model] = one.per_gpu / base.per_gpu if base else float("inf")
        gain[model] = one.per_gpu / world.colocated(model, "a800")[0].per_gpu
    found = {f"{model}: beats tensor parallelism on A800": ratio[model] > 1 for model in PAPER}
    found["the model across nodes gains most"] = ratio["scaled-moe"] == max(ratio.values())
    for model in PAPER:
        found[f"{model}: clear gain over every colocated form on A800"] = gain[model] >= CLEAR_GAIN
    for model in PAPER:
        for objective in ("cost", "watt"):
            values = {
                (a, e): world.search(model, a, e, objective).plans[0].value(objective)  # type: ignore[arg-type]
                for a in ("h20", "l40s")
                for e in ("h20", "l40s")
            }
            found[f"{model}: H20 with L40S experts is best per {objective}"] = max(
                values, key=lambda pair: values[pair]
            ) == ("h20", "l40s")
    for model in PAPER:
        found[f"{model}: 3 micro-batches are enough on A800 (a fourth gains < 5 %)"] = (
            fourth_gains(world, model) < 1.05
        )
    plan = world.search("qwen3-30b", "h100", "h100").plans[0]
    base = world.tensor_parallel("qwen3-30b", "h100")
    found["qwen3-30b on H100: do not disaggregate"] = (
        base is not None and plan.per_gpu <= base.per_gpu
    )
    return found


def fourth_gains(world: World, model: str) -> float:
    """Return the best rate with 4 micro-batches allowed over that with 3."""
    three, four = (
        world.search(model, "a800", "a800", micro_batches=allowed).plans[0].per_gpu
        for allowed in ((3,), (3, 4))
    )
    return four / three


def sensitivity() -> dict[str, Any]:
    """Return the conclusions as published, and for each variant those that turn."""
    rows = {name: conclusions(world) for name, world in worlds()}
    base = rows.pop("as published")
    return {
        "conclusions": base,
        "turned": {
            name: [what for what, holds in row.items() if holds != base[what]]
            for name, row in rows.items()
        },
    }
