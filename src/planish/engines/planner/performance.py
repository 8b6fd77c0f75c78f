"""Times of a layer's stages, from data sheets or from a profile of the machine.

A stage is a function of its rows: the time of its matrices is the larger of the compute time and
the time to read the weights, plus a term that grows with the rows and a fixed part. One set of
constants serves all models and GPUs.

Source: MegaScale-Infer, arXiv 2504.02263, performance model; equation 6 for the network.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, with_config

from planish.engines.planner.cli import LARGEST
from planish.engines.planner.gpus import STORED, Gpu
from planish.engines.planner.models import BYTES, MoeModel, numbers_in

Combine = Literal["exact", "local_sum"]
"""`exact`: one row per token and expert crosses the network. `local_sum`: at most one row per token
and expert node crosses it, since the node sums its experts."""
Share = Annotated[float, Field(gt=0.0, le=1.0)]
Cost = Annotated[float, Field(ge=0.0, lt=LARGEST)]


@with_config(STORED)
@dataclass(frozen=True)
class Constants:
    """Constants that data sheets do not give, equal for every model and GPU."""

    compute_efficiency: Share = 0.70
    """Share of the data sheet's operations per second that large matrices reach."""
    memory_efficiency: Share = 0.80
    """Share of the data sheet's memory rate that reading weights and caches reaches."""
    link_efficiency: Share = 0.70
    """Share of the link's rate that an all-reduce inside a node reaches."""
    kernel_seconds: Cost = 4e-6
    link_seconds: Cost = 8e-6
    """Latency of an all-reduce for each doubling of its GPUs."""
    layer_seconds: Cost = 8e-6
    """Seconds of norms, router and other small kernels, per layer and stage."""
    network_seconds: Cost = 20e-6
    """Latency of one direction between attention and experts."""
    half_rate_bytes: Cost = 128 * 1024
    """Size of a transfer that reaches half the rate of the network."""
    memory_reserve: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.10
    """Share of a GPU's memory that stays free for activations and other data."""


@with_config(STORED)
@dataclass(frozen=True)
class Workload:
    """The decoded requests, and their distribution over experts."""

    input_tokens: PositiveFloat = 571.0
    """Prompt tokens of a request; like the response tokens, the median of the paper's workload."""
    output_tokens: PositiveFloat = 159.0
    imbalance: PositiveFloat = 1.0
    """Load of the busiest expert node divided by the mean load."""
    combine: Combine = "exact"
    redundancy: NonNegativeFloat = 0.0
    """Share of the expert weights that are stored twice."""

    @property
    def length(self) -> float:
        """Cached tokens of a request half-way through its response."""
        return self.input_tokens + self.output_tokens / 2


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds = max(rows * compute, weights) + rows * slope + fixed.

    `weights` are the seconds to read the matrices.
    """

    compute: float
    weights: float
    slope: float
    fixed: float

    def seconds(self, rows: float) -> float:
        """Return the seconds for a number of rows."""
        busy = rows * self.compute
        return (busy if busy > self.weights else self.weights) + rows * self.slope + self.fixed

    def seconds_per_row(self) -> float:
        """Return the seconds of one more row among many: k1 or k3 of the paper."""
        return self.compute + self.slope


@dataclass(frozen=True, slots=True)
class Measured:
    """Linear interpolation between measured points; beyond the last point, the line through the
    last two.
    """

    rows: tuple[float, ...]
    """Numbers of rows, ascending; at least two."""
    measured: tuple[float, ...]
    """Seconds at the points, never decreasing."""
    slope: float = 0.0
    """Seconds per row of unmeasured parts, such as an all-reduce."""
    fixed: float = 0.0

    def seconds(self, rows: float) -> float:
        """Return the seconds for a number of rows."""
        x, y = self.rows, self.measured
        if rows <= x[0]:
            return y[0] + rows * self.slope + self.fixed
        place = bisect.bisect_left(x, rows, 1, len(x) - 1)
        share = (rows - x[place - 1]) / (x[place] - x[place - 1])
        return y[place - 1] + share * (y[place] - y[place - 1]) + rows * self.slope + self.fixed

    def repeated(self, experts: int) -> Measured:
        """Return the seconds of several experts on one node, from those of one expert."""
        rows = tuple(experts * count for count in self.rows)
        seconds = tuple(experts * value for value in self.measured)
        return Measured(rows, seconds, self.slope, self.fixed)

    def seconds_per_row(self) -> float:
        """Return the seconds of one more row beyond the last point."""
        (x0, x1), (y0, y1) = self.rows[-2:], self.measured[-2:]
        return (y1 - y0) / (x1 - x0) + self.slope


Stage = Roofline | Measured
"""Seconds of one stage for one micro-batch and layer, as a function of rows."""


def matrices_roofline(
    matrices: Sequence[tuple[int, int]], gpu: Gpu, constants: Constants, *, copies: float = 1.0
) -> Roofline:
    """Return the seconds of matrix products with rows, and of their kernels.

    Each row uses one of `copies` matrices of a shape; one kernel computes all copies.
    """
    size = numbers_in(matrices)
    return Roofline(
        compute=2 * size / (gpu.flops * constants.compute_efficiency),
        weights=copies * BYTES * size / (gpu.memory_rate * constants.memory_efficiency),
        slope=0.0,
        fixed=len(matrices) * constants.kernel_seconds,
    )


def all_reduce(width: int, tp: int, gpu: Gpu, constants: Constants) -> tuple[float, float]:
    """Return (seconds per row, fixed seconds) of an all-reduce of rows over `tp` GPUs.

    A row has `width` numbers. Over several nodes the all-reduce is hierarchical: a reduce-scatter
    inside each node, an exchange of each GPU's part over its share of the network, and an
    all-gather inside.
    """
    if tp == 1:
        return 0.0, 0.0
    inside = min(tp, gpu.per_node)
    nodes = tp // inside
    volume = 2 * BYTES * width * (inside - 1) / inside / gpu.link_rate
    volume += 2 * BYTES * width * (nodes - 1) / nodes / inside / gpu.network_rate
    latency = constants.link_seconds * math.log2(inside)
    latency += constants.network_seconds * math.log2(nodes)
    return volume / constants.link_efficiency, latency


def attention_core(
    model: MoeModel, gpu: Gpu, tp: int, length: float, constants: Constants
) -> float:
    """Return the seconds per row of attention over the cached tokens of one layer.

    It is the time to read the KV cache, or the compute time if that is longer (latent
    attention).
    """
    reading = model.kv_bytes(tp) / (gpu.memory_rate * constants.memory_efficiency)
    computing = model.core_flops(tp) / (gpu.flops * constants.compute_efficiency)
    return length * max(reading, computing)


@functools.cache
def attention_stage(
    model: MoeModel,
    gpu: Gpu,
    tp: int,
    length: float,
    constants: Constants,
    *,
    shared_sum: bool = True,
) -> Roofline:
    """Return the seconds of attention and its shared experts, for rows of `length` cached tokens.

    With `shared_sum` the shared experts have their own all-reduce, apart from that of routed
    experts.
    """
    sums = 2 if model.shared_size and shared_sum else 1
    return _layer(model, gpu, tp, length, constants, model.shared_size, sums)


def _layer(
    model: MoeModel,
    gpu: Gpu,
    tp: int,
    length: float,
    constants: Constants,
    size: int,
    sums: int,
) -> Roofline:
    """Return the seconds of attention and a feed-forward network, with some all-reduces."""
    feed_forward = model.feed_forward_matrices(size, tp)
    matrices = matrices_roofline([*model.attention_matrices(tp), *feed_forward], gpu, constants)
    per_row, latency = all_reduce(model.hidden_size, tp, gpu, constants)
    return replace(
        matrices,
        slope=attention_core(model, gpu, tp, length, constants) + sums * per_row,
        fixed=matrices.fixed + sums * latency + constants.kernel_seconds + constants.layer_seconds,
    )


@functools.cache
def expert_stage(
    model: MoeModel, gpu: Gpu, tp: int, experts: int, constants: Constants
) -> Roofline:
    """Return the seconds of a node's experts of one layer, for rows spread evenly over them."""
    pair = model.feed_forward_matrices(model.expert_size, tp)
    matrices = matrices_roofline(pair, gpu, constants, copies=experts)
    per_row, latency = all_reduce(model.hidden_size, tp, gpu, constants)
    fixed = matrices.fixed + latency + constants.layer_seconds
    return replace(matrices, slope=per_row, fixed=fixed)


@functools.cache
def outside_stage(
    model: MoeModel, gpu: Gpu, tp: int, length: float, constants: Constants
) -> Roofline:
    """Return the seconds of the layers without experts and of the logits on an attention node."""
    logits = matrices_roofline([(model.hidden_size, model.vocab_size // tp)], gpu, constants)
    layers = model.dense_layers
    dense = _layer(model, gpu, tp, length, constants, model.dense_size, 2)
    return Roofline(
        compute=logits.compute + layers * dense.compute,
        weights=logits.weights + layers * dense.weights,
        slope=layers * dense.slope,
        fixed=logits.fixed + layers * dense.fixed,
    )


def rows_per_node(model: MoeModel, expert_nodes: int, combine: Combine) -> float:
    """Return the average number of rows that one expert node receives per token."""
    rows = model.experts_per_token / expert_nodes
    if combine == "exact":
        return rows
    local, experts = model.num_experts // expert_nodes, model.num_experts
    chosen = model.experts_per_token
    return 1 - math.comb(experts - local, chosen) / math.comb(experts, chosen)


@dataclass(frozen=True, slots=True)
class Network:
    """Seconds of one direction = max over both sides of (bytes + half) / rate, plus latency."""

    attention_bytes: float
    """Bytes per row of an attention node that each of its GPUs sends."""
    expert_bytes: float
    """Bytes that each GPU of an expert node receives per row of every attention node."""
    attention_rate: float
    expert_rate: float
    half_rate_bytes: float
    latency: float

    def seconds(self, rows: float) -> float:
        """Return the seconds of one direction for the rows of one attention node in a
        micro-batch.
        """
        sent = (rows * self.attention_bytes + self.half_rate_bytes) / self.attention_rate
        received = (rows * self.expert_bytes + self.half_rate_bytes) / self.expert_rate
        return (sent if sent > received else received) + self.latency


def free_bytes(gpu: Gpu, weights: float, constants: Constants) -> float:
    """Return the bytes of a GPU that remain for the KV cache after weights and reserve."""
    return gpu.memory_bytes * (1 - constants.memory_reserve) - weights


def most_rows(seconds: Callable[[float], float], limit: float, bound: int) -> int:
    """Return, by bisection, the most rows below a bound that stay within the time limit."""
    return bisect.bisect_right(range(1, bound), limit, key=seconds)
