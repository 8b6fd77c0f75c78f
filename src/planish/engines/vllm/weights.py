"""Weight updates of a running vLLM: workers read the policy by its address.

The first rank of each tensor-parallel group reads, and vLLM's own broadcast sends the tensors to
the others, so a group reads each byte once from the store. Ranks that are training processes read
from their trainer instead. Every tensor passes its model's loader again, layer by layer, into the
storage that kernels and captured graphs already use.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
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

from planish.engines.vllm.remote_experts import RemoteRoutedExperts
from planish.engines.vllm.taken import load
from planish.engines.weights import WeightSource, fetch_weights
from planish.models.experts import is_expert

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_REUSED_BYTES = 256 << 20
"""Largest block that the C library keeps for reuse, and limit of its unused memory, in bytes."""
_BROADCAST_BYTES = 64 << 20
"""Bytes of one broadcast of tensors to the other ranks of a group."""


@dataclass
class NextWeights(WeightTransferInitInfo):
    """Announcement of the next weights, sent before each update."""

    address: str
    """Address for `fetch_weights`, valid on the machine of each first rank."""


@dataclass
class ReadThem(WeightTransferUpdateInfo):
    """Order to load the announced weights."""


class PolicyTransfer(WeightTransferEngine[NextWeights, ReadThem]):
    """Transfer of weights from the safetensors files of a policy."""

    init_info_cls = NextWeights
    update_info_cls = ReadThem
    _next: WeightSource | None = None
    """Weights that this rank reads; None if another rank reads."""

    @property
    def _group(self) -> Any:
        """Ranks of which the first one reads for all; None if each rank reads for itself."""
        is_trainer = self.parallel_config.distributed_executor_backend == "external_launcher"
        group = get_tp_group()
        return None if is_trainer or group.world_size == 1 else group

    def init_transfer_engine(self, init_info: NextWeights) -> None:
        """Fetch the next weights to this machine and verify all digests; the model does not
        change.
        """
        is_reader = self._group is None or self._group.is_first_rank
        self._next = fetch_weights(init_info.address) if is_reader else None

    def start_weight_update(self) -> None:
        """Prepare the model to load weights again.

        On the CPU every layer is assembled in new memory before it is packed. glibc would return
        blocks of this size to the system each time, and page faults on new blocks would take a
        third of the whole update.
        """
        initialize_layerwise_reload(self.model)
        if current_platform.is_cpu() and platform.libc_ver()[0] == "glibc":
            libc = ctypes.CDLL(None)
            for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
                libc.mallopt(parameter, _REUSED_BYTES)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights, and wait for the device if there is one."""
        self.receive_weights(self.parse_update_info(update_info))
        if not current_platform.is_cpu():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ReadThem) -> None:
        """Load every tensor that this model has."""
        weights, self._next = self._next, None
        names = list(weights.names()) if weights is not None else []
        if any(isinstance(layer, RemoteRoutedExperts) for layer in self.model.modules()):
            names = [name for name in names if not is_expert(name)]
        load(self.model, in_group(weights, names, self._group, self.device))

    def finish_weight_update(self) -> None:
        """Convert the weights into the form that the kernels read.

        On the CPU vLLM packs the experts of each layer, and an LM head that is tied to the
        embedding, when it loads a model but not when weights change. It would silently use old
        weights, so this method packs them.
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
        """Do nothing; there is nothing to free."""


def in_group(
    weights: WeightSource | None, names: Iterable[str], group: Any, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors by name on every rank of a group; only the first rank reads them.

    Args:
        weights: source of the tensors; None on the other ranks.
        names: tensors to read; empty on the other ranks.
        group: vLLM's coordinator of a tensor-parallel group; None if this rank reads alone.
        device: device of the tensors in the broadcast.
    """
    if group is None:
        assert weights is not None
        yield from ((name, weights.read(name)) for name in names)
        return
    left = iter(names)
    while True:
        part: dict[str, torch.Tensor] = {}
        size = 0
        for name in left:
            assert weights is not None
            part[name] = weights.read(name).to(device)
            size += part[name].nbytes
            if size >= _BROADCAST_BYTES:
                break
        part = group.broadcast_tensor_dict(part if group.is_first_rank else None)
        if not part:
            return
        yield from part.items()
