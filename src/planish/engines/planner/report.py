"""Report of `planish rollout plan`: the best plan, its limit, and whether to disaggregate.

The document is plain JSON. It has everything that another program needs to compute the plan again:
shapes, workload, constants, GPUs and measured stages.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

from planish.base.errors import ConfigError
from planish.base.text import Table
from planish.engines.planner.baseline import ColocatedPlan, baselines
from planish.engines.planner.cli import write_output
from planish.engines.planner.deployment import expert_bytes
from planish.engines.planner.models import BYTES
from planish.engines.planner.query import BaselineName, Query, read_query
from planish.engines.planner.search import Plan, Search, search

PUBLIC_RESULTS = (
    "published: the public plug-in for vLLM gained 1.0 % of throughput and lost 8.9 % of time to "
    "first token on 8 PCIe GPUs",
    "published: colocated wide expert parallelism reaches about 2.2k tokens/s per H200",
    "published: the paper gained 1.28x per GPU over TensorRT-LLM on one node, 1.90x across nodes",
)
"""Published results that are printed with every verdict, for comparison."""
CLEAR_GAIN = 1.10
"""Smallest clear ratio to the best colocated deployment; smaller gains are within the model's
error."""
SHIFT = 0.2
"""Relative change of each constant in the sensitivity table."""
UNEVEN = 1.5
"""Factor on the imbalance in the sensitivity table."""
PLANS_SHOWN = 8


def plan(options: argparse.Namespace, _: object) -> Iterator[Table | str]:
    """Search, write the document, and yield tables; ConfigError if no deployment fits."""
    query = read_query(options)
    found = search(query)
    if found.best is None:
        reasons = "; ".join(f"{why} ({n}x)" for why, n in found.rejected.most_common())
        raise ConfigError(
            f"at least one deployment of {query.model.name} must fit, got none: {reasons}; allow "
            "more GPUs, other types, fewer micro-batches or a longer time between tokens"
        )
    document = describe(query, found)
    write_output("--json", options.json, json.dumps(document, allow_nan=False) + "\n")
    yield from tables(query, found, document)


def colocated(query: Query, name: BaselineName) -> list[ColocatedPlan]:
    """Return every colocated deployment that fits, the best for the objective first."""
    found = [one for gpu in query.baseline_gpus for one in baselines(query, gpu, name)]
    return sorted(found, key=lambda one: -one.value(query.objective))


def describe(query: Query, found: Search) -> dict[str, Any]:
    """Return the document of a search that found a plan; a figure that is unknown is None."""
    best = found.plans[0]
    baseline = next((one for one in colocated(query, query.baseline) if one.form == "tp"), None)
    strongest = next(iter(colocated(query, "ideal")), None)
    ratio, gain = (
        best.value(query.objective) / one.value(query.objective) if one else None
        for one in (baseline, strongest)
    )
    # A plan is for the mean length; attention takes longer at the end of a response.
    load = query.workload
    at_end = replace(load, input_tokens=load.input_tokens + load.output_tokens / 2)
    last = replace(best.deployment, workload=at_end)
    document = {
        "schema": "rollout-plan/1",
        **flat(best),
        "model": query.model,
        "workload": load,
        "constants": query.constants,
        "gpus": {gpu.name: gpu for gpu in (*query.attention_gpus, *query.expert_gpus)},
        "profiles": [
            {"stage": stage, "gpu": gpu, "tp": tp, **asdict(measured)}
            for (stage, gpu, tp), measured in query.profiles.items()
        ],
        "objective": query.objective,
        "total_at_last_token_s": last.total(best.b_a, best.m),
        "slo_s": query.space.slo_seconds,
        "resources": resources(best, load.redundancy),
        "baseline": baseline,
        "ratio": ratio,
        "strongest_colocated": strongest,
        "ratio_to_strongest": gain,
        "verdict": verdict(gain),
        "edge": found.edge,
        "public_results": PUBLIC_RESULTS,
        "sensitivity": sensitivity(query, best),
        "rejected": found.rejected,
        "num_evaluated": len(found.plans) + sum(found.rejected.values()),
        "all": [flat(one) for one in found.plans],
    }
    # JSON has no infinity and no NaN.
    text = json.dumps(document, default=asdict)
    plain: dict[str, Any] = json.loads(text, parse_constant=lambda _: None)
    return plain


def flat(one: Plan) -> dict[str, Any]:
    """Return a plan in the form of the document."""
    at = one.deployment
    gpus = {"attention_gpu": at.attention_gpu.name, "expert_gpu": at.expert_gpu.name}
    return {
        "plan": {**gpus, **at.sizes, "m": one.m, "b_a": one.b_a},
        "batch": one.batch,
        "num_gpus": one.gpus,
        "times_s": {**asdict(one.times), "total": one.total},
        "tokens_per_s": one.tokens_per_second,
        "per_gpu": one.per_gpu,
        "per_cost": one.per_cost,
        "per_watt": one.per_watt,
        "limit": one.limit,
        "flags": one.flags(),
    }


def verdict(gain: float | None) -> str:
    """Return the verdict for a gain over the best colocated deployment that fits."""
    if gain is None or gain >= CLEAR_GAIN:
        return "disaggregate"
    return "do not disaggregate" if gain < 1 else "no clear gain"


def resources(best: Plan, redundancy: float) -> dict[str, float]:
    """Return busy shares, memory and message sizes of a plan."""
    one, times, model = best.deployment, best.times, best.deployment.model
    passes = best.m * model.layers
    rows = model.experts_per_token / one.n_e
    expert = expert_bytes(model, one.n_e, 0.0)
    flops = best.b_a * one.expert_rows * 6 * model.hidden_size * model.expert_size / one.tp_e
    cached = best.m * best.b_a * one.row_bytes
    read = best.m * model.attention_bytes(one.tp_a) + cached
    return {
        "attention_busy": times.attention * passes / best.total,
        "experts_busy": times.expert * passes / best.total,
        "network_busy": times.network * passes / best.total,
        "experts_compute_utilisation": flops / one.expert_gpu.flops * passes / best.total,
        "experts_memory_rate_utilisation": (
            expert / one.tp_e / one.expert_gpu.memory_rate * best.m / best.total
        ),
        "attention_memory_rate_utilisation": read / one.attention_gpu.memory_rate / best.total,
        "attention_weight_bytes_per_gpu": model.attention_bytes(one.tp_a),
        "attention_cache_bytes_per_gpu": cached,
        "expert_weight_bytes_per_gpu": expert * (1 + redundancy) / one.tp_e,
        "message_bytes": best.b_a * rows * (BYTES * model.hidden_size) / one.tp_a,
        "sent_bytes_per_attention_gpu": best.b_a * one.network.attention_bytes,
        "received_bytes_per_expert_gpu": best.b_a * one.network.expert_bytes,
        "rows_per_expert": best.b_a * one.n_a * model.experts_per_token / model.num_experts,
    }


def sensitivity(query: Query, plan: Plan) -> list[dict[str, Any]]:
    """Return the result of the same deployment under changed constants, with a refitted batch."""
    one, load = plan.deployment, query.workload
    space = replace(
        query.space,
        tp_attention=(one.tp_a,),
        tp_experts=(one.tp_e,),
        replicas=(one.n_a,),
        micro_batches=(plan.m,),
        expert_nodes=(one.n_e,),
    )
    kept = replace(
        query, attention_gpus=[one.attention_gpu], expert_gpus=[one.expert_gpu], space=space
    )
    uneven = replace(load, imbalance=load.imbalance * UNEVEN)
    shifted = [("imbalance", UNEVEN, replace(kept, workload=uneven))]
    for factor in (1 - SHIFT, 1 + SHIFT):
        for name in ("compute_efficiency", "memory_efficiency", "half_rate_bytes"):
            value = getattr(query.constants, name) * factor
            value = min(1.0, value) if name.endswith("efficiency") else value
            constants = replace(query.constants, **{name: value})
            shifted.append((name, factor, replace(kept, constants=constants)))
        longer = replace(
            load,
            input_tokens=load.input_tokens * factor,
            output_tokens=load.output_tokens * factor,
        )
        shifted.append(("length", factor, replace(kept, workload=longer)))
    rows = []
    for name, factor, other in sorted(shifted, key=lambda row: row[:2]):
        best = search(other).best
        value = best and best.value(query.objective)
        row = {"figure": name, "factor": factor, "value": value}
        rows.append({**row, "total": best and best.total, "limit": best and best.limit})
    return rows


def tables(query: Query, found: Search, document: dict[str, Any]) -> Iterator[Table | str]:
    """Yield tables for people."""
    best, unit = found.plans[0], {"gpu": "GPU", "cost": "price", "watt": "watt"}[query.objective]
    columns = ("attention", "experts", "n_a x tp_a", "n_e x tp_e", "m", "b_a", "T_a us", "T_e us")
    more = ("T_c us", "token ms", "per GPU", "per price", "per watt", "limit")
    count = f"{len(found.plans)} feasible of {document['num_evaluated']}"
    rows = [_plan_row(one) for one in found.plans[:PLANS_SHOWN]]
    yield Table(f"{query.model.name}: best plans per {unit} ({count})", (*columns, *more), rows)
    yield from comparison(query, best, unit)
    shifted = []
    for row in document["sensitivity"]:
        value = row["value"]
        share = "-" if value is None else f"{value / best.value(query.objective):.2f}x"
        limit = row["limit"] or "does not fit"
        shifted.append([row["figure"], f"{row['factor']:.1f}x", limit, share])
    yield Table("if a figure differs", ("figure", "by", "limit", f"per {unit}"), shifted)
    if found.rejected:
        reasons = [[why, number] for why, number in found.rejected.most_common()]
        yield Table("rejected", ("reason", "deployments"), reasons)
    yield from conclusion(document)


def _plan_row(one: Plan) -> list[Any]:
    at, times = one.deployment, one.times
    return [
        at.attention_gpu.name,
        at.expert_gpu.name,
        f"{at.n_a} x {at.tp_a}",
        f"{at.n_e} x {at.tp_e}",
        one.m,
        one.b_a,
        *(round(1e6 * seconds) for seconds in (times.attention, times.expert, times.network)),
        *(round(1e3 * one.total, 1), round(one.per_gpu)),
        round(one.per_cost) if math.isfinite(one.per_cost) else "-",
        round(one.per_watt, 2) if math.isfinite(one.per_watt) else "-",
        one.limit,
    ]


def comparison(query: Query, best: Plan, unit: str) -> Iterator[Table]:
    """Yield the plan next to the best colocated deployment of each form."""
    columns = ("deployment", "GPUs", "batch", "token ms", "tokens/s per GPU", f"per {unit}", "plan")
    words = {"tp": "tensor parallel", "ep": "expert parallel", "pp": "pipeline parallel"}
    sides: list[tuple[str, Plan | ColocatedPlan]] = [("plan", best)]
    names: tuple[BaselineName, ...] = (query.baseline, "ideal")
    for name in dict.fromkeys(names):
        forms = {one.form: one for one in reversed(colocated(query, name))}
        sides += [
            (f"{name}, {words[form]}, {forms[form].gpu}", forms[form])
            for form in words
            if form in forms
        ]
    rows = []
    for title, one in sides:
        value = one.value(query.objective)
        ratio = f"{best.value(query.objective) / value:.2f}x"
        whole = [title, one.gpus, one.batch, round(1e3 * one.total, 1), round(one.per_gpu)]
        rows.append([*whole, f"{value:.1f}" if value < 100 else round(value), ratio])
    yield Table("against attention and experts on the same GPUs", columns, rows)


def conclusion(document: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict in sentences, and published results."""
    base, strong = document["baseline"], document["strongest_colocated"]
    lines = [
        f"limit: {document['limit']}; time between tokens {1e3 * document['times_s']['total']:.1f} "
        f"ms, {1e3 * document['total_at_last_token_s']:.1f} ms if all were at their last"
    ]
    if base is not None:
        lines.append(
            f"ratio: {document['ratio']:.2f}x to the {base['name']} baseline (tensor parallel, "
            f"{base['gpus']} {base['gpu']})"
        )
    if strong is None:
        lines.append("disaggregate: no colocated deployment fits these GPUs")
    else:
        why = {
            "do not disaggregate": ": the colocated baseline wins",
            "no clear gain": ": prefer the colocated form, which is simpler",
            "disaggregate": "",
        }[document["verdict"]]
        lines.append(
            f"{document['verdict']}{why} ({document['ratio_to_strongest']:.2f}x of the strongest "
            f"colocated form, {strong['form']} over {strong['gpus']} {strong['gpu']})"
        )
    if document["edge"]:
        lines.append(f"{document['edge']}: others may be better; widen `--replicas`")
    yield "\n".join([*lines, *document["public_results"]])
