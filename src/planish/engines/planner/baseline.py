"""Colocated deployments: attention and experts on the same GPUs, one after the other.

`ideal` has no overhead beyond the performance model: no scheduler and no idle moment. `framework`
takes `FRAMEWORK_OVERHEAD` times as long.

Source: the baselines of MegaScale-Infer, arXiv 2504.02263: tensor parallelism inside a node, and
across nodes where the weights need several. The other two forms are rivals of today.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planish.engines.planner.gpus import Gpu
from planish.engines.planner.models import BYTES, MoeModel
from planish.engines.planner.performance import (
    Constants,
    Roofline,
    all_reduce,
    attention_stage,
    matrices_roofline,
    most_rows,
    outside_stage,
)
from planish.engines.planner.query import BaselineName, Objective, Query

Form = Literal["tp", "ep", "pp"]
"""`tp`: every matrix over all GPUs; `ep`: attention replicas, experts over all GPUs; `pp`: layers
over nodes, tensor parallelism inside each."""
FRAMEWORK_OVERHEAD = 2.0
"""The paper's ratio over vLLM by that over TensorRT-LLM, 2.56 / 1.28: one number for all models."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""GPUs of a deployment; those above a node's are whole nodes."""


@dataclass(frozen=True, slots=True)
class Colocated:
    """One colocated deployment."""

    gpu: Gpu
    form: Form
    gpus: int
    """GPUs in all."""
    tp: int
    """GPUs that share attention."""
    groups: int
    """Batches that it holds at once: of attention replicas, or of pipeline stages."""
    layers: int
    """Layers with experts."""
    attention: Roofline
    """Seconds for the rows of one group."""
    experts: Roofline
    """Seconds for the rows that each GPU computes; `weights` are those of all its experts."""
    outside: Roofline
    """Seconds for the rows of one group in dense layers, logits and the hops of a pipeline."""
    expert_rows: float
    """Rows for the experts of a GPU from one row of each group that shares them."""
    local_experts: float
    """Experts of a layer on one GPU."""
    exchange: tuple[float, float]
    """Seconds per row and fixed of the sums or exchanges around the experts of one layer."""
    free_bytes: float
    """Bytes of a GPU for the cache."""
    row_bytes: float
    """Bytes of cache on a GPU for one row of a group."""

    def seconds(self, rows: float) -> float:
        """Return the seconds of an iteration with so many rows in each group."""
        busy = rows * self.expert_rows
        # Experts that no row meets are not read.
        reading = self.experts.weights * min(1.0, busy / self.local_experts)
        experts = max(busy * self.experts.compute, reading) + self.experts.fixed
        slope, fixed = self.exchange
        layer = self.attention.seconds(rows) + experts + rows * slope + fixed
        return self.layers * layer + self.outside.seconds(rows)

    def rows(self, limit_seconds: float) -> int:
        """Return the most rows of a group that memory and the time between tokens allow."""
        bound = int(self.free_bytes / self.row_bytes) + 1 if self.free_bytes > 0 else 1
        return most_rows(self.seconds, limit_seconds, bound)


@dataclass(frozen=True, slots=True)
class ColocatedPlan:
    """A colocated deployment with its largest batch, and what it reaches."""

    name: BaselineName
    gpu: str
    form: Form
    gpus: int
    """GPUs in all."""
    tp: int
    """GPUs that share attention."""
    batch: int
    """Requests decoded together."""
    total: float
    """Seconds of an iteration: the time between tokens."""
    per_gpu: float
    """Tokens per second and GPU."""
    per_cost: float
    """Tokens per second and unit of price; NaN without a price."""
    per_watt: float
    """Tokens per second and watt; NaN where the watts are unknown."""

    def value(self, objective: Objective) -> float:
        """Return what a search maximises."""
        return {"gpu": self.per_gpu, "cost": self.per_cost, "watt": self.per_watt}[objective]


def baselines(query: Query, gpu: Gpu, name: BaselineName = "ideal") -> list[ColocatedPlan]:
    """Return every colocated deployment of a GPU that fits, the best per GPU first."""
    found = []
    overhead = FRAMEWORK_OVERHEAD if name == "framework" else 1.0
    for one in colocated(query, gpu):
        rows = one.rows(query.space.slo_seconds / overhead)
        if rows:
            total, batch = overhead * one.seconds(rows), rows * one.groups
            rate = batch / total / one.gpus
            cost, watt = (rate / unit if unit else math.nan for unit in (gpu.price, gpu.watts))
            shape = (name, gpu.name, one.form, one.gpus, one.tp)
            found.append(ColocatedPlan(*shape, batch, total, rate, cost, watt))
    return sorted(found, key=lambda one: (-one.per_gpu, one.gpus, one.form, one.tp))


def colocated(query: Query, gpu: Gpu) -> Iterator[Colocated]:
    """Yield every form and size, whether or not it fits.

    Imbalance counts for `ep` alone, as `tp` has every expert everywhere.
    """
    model, constants = query.model, query.constants
    length, node = query.workload.length, gpu.per_node
    sizes = [size for size in SIZES if size <= node or size % node == 0]
    forms: list[tuple[Form, int, int]] = [("tp", size, size) for size in sizes]
    forms += [("ep", size, tp) for size in sizes[1:] for tp in sizes if tp <= min(size, node)]
    forms += [("pp", size, node) for size in sizes if size > node and model.layers >= size // node]
    for form, size, tp in forms:
        spread = form == "ep"
        # Tensor parallelism cuts every expert; expert parallelism deals whole ones out.
        cut = 1 if spread else tp
        uneven = model.expert_size % cut or (spread and model.num_experts % size)
        if uneven or not model.splits_over(tp):
            continue
        stages = size // node if form == "pp" else 1
        local = model.num_experts / size if spread else model.num_experts
        matrices = model.feed_forward_matrices(model.expert_size, cut)
        weights = model.attention_bytes(tp)
        weights += BYTES * model.expert_parameters * model.num_experts // (size if spread else tp)
        hop = BYTES * model.hidden_size / tp / gpu.network_rate
        outside = outside_stage(model, gpu, tp, length, constants)
        yield Colocated(
            gpu=gpu,
            form=form,
            gpus=size,
            tp=tp,
            groups=stages if form == "pp" else size // tp,
            layers=model.layers,
            attention=attention_stage(model, gpu, tp, length, constants, shared_sum=spread),
            experts=matrices_roofline(matrices, gpu, constants, copies=local),
            outside=replace(
                outside,
                slope=outside.slope + (stages - 1) * hop,
                fixed=outside.fixed + (stages - 1) * constants.network_seconds,
            ),
            expert_rows=model.experts_per_token
            * (query.workload.imbalance / tp if spread else 1.0),
            local_experts=local,
            exchange=expert_exchange(model, gpu, constants, form, size, tp),
            free_bytes=gpu.memory_bytes * (1 - constants.memory_reserve) - weights / stages,
            # Each of the batches of a pipeline has its cache of a share of the layers here.
            row_bytes=length * model.kv_bytes(tp) * model.all_layers,
        )


def expert_exchange(
    model: MoeModel, gpu: Gpu, constants: Constants, form: Form, size: int, tp: int
) -> tuple[float, float]:
    """Return seconds per row and fixed of the communication around the experts of one layer."""
    if form != "ep":
        return all_reduce(model.hidden_size, tp, gpu, constants)
    # Out and back; a row goes to all experts of its token, those of other nodes over the network.
    sent = 2 * BYTES * model.hidden_size * model.experts_per_token / tp
    node = min(size, gpu.per_node)
    inside = sent * (node - 1) / size / (gpu.link_rate * constants.link_efficiency)
    if size == node:
        return inside, 2 * constants.link_seconds
    across = sent * (size - node) / size / gpu.network_rate
    return max(inside, across), 2 * constants.network_seconds
