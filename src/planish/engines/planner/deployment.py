"""One deployment: attention replicas and expert nodes on given GPUs, with the times of its stages.

Memory, stages and network are properties of a whole instance; the search chooses its batch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from planish.engines.planner.gpus import Gpu
from planish.engines.planner.models import BYTES, MoeModel
from planish.engines.planner.performance import (
    Constants,
    Measured,
    Network,
    Stage,
    Workload,
    attention_stage,
    expert_stage,
    free_bytes,
    outside_stage,
    rows_per_node,
)
from planish.engines.planner.pipeline import iteration_seconds

Profiles = Mapping[tuple[str, str, int], Measured]
"""Map from (`attention` or `experts`, GPU, tp) to the measured stage, which replaces the computed
one."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of the stages for one micro-batch, in one layer and outside the pipeline."""

    attention: float
    expert: float
    """Seconds on the busiest node."""
    network: float
    """Seconds of one direction between attention and experts."""
    outside: float
    """Seconds of layers without experts and of logits, on the attention node, once per
    iteration."""


@dataclass(kw_only=True)
class Deployment:
    """Attention replicas and expert nodes on given GPUs; they need not fit into memory.

    There are `n_a` attention replicas with `tp_a` GPUs each. There are `n_e` expert nodes with
    `tp_e` GPUs each; `n_e` divides the number of experts.
    """

    model: MoeModel
    workload: Workload
    constants: Constants
    profiles: Profiles
    """Measured stages, which override the `constants`."""
    attention_gpu: Gpu
    expert_gpu: Gpu
    tp_a: int
    tp_e: int
    n_a: int
    n_e: int

    def __post_init__(self) -> None:
        """Compute the stages."""
        model, workload, constants = self.model, self.workload, self.constants
        attention_gpu, expert_gpu = self.attention_gpu, self.expert_gpu
        tp_a, tp_e, n_a, n_e = self.tp_a, self.tp_e, self.n_a, self.n_e
        length, local = workload.length, model.num_experts // n_e
        self.attention: Stage = self.profiles.get(
            ("attention", attention_gpu.name, tp_a)
        ) or attention_stage(model, attention_gpu, tp_a, length, constants)
        """Seconds for the rows of one replica; so are `outside` and `network`."""
        measured = self.profiles.get(("experts", expert_gpu.name, tp_e))
        self.experts: Stage = (
            measured.repeated(local)
            if measured
            else expert_stage(model, expert_gpu, tp_e, local, constants)
        )
        """Seconds for the rows of one expert node."""
        self.outside = outside_stage(model, attention_gpu, tp_a, length, constants)
        crossing = BYTES * model.hidden_size * rows_per_node(model, n_e, workload.combine)
        self.network = Network(
            attention_bytes=crossing * n_e / tp_a,
            expert_bytes=crossing * n_a * workload.imbalance / tp_e,
            attention_rate=attention_gpu.network_rate,
            expert_rate=expert_gpu.network_rate,
            half_rate_bytes=constants.half_rate_bytes,
            latency=constants.network_seconds,
        )
        self.expert_rows = n_a * model.experts_per_token / n_e * workload.imbalance
        """Rows of the busiest expert node per row of each replica."""
        self.row_bytes = length * model.kv_bytes(tp_a) * model.all_layers
        """Bytes of KV cache on one attention GPU for one request."""
        self.free_bytes = free_bytes(attention_gpu, model.attention_bytes(tp_a), constants)
        """Bytes of one attention GPU that remain for the KV cache."""
        self.gpus = tp_a * n_a + tp_e * n_e

    @property
    def sizes(self) -> dict[str, int]:
        """Map from name to number of GPUs, replicas and nodes."""
        return {"tp_a": self.tp_a, "tp_e": self.tp_e, "n_a": self.n_a, "n_e": self.n_e}

    def sum_of(self, figure: str) -> float:
        """Return the sum of `price` or `watts` over all GPUs; NaN if a GPU lacks the figure."""
        a, e = (getattr(gpu, figure) for gpu in (self.attention_gpu, self.expert_gpu))
        return self.tp_a * self.n_a * a + self.tp_e * self.n_e * e if a and e else math.nan

    def times(self, rows: float) -> Times:
        """Return the times of micro-batches with `rows` rows on each replica."""
        return Times(
            self.attention.seconds(rows),
            self.experts.seconds(rows * self.expert_rows),
            self.network.seconds(rows),
            self.outside.seconds(rows),
        )

    def total(self, rows: float, micro_batches: int) -> float:
        """Return the seconds of an iteration: the pipeline's formula, plus the time outside the
        pipeline.

        The time outside is added for each micro-batch, since micro-batches share the attention
        node. The sum is an upper bound, because a part of that time may overlap with the
        experts.
        """
        # The search calls this millions of times, so it creates no object.
        inside = iteration_seconds(
            self.attention.seconds(rows),
            self.experts.seconds(rows * self.expert_rows),
            self.network.seconds(rows),
            micro_batches,
            self.model.layers,
        )
        return inside + micro_batches * self.outside.seconds(rows)

    def most_rows(self, micro_batches: int) -> int:
        """Return the most rows of a micro-batch for which a replica has memory, with all its KV
        caches.
        """
        # The bound is strict: at equality memory does not suffice.
        return max(0, math.ceil(self.free_bytes / (micro_batches * self.row_bytes)) - 1)


def expert_bytes(model: MoeModel, n_e: int, redundancy: float) -> float:
    """Return the bytes of weights of an expert node, which its GPUs share."""
    return BYTES * model.expert_parameters * model.num_experts / n_e * (1 + redundancy)
