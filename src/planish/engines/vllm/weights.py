"""Changing the weights of a running vLLM: each worker reads the policy's files by itself.

vLLM puts every tensor through the loader of its model again, layer by layer, into the storage that
its kernels and captured graphs already use.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from planish.engines.weights import FolderWeights


@dataclass
class NoSetup(WeightTransferInitInfo):
    """Files need no meeting of processes."""


@dataclass
class PolicyFolder(WeightTransferUpdateInfo):
    """Where the new weights are."""

    folder: str
    """Local folder of safetensors files that every worker of this machine can read."""


class PolicyTransfer(WeightTransferEngine[NoSetup, PolicyFolder]):
    """Weights from the safetensors files of a policy folder."""

    init_info_cls = NoSetup
    update_info_cls = PolicyFolder

    def init_transfer_engine(self, init_info: NoSetup) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Let the model take weights again."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights, and wait for the device where there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: PolicyFolder) -> None:
        """Load every tensor of the folder."""
        weights = FolderWeights(Path(update_info.folder))

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            for name in weights.names():
                yield name, weights.read(name)

        self.model.load_weights(tensors())

    def finish_weight_update(self) -> None:
        """Bring the weights into the form that the kernels read.

        On the CPU vLLM packs the experts of each layer, and an LM head that is tied to the
        embedding, when it loads a model but not when weights change: it would go on with wrong
        ones and say nothing. So they are packed here.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        if not current_platform.is_cpu():
            return
        for layer in self.model.modules():
            method = getattr(layer, "quant_method", None)
            kernel = getattr(method, "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)
            elif isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held."""
