"""The model that an engine serves: tensors by name, and modules of transformers if needed.

Importing the modules of a model family takes seconds, so a family of the fused decoder is served
from the files alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from planish.engines.policy_folder import check_policy
from planish.engines.requests import ModelRef
from planish.engines.stops import StopTable, tokenizer_stops
from planish.engines.transformers import fused_decoder
from planish.engines.weights import (
    FolderWeights,
    WeightSource,
    check_weights,
    local_policy,
    without_tied,
)
from planish.models.experts import on_disk
from planish.models.policy import Policy, load_model
from planish.models.tokens import Tokenizer


@dataclass
class ServedModel:
    """A model in memory."""

    architecture: str
    config: Mapping[str, Any]
    tensors: dict[str, Tensor]
    """Weights by their names in transformers; tied weights occur once."""
    tokenizer: Tokenizer
    version: int
    modules: Any = None
    """Causal language model of transformers over the same storage; None until it is needed."""

    @property
    def vocab_size(self) -> int:
        """Number of rows of the LM head."""
        head = self.tensors.get("lm_head.weight")
        if head is None and self.modules is not None:
            head = self.modules.get_output_embeddings().weight
        return int((self.tensors["model.embed_tokens.weight"] if head is None else head).shape[0])

    def stop_table(self) -> StopTable | None:
        """Return the stop table of the tokenizer; None without stop strings.

        Raises:
            ConfigError: the tokenizer does not say which text each token adds.
        """
        return tokenizer_stops(self.tokenizer, self.vocab_size)

    def fits_fused(self) -> bool:
        """Return whether the fused decoder computes this model."""
        return fused_decoder.fits(self.architecture, self.config, list(self.tensors))

    def write(self, source: WeightSource) -> tuple[int, int]:
        """Write `source` in place, a folder only after all its files are read. Return (tensors,
        bytes).

        Raises:
            EngineError: a name is missing or a shape differs; no weight was changed.
        """
        given = source.names()
        # Names of a policy folder, over the same storage.
        wanted = on_disk(self.tensors, self.config)
        check_weights(given, _shapes(wanted))
        # The source's own order may be the order in which its tensors arrive.
        fresh = ((name, source.read(name)) for name in given if name in wanted)
        # Reading from memory cannot fail half-way, and a list would double the memory.
        with torch.no_grad():
            for name, tensor in list(fresh) if source.address else fresh:
                wanted[name].copy_(tensor)
        return len(wanted), sum(tensor.nbytes for tensor in wanted.values())


def open_model(model: ModelRef, device: torch.device, *, fused: bool) -> ServedModel:
    """Load the model of a policy; load its modules only if `fused` is off or does not fit."""
    policy = model.policy
    if policy is None:
        # A policy that is in files already needs no temporary folder.
        folder, version = local_policy(model, ExitStack())
        weights = FolderWeights(folder)
        config, tokenizer = check_policy(folder, weights.names())
        names = config.get("architectures")
        architecture = str(names[0]) if isinstance(names, list) and names else ""
        held = without_tied(weights.names(), config)
        if fused and fused_decoder.fits(architecture, config, list(held)):
            tensors = {name: weights.read(name).to(device, copy=True) for name in held}
            return ServedModel(architecture, config, tensors, tokenizer, version)
        policy = Policy(load_model(folder).to(device), tokenizer, version, folder)
    modules = policy.model.eval()
    saved = modules.state_dict().keys()
    served = ServedModel(
        type(modules).__name__,
        modules.config.to_dict(),
        {
            **{name: parameter.data for name, parameter in modules.named_parameters()},
            **{name: buffer for name, buffer in modules.named_buffers() if name in saved},
        },
        policy.tokenizer,
        int(policy.version),
        modules,
    )
    if model.policy is None:
        check_weights(weights.names(), _shapes(on_disk(served.tensors, served.config)))
    return served


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
