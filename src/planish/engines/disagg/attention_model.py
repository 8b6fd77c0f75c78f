"""The model of an attention rank: a Hugging Face model without its routed experts.

The modules are built without storage. Then a module without parameters replaces the `experts` of
each sparse block. Tensors are read only after that, so no expert weight is ever read or in memory.

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
"""Function (sparse layer from 0, hidden states [n, H], expert ids [n, k], weights [n, k]) ->
weighted sums [n, H] of the experts' outputs."""


class RemoteExperts(nn.Module):
    """Replacement of the experts of one sparse block; it has no parameters."""

    def __init__(self, layer: int, exchange: Exchange) -> None:
        super().__init__()
        self.layer, self.exchange = layer, exchange

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs of this layer's experts for each row, like the module it replaces."""
        return self.exchange(self.layer, hidden, index, weights)


class AttentionModel:
    """The modules of a policy folder and their tensors, without routed experts."""

    def __init__(self, folder: Path, exchange: Exchange, device: torch.device) -> None:
        """Build the modules; `exchange` computes their experts.

        Raises:
            EngineError: the model has no experts.
        """
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
        # Buffers that no file has, e.g. frequencies of rotary embeddings, are computed by the
        # model.
        for module in self.modules.modules():
            module._buffers |= {name: b.to(device) for name, b in module.named_buffers("", False)}
        self.write(self.read(FolderWeights(folder)))

    def read(self, weights: WeightSource) -> dict[str, Tensor]:
        """Return tensors by their names in the model, which does not change yet."""
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
        """Copy tensors that `read` returned into the model."""
        with torch.no_grad():
            for name, value in fresh.items():
                place, _, last = name.rpartition(".")
                module: Any = self.modules.get_submodule(place)
                if last in module._parameters:
                    module._parameters[last] = nn.Parameter(value, requires_grad=False)
                else:
                    module._buffers[last] = value
        self.modules.tie_weights()
