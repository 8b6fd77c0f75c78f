"""The experts of one expert rank: their weights and their SwiGLU networks.

Source: MegaScale-Infer, arXiv 2504.02263, section 3: expert nodes have experts and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from planish.base.errors import EngineError
from planish.engines.weights import WeightSource
from planish.models.experts import expert_names
from planish.models.policy import read_model_config


class Experts(NamedTuple):
    """Weights of the N experts of one layer: intermediate size F, hidden size H."""

    gate_up: Tensor
    """[N, 2 F, H], the gates first."""
    down: Tensor
    """[N, H, F]"""


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Return the product of each row [n, in] with the matrix [N, out, in] of its expert, [n, out].

    `ends` [N] is the end of each expert's rows. On accelerators one kernel computes all experts. On
    the CPU, where this kernel lacks float64, each expert has its own product.
    """
    if not rows.is_cpu:
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends.int())
    result = rows.new_empty(len(rows), weights.shape[1])
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            result[start:end] = functional.linear(rows[start:end], weights[expert])
        start = end
    return result


class ExpertModel:
    """The experts of one rank, layer by layer."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Read the configuration of a policy folder, without weights."""
        self._config = read_model_config(folder)
        self._device = device
        self.num_bytes = 0
        self._layers: list[Experts] = []

    def read(self, weights: WeightSource, held: Sequence[Sequence[int]]) -> list[Experts]:
        """Return this rank's experts from new weights; the experts in use do not change.

        `held` has the expert ids of each sparse layer, in local order.

        Raises:
            EngineError: the model is dense, or its experts are not SwiGLU.
        """
        given = weights.names()
        names = expert_names(list(given), self._config)
        activation = self._config.get("hidden_act")
        if len(names) != len(held) or activation != "silu":
            raise EngineError(
                f"experts must be SwiGLU networks in {len(held)} layers, got {len(names)} layers "
                f"and `hidden_act` {activation!r}; take the engine `transformers`"
            )
        layers = []
        for layer, experts in zip(names, held, strict=True):
            gate_up, down = [], []
            for expert in experts:
                gate, up, last = (weights.read(name) for name in layer[expert])
                self.num_bytes += gate.nbytes + up.nbytes + last.nbytes
                gate_up.append(torch.cat([gate, up]).to(self._device))
                down.append(last.to(self._device))
            layers.append(Experts(torch.stack(gate_up), torch.stack(down)))
        return layers

    def write(self, layers: list[Experts]) -> None:
        """Use experts that `read` returned."""
        self._layers = layers

    @torch.inference_mode()
    def compute(self, layer: int, counts: Tensor, rows: Sequence[Tensor], room: Tensor) -> None:
        """Write the unweighted outputs of the experts for the rows of several senders to `room`.

        Each sender has rows [n, H], sorted by local expert. `room` [sum of n, H] gets the outputs
        in that order, one sender after another. `counts` [senders, local experts], int32 on the
        CPU, is the number of rows for each expert of sparse `layer`. The rows of one expert are
        computed together for all senders.
        """
        experts = self._layers[layer]
        joint = torch.cat([part.to(self._device, non_blocking=True) for part in rows])
        if not len(room):
            return
        counts = counts[:, : len(experts.down)].to(self._device, non_blocking=True)
        local = torch.arange(counts.shape[1], device=self._device).repeat(len(counts))
        local = local.repeat_interleave(counts.flatten(), output_size=len(joint))
        order, ends = local.argsort(stable=True), counts.sum(0).cumsum(0)
        gate, up = grouped_product(joint[order], experts.gate_up, ends).chunk(2, dim=-1)
        result = grouped_product(functional.silu(gate) * up, experts.down, ends)
        room.index_copy_(0, order, result)
