"""Colocated deployments: attention and experts on the same GPUs, one after the other.

The baseline `ideal` has no overhead beyond the performance model: no scheduler and no idle time.
The baseline `framework` takes `FRAMEWORK_OVERHEAD` times as long.

Source: the baselines of MegaScale-Infer, arXiv 2504.02263: tensor parallelism inside a node, and
across nodes if the weights need several. The forms `ep` and `pp` are in use today.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planish.engines.planner.gpus import Gpu
from planish.engines.planner.models import BYTES, MoeModel
from planish.engines.planner.performance import (
    Constants,
    all_reduce,
    attention_stage,
    free_bytes,
    matrices_roofline,
    most_rows,
    outside_stage,
)
from planish.engines.planner.query import BaselineName, Objective, Query

Form = Literal["tp", "ep", "pp"]
"""`tp`: every matrix is split over all GPUs. `ep`: attention is replicated, experts are distributed
over all GPUs. `pp`: layers are distributed over nodes, with tensor parallelism inside each node."""
FRAMEWORK_OVERHEAD = 2.0
"""The paper's speedup over vLLM divided by its speedup over TensorRT-LLM, 2.56 / 1.28; used for all
models."""
SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of GPUs in a deployment; above one node only whole nodes."""


@dataclass(frozen=True, slots=True)
class ColocatedPlan:
    """A colocated deployment with its largest batch and its throughput."""

    name: BaselineName
    gpu: str
    form: Form
    gpus: int
    tp: int
    """GPUs over which attention is split."""
    batch: int
    total: float
    """Seconds of an iteration, i.e. the time between two tokens of a response."""
    per_gpu: float
    """Tokens per second and GPU. The next two fields are per price and per watt, NaN if unknown."""
    per_cost: float
    per_watt: float

    def value(self, objective: Objective) -> float:
        """Return the figure that the search maximises."""
        value: float = getattr(self, f"per_{objective}")
        return value


def baselines(query: Query, gpu: Gpu, name: BaselineName = "ideal") -> list[ColocatedPlan]:
    """Return every colocated deployment that fits on a GPU type, the best per GPU first."""
    found = []
    overhead = FRAMEWORK_OVERHEAD if name == "framework" else 1.0
    for form, size, tp in shapes(query.model, gpu):
        seconds, bound = colocated(query, gpu, form, size, tp)
        rows = most_rows(seconds, query.space.slo_seconds / overhead, bound)
        if rows:
            groups = size // (gpu.per_node if form == "pp" else tp)
            total, batch = overhead * seconds(rows), rows * groups
            rate = batch / total / size
            cost, watt = (rate / unit if unit else math.nan for unit in (gpu.price, gpu.watts))
            shape = (name, gpu.name, form, size, tp)
            found.append(ColocatedPlan(*shape, batch, total, rate, cost, watt))
    return sorted(found, key=lambda one: (-one.per_gpu, one.gpus, one.form, one.tp))


def shapes(model: MoeModel, gpu: Gpu) -> Iterator[tuple[Form, int, int]]:
    """Yield (form, number of GPUs, GPUs that split attention) for all shapes that the model
    allows.
    """
    node = gpu.per_node
    sizes = [size for size in SIZES if size <= node or size % node == 0]
    forms: list[tuple[Form, int, int]] = [("tp", size, size) for size in sizes]
    forms += [("ep", size, tp) for size in sizes[1:] for tp in sizes if tp <= min(size, node)]
    forms += [("pp", size, node) for size in sizes if size > node and model.layers >= size // node]
    for form, size, tp in forms:
        # Tensor parallelism splits every expert; expert parallelism distributes whole experts.
        uneven = model.num_experts % size if form == "ep" else model.expert_size % tp
        if not uneven and model.splits_over(tp):
            yield form, size, tp


def colocated(
    query: Query, gpu: Gpu, form: Form, size: int, tp: int
) -> tuple[Callable[[float], float], int]:
    """Return the seconds of an iteration as a function of the rows of each group, and a bound of
    the rows.

    A group is an attention replica or a pipeline stage. Memory has room for fewer rows than the
    bound. Imbalance counts only for `ep`, since under `tp` every GPU has a part of every expert.
    """
    model, constants = query.model, query.constants
    length, spread = query.workload.length, form == "ep"
    stages = size // gpu.per_node if form == "pp" else 1
    # Experts of a layer on one GPU, and rows for them per row of a group.
    local = model.num_experts / size if spread else model.num_experts
    share = model.experts_per_token * (query.workload.imbalance / tp if spread else 1.0)
    attention = attention_stage(model, gpu, tp, length, constants, shared_sum=spread)
    matrices = model.feed_forward_matrices(model.expert_size, 1 if spread else tp)
    experts = matrices_roofline(matrices, gpu, constants, copies=local)
    slope, fixed = expert_exchange(model, gpu, constants, form, size, tp)
    outside = outside_stage(model, gpu, tp, length, constants)
    hop = BYTES * model.hidden_size / tp / gpu.network_rate
    outside = replace(
        outside,
        slope=outside.slope + (stages - 1) * hop,
        fixed=outside.fixed + (stages - 1) * constants.network_seconds,
    )

    def seconds(rows: float) -> float:
        busy = rows * share
        # The weights of experts without rows are not read.
        reading = experts.weights * min(1.0, busy / local)
        computing = max(busy * experts.compute, reading) + experts.fixed
        layer = attention.seconds(rows) + computing + rows * slope + fixed
        return model.layers * layer + outside.seconds(rows)

    weights = model.attention_bytes(tp)
    weights += BYTES * model.expert_parameters * model.num_experts // (size if spread else tp)
    free = free_bytes(gpu, weights / stages, constants)
    # Each batch of the pipeline caches keys and values for this GPU's share of the layers.
    row_bytes = length * model.kv_bytes(tp) * model.all_layers
    return seconds, int(free / row_bytes) + 1 if free > 0 else 1


def expert_exchange(
    model: MoeModel, gpu: Gpu, constants: Constants, form: Form, size: int, tp: int
) -> tuple[float, float]:
    """Return (seconds per row, fixed seconds) of the communication for one layer's experts."""
    if form != "ep":
        return all_reduce(model.hidden_size, tp, gpu, constants)
    # Both directions; a row goes to all experts of its token, over the network to other nodes.
    sent = 2 * BYTES * model.hidden_size * model.experts_per_token / tp
    node = min(size, gpu.per_node)
    inside = sent * (node - 1) / size / (gpu.link_rate * constants.link_efficiency)
    if size == node:
        return inside, 2 * constants.link_seconds
    across = sent * (size - node) / size / gpu.network_rate
    return max(inside, across), 2 * constants.network_seconds
