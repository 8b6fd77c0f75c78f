"""The experts of one expert rank: their weights, and the SwiGLU network of each.

Source: MegaScale-Infer, arXiv 2504.02263, section 3: expert nodes hold experts and nothing else.
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


class Expert(NamedTuple):
    """Weights of one expert of width F on a residual stream of width H."""

    gate_up: Tensor
    """[2 F, H], the gate first."""
    down: Tensor
    """[H, F]"""


class ExpertModel:
    """Some experts of each sparse layer."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Read the configuration of a policy folder; no weights yet."""
        self._config = read_model_config(folder)
        self._device = device
        self.num_bytes = 0
        self._layers: list[list[Expert]] = []

    def read(self, weights: WeightSource, held: Sequence[Sequence[int]]) -> list[list[Expert]]:
        """Return experts of some weights; those in use stay.

        `held` has the experts of each sparse layer, in local order. EngineError names a dense
        model, or experts that are not SwiGLU.
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
            local = []
            for expert in experts:
                parts = []
                for name in layer[expert]:
                    parts.append(weights.read(name))
                    self.num_bytes += parts[-1].nbytes
                gate, up, down = parts
                local.append(
                    Expert(torch.cat([gate, up]).to(self._device), down.to(self._device, copy=True))
                )
            layers.append(local)
        return layers

    def write(self, layers: list[list[Expert]]) -> None:
        """Take over experts that `read` gave."""
        self._layers = layers

    @torch.inference_mode()
    def compute(self, layer: int, counts: Tensor, rows: Sequence[Tensor]) -> list[Tensor]:
        """Return the unweighted outputs of the experts for the rows of several senders.

        Each sender has its rows [n, H] on the CPU, sorted by local expert, and gets outputs
        likewise. `counts` [senders, local experts] int32 says how many are for each expert of
        sparse `layer`; the rows of one expert are computed together, whoever sent them.
        """
        outputs = [torch.empty_like(part) for part in rows]
        starts = counts.cumsum(1) - counts
        sizes, places = counts.tolist(), starts.tolist()
        for local, expert in enumerate(self._layers[layer]):
            spans = [
                (sender, places[sender][local], sizes[sender][local])
                for sender in range(len(rows))
                if sizes[sender][local]
            ]
            if not spans:
                continue
            parts = [rows[sender][start : start + size] for sender, start, size in spans]
            joint = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(self._device)
            gate, up = functional.linear(joint, expert.gate_up).chunk(2, dim=-1)
            result = functional.linear(functional.silu(gate) * up, expert.down).to("cpu")
            done = 0
            for sender, start, size in spans:
                outputs[sender][start : start + size] = result[done : done + size]
                done += size
        return outputs
