"""The model of an attention rank: everything of a Hugging Face model but its routed experts.

The modules are built without storage; then the `experts` of each sparse block are replaced by a
module without parameters; only then tensors are read. So no weight of an expert is read or in
memory.

Source: MegaScale-Infer, arXiv 2504.02263, section 3: attention nodes have all but the experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planish.base.errors import EngineError
from planish.engines.weights import FolderWeights, WeightSource, without_tied
from planish.models.experts import disk_tensors, is_expert
from planish.models.policy import empty_model, read_model_config

Exchange = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Function of the sparse layer (from 0), rows [n, H], expert ids [n, k] and weights [n, k]; returns
the weighted sums [n, H]."""


class RemoteExperts(nn.Module):
    """Replacement of the experts of one sparse block; it has no parameters."""

    def __init__(self, layer: int, exchange: Exchange) -> None:
        super().__init__()
        self.layer, self.exchange = layer, exchange

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of this layer's experts for each row, like the experts module."""
        return self.exchange(self.layer, hidden, index, weights)


class AttentionModel:
    """Modules over the tensors of a policy folder without routed experts."""

    def __init__(self, folder: Path, exchange: Exchange, device: torch.device) -> None:
        """Build the modules; `exchange` computes their experts. EngineError: the model has none."""
        self._device = device
        self.config = read_model_config(folder)
        self.modules = empty_model(folder)
        blocks = [m for m in self.modules.modules() if hasattr(m, "experts") and hasattr(m, "gate")]
        if not blocks:
            raise EngineError(
                f"attention and experts can be apart only in a model that has experts, got "
                f"{type(self.modules).__name__} without any; take the engine `transformers`"
            )
        for layer, block in enumerate(blocks):
            block.experts = RemoteExperts(layer, exchange)
        self.num_bytes = 0
        # What no file holds is computed, such as the frequencies of rotary embeddings.
        for module in self.modules.modules():
            module._buffers |= {name: b.to(device) for name, b in module.named_buffers("", False)}
        self.write(self.read(FolderWeights(folder)))

    def read(self, weights: WeightSource) -> dict[str, Tensor]:
        """Return tensors by their names in memory; the model does not change yet."""
        given = without_tied(weights.names(), self.config)
        exact = {
            *(getattr(self.modules, "_keep_in_fp32_modules", None) or ()),
            *(getattr(self.modules, "_keep_in_fp32_modules_strict", None) or ()),
        }
        fresh = {}
        tied = self.config.get("tie_word_embeddings")
        for name, tensor in self.modules.state_dict().items():
            if tied and name == "lm_head.weight":
                continue
            (part,) = disk_tensors(name, tuple(tensor.shape), self.config)
            if part.name not in given or given[part.name][0] != part.shape:
                raise EngineError(
                    f"weights must fit the model that was started, got {part.name} as "
                    f"{given.get(part.name)} in place of {part.shape}; export the policy again"
                )
            value = weights.read(part.name)
            self.num_bytes += value.nbytes
            if any(re.search(rf"(^|\.){pattern}(\.|$)", name) for pattern in exact):
                value = value.float()
            fresh[name] = value.to(self._device, copy=True)
            del given[part.name]
        if others := [name for name in given if not is_expert(name)]:
            raise EngineError(
                f"weights must fit the model that was started, got {others[:5]}, which it has not "
                f"({len(others)} in all); export the policy again"
            )
        return fresh

    def write(self, fresh: Mapping[str, Tensor]) -> None:
        """Write tensors that `read` returned into the model."""
        with torch.no_grad():
            for name, value in fresh.items():
                place, _, last = name.rpartition(".")
                module: Any = self.modules.get_submodule(place)
                if last in module._parameters:
                    module._parameters[last] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[last] = value
        self.modules.tie_weights()
