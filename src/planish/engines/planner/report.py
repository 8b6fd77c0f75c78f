"""What `planish rollout plan` says: the best plan, what limits it, and whether to disaggregate.

The document is plain JSON. It holds all that another program needs to compute the plan anew:
shapes, workload, constants, GPUs and measured stages.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

from planish.base.errors import ConfigError
from planish.base.text import Table
from planish.engines.planner.baseline import BaselineName, ColocatedPlan
from planish.engines.planner.documents import PLAN_SCHEMA
from planish.engines.planner.models import BYTES
from planish.engines.planner.question import Asked, read_options, value_of
from planish.engines.planner.search import Plan, Search

PUBLIC_RESULTS = (
    "published: the public plug-in for vLLM gained 1.0 % of throughput and lost 8.9 % of time to "
    "first token on 8 PCIe GPUs",
    "published: colocated wide expert parallelism reaches about 2.2k tokens/s per H200",
    "published: the paper gained 1.28x per GPU over TensorRT-LLM on one node, 1.90x across nodes",
)
"""Beside every verdict, so that nobody is promised a free lunch."""
CLEAR_GAIN = 1.10
"""Over the strongest colocated form; less is within what an ideal model leaves out."""
SHIFT = 0.2
"""Relative change of each constant in the sensitivity table."""
UNEVEN = 1.5
"""Factor on the imbalance there."""
PLANS_SHOWN = 8


def plan(options: argparse.Namespace, _: object) -> Iterator[Table | str]:
    """Search, write the document, and yield tables.

    Raises:
        ConfigError: wrong input, or nothing fits.
    """
    asked = read_options(options)
    found = asked.search()
    if found.best is None:
        reasons = "; ".join(f"{why} ({n}x)" for why, n in found.rejected.most_common())
        raise ConfigError(
            f"at least one deployment of {asked.model.name} must fit, got none: {reasons}; allow "
            "more GPUs, other types, fewer micro-batches or a longer time between tokens"
        )
    document = describe(asked, found)
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(document, allow_nan=False) + "\n", "utf-8")
        except OSError as error:
            raise ConfigError(
                f"`--json` must be a file that can be written, got {options.json}: {error}"
            ) from None
    yield from tables(asked, found, document)


def describe(asked: Asked, found: Search) -> dict[str, Any]:
    """Return the document of a search that found a plan."""
    best = found.plans[0]
    baseline = next((one for one in asked.colocated(asked.baseline) if one.form == "tp"), None)
    strongest = next(iter(asked.colocated("ideal")), None)
    best_value = value_of(best, asked.objective)
    ratio = best_value / value_of(baseline, asked.objective) if baseline else None
    gain = best_value / value_of(strongest, asked.objective) if strongest else None
    gpus = {gpu.name: gpu for gpu in (*asked.attention_gpus, *asked.expert_gpus)}
    return {
        "schema": PLAN_SCHEMA,
        **flat(best),
        "model": dataclasses.asdict(asked.model),
        "workload": dataclasses.asdict(asked.workload),
        "constants": dataclasses.asdict(asked.constants),
        "gpus": {name: dataclasses.asdict(gpu) for name, gpu in gpus.items()},
        "profiles": [
            {"stage": stage, "gpu": gpu, "tp": tp, **dataclasses.asdict(measured)}
            for (stage, gpu, tp), measured in asked.profiles.items()
        ],
        "objective": asked.objective,
        "total_at_last_token_s": last_token(asked, best),
        "slo_s": asked.space.slo_seconds if asked.space.slo_seconds < math.inf else None,
        "resources": resources(asked, best),
        "baseline": vars_of(baseline),
        "ratio": ratio,
        "strongest_colocated": vars_of(strongest),
        "ratio_to_strongest": gain,
        "verdict": verdict(gain),
        "edge": found.edge,
        "public_results": list(PUBLIC_RESULTS),
        "sensitivity": sensitivity(asked, best),
        "rejected": dict(found.rejected),
        "num_evaluated": len(found.plans) + sum(found.rejected.values()),
        "all": [flat(one) for one in found.plans],
    }


def flat(one: Plan) -> dict[str, Any]:
    """Return a plan as it stands in the document."""
    cost = one.per_cost if math.isfinite(one.per_cost) else None
    return {
        "plan": {
            name: getattr(one, name)
            for name in ("attention_gpu", "expert_gpu", "tp_a", "tp_e", "n_a", "n_e", "m", "b_a")
        },
        "batch": one.batch,
        "num_gpus": one.gpus,
        "times_s": {
            "attention": one.attention,
            "expert": one.experts,
            "network": one.network,
            "outside": one.outside,
            "total": one.total,
        },
        "tokens_per_s": one.tokens_per_second,
        "per_gpu": one.per_gpu,
        "per_cost": cost,
        "per_watt": one.per_watt if math.isfinite(one.per_watt) else None,
        "limit": one.limit,
        "flags": one.flags(),
    }


def last_token(asked: Asked, best: Plan) -> float:
    """Return the seconds of an iteration in which every request is at its last token.

    A plan is for the mean length; attention takes longer towards the end of a response.
    """
    load = dataclasses.replace(
        asked.workload, input_tokens=asked.workload.input_tokens + asked.workload.output_tokens / 2
    )
    at_end = dataclasses.replace(asked, workload=load).deployment(best)
    return at_end.total(best.b_a, best.m)


def vars_of(one: ColocatedPlan | None) -> dict[str, Any] | None:
    """Return a baseline as it stands in the document; None without one."""
    if one is None:
        return None
    return {
        **dataclasses.asdict(one),
        "per_cost": one.per_cost or None,
        "per_watt": one.per_watt or None,
    }


def verdict(gain: float | None) -> str:
    """Say whether to disaggregate.

    Args:
        gain: of the plan to the strongest colocated form; None where none fits.

    Example:
        >>> verdict(0.97), verdict(1.0), verdict(1.2)
        ('do not disaggregate', 'no clear gain', 'disaggregate')
    """
    if gain is None:
        return "disaggregate"
    if gain < 1:
        return "do not disaggregate"
    return "disaggregate" if gain >= CLEAR_GAIN else "no clear gain"


def resources(asked: Asked, best: Plan) -> dict[str, float]:
    """Return busy shares, memory and sizes of messages of a plan."""
    one, passes = asked.deployment(best), best.m * asked.model.layers
    width = BYTES * asked.model.hidden_size
    rows = asked.model.experts_per_token / best.n_e
    expert = BYTES * asked.model.expert_parameters * asked.model.num_experts / best.n_e
    flops = best.b_a * one.expert_rows * 6 * asked.model.hidden_size * asked.model.expert_size
    cached = best.m * best.b_a * one.row_bytes
    return {
        "attention_busy": best.attention * passes / best.total,
        "experts_busy": best.experts * passes / best.total,
        "network_busy": best.network * passes / best.total,
        "experts_compute_utilisation": flops
        / best.tp_e
        / one.expert_gpu.flops
        * passes
        / best.total,
        "experts_memory_rate_utilisation": expert
        / best.tp_e
        / one.expert_gpu.memory_rate
        * best.m
        / best.total,
        "attention_memory_rate_utilisation": (
            best.m * asked.model.attention_bytes(best.tp_a) + cached
        )
        / one.attention_gpu.memory_rate
        / best.total,
        "attention_weight_bytes_per_gpu": asked.model.attention_bytes(best.tp_a),
        "attention_cache_bytes_per_gpu": cached,
        "expert_weight_bytes_per_gpu": expert * (1 + asked.workload.redundancy) / best.tp_e,
        "message_bytes": best.b_a * rows * width / best.tp_a,
        "sent_bytes_per_attention_gpu": best.b_a * one.network.attention_bytes,
        "received_bytes_per_expert_gpu": best.b_a * one.network.expert_bytes,
        "rows_per_expert": best.b_a
        * best.n_a
        * asked.model.experts_per_token
        / asked.model.num_experts,
    }


def sensitivity(asked: Asked, best: Plan) -> list[dict[str, Any]]:
    """Return what the same deployment reaches, with its batch fitted anew, if a figure differs."""
    kept = dataclasses.replace(
        asked,
        attention_gpus=[gpu for gpu in asked.attention_gpus if gpu.name == best.attention_gpu],
        expert_gpus=[gpu for gpu in asked.expert_gpus if gpu.name == best.expert_gpu],
        space=dataclasses.replace(
            asked.space,
            tp_attention=(best.tp_a,),
            tp_experts=(best.tp_e,),
            replicas=(best.n_a,),
            micro_batches=(best.m,),
            expert_nodes=(best.n_e,),
        ),
    )
    found = []
    for factor in (1 - SHIFT, 1 + SHIFT):
        for name in ("compute_efficiency", "memory_efficiency", "half_rate_bytes"):
            value = getattr(asked.constants, name) * factor
            value = min(1.0, value) if name.endswith("efficiency") else value
            changes = dataclasses.replace(asked.constants, **{name: value})
            found.append((name, factor, dataclasses.replace(kept, constants=changes)))
        load = dataclasses.replace(
            asked.workload,
            input_tokens=asked.workload.input_tokens * factor,
            output_tokens=asked.workload.output_tokens * factor,
        )
        found.append(("length", factor, dataclasses.replace(kept, workload=load)))
    load = dataclasses.replace(asked.workload, imbalance=asked.workload.imbalance * UNEVEN)
    found.append(("imbalance", UNEVEN, dataclasses.replace(kept, workload=load)))
    rows = []
    for name, factor, changed_asked in sorted(found, key=lambda one: one[:2]):
        again = changed_asked.search().best
        rows.append(
            {
                "figure": name,
                "factor": factor,
                "value": value_of(again, asked.objective) if again else None,
                "total": again.total if again else None,
                "limit": again.limit if again else None,
            }
        )
    return rows


def tables(asked: Asked, found: Search, document: dict[str, Any]) -> Iterator[Table | str]:
    """Yield what people read."""
    best, unit = found.plans[0], {"gpu": "GPU", "cost": "price", "watt": "watt"}[asked.objective]
    columns = ("attention", "experts", "n_a x tp_a", "n_e x tp_e", "m", "b_a", "T_a us", "T_e us")
    rows = [
        [
            one.attention_gpu,
            one.expert_gpu,
            f"{one.n_a} x {one.tp_a}",
            f"{one.n_e} x {one.tp_e}",
            one.m,
            one.b_a,
            *(round(1e6 * seconds) for seconds in (one.attention, one.experts, one.network)),
            *(round(1e3 * one.total, 1), round(one.per_gpu)),
            round(one.per_cost) if math.isfinite(one.per_cost) else "-",
            round(one.per_watt, 2) if math.isfinite(one.per_watt) else "-",
            one.limit,
        ]
        for one in found.plans[:PLANS_SHOWN]
    ]
    more = ("T_c us", "token ms", "per GPU", "per price", "per watt", "limit")
    count = f"{len(found.plans)} feasible of {document['num_evaluated']}"
    yield Table(f"{asked.model.name}: best plans per {unit} ({count})", (*columns, *more), rows)
    yield from comparison(asked, best, unit)
    shifted = []
    for row in document["sensitivity"]:
        value = row["value"]
        share = "-" if value is None else f"{value / value_of(best, asked.objective):.2f}x"
        limit = row["limit"] or "does not fit"
        shifted.append([row["figure"], f"{row['factor']:.1f}x", limit, share])
    yield Table("if a figure differs", ("figure", "by", "limit", f"per {unit}"), shifted)
    if found.rejected:
        reasons = [[why, number] for why, number in found.rejected.most_common()]
        yield Table("rejected", ("reason", "deployments"), reasons)
    yield from conclusion(document)


def comparison(asked: Asked, best: Plan, unit: str) -> Iterator[Table]:
    """Yield the plan beside the best colocated deployment of each form."""
    columns = ("deployment", "GPUs", "batch", "token ms", "tokens/s per GPU", f"per {unit}", "plan")
    words = {"tp": "tensor parallel", "ep": "expert parallel", "pp": "pipeline parallel"}
    sides: list[tuple[str, Plan | ColocatedPlan]] = [("plan", best)]
    names: tuple[BaselineName, ...] = (asked.baseline, "ideal")
    for name in dict.fromkeys(names):
        forms = {one.form: one for one in reversed(asked.colocated(name))}
        sides += [
            (f"{name}, {words[form]}, {forms[form].gpu}", forms[form])
            for form in words
            if form in forms
        ]
    rows = []
    for title, one in sides:
        value = value_of(one, asked.objective)
        ratio = f"{value_of(best, asked.objective) / value:.2f}x"
        whole = [title, one.gpus, one.batch, round(1e3 * one.total, 1), round(one.per_gpu)]
        rows.append([*whole, f"{value:.1f}" if value < 100 else round(value), ratio])
    yield Table("against attention and experts on the same GPUs", columns, rows)


def conclusion(document: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict in sentences, and published results beside it."""
    ratio, gain = document["ratio"], document["ratio_to_strongest"]
    base, strong = document["baseline"], document["strongest_colocated"]
    lines = [
        f"limit: {document['limit']}; time between tokens {1e3 * document['times_s']['total']:.1f} "
        f"ms, {1e3 * document['total_at_last_token_s']:.1f} ms if all were at their last"
    ]
    if base is not None:
        lines.append(
            f"ratio: {ratio:.2f}x to the {base['name']} baseline (tensor parallel, "
            f"{base['gpus']} {base['gpu']})"
        )
    if strong is None:
        lines.append("disaggregate: no colocated deployment fits these GPUs")
    else:
        form = f"{strong['form']} over {strong['gpus']} {strong['gpu']}"
        ends = {
            "do not disaggregate": "do not disaggregate: the colocated baseline wins",
            "no clear gain": "no clear gain: prefer the colocated form, which is simpler",
            "disaggregate": "disaggregate",
        }
        lines.append(
            f"{ends[document['verdict']]} ({gain:.2f}x of the strongest colocated form, {form})"
        )
    if document["edge"]:
        lines.append(f"{document['edge']}: others may be better; widen `--replicas`")
    yield "\n".join([*lines, *document["public_results"]])
