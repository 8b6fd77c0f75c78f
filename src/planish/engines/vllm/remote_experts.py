"""Routed experts in other processes: a layer that vLLM builds in place of its own.

The router, shared experts and all other modules stay vLLM's. In any family that vLLM builds on its
fused layer, a sparse block has one `RoutedExperts`, which our class replaces. The replacement has
no parameters, so the experts take no memory in this process and are not read.

Source: MegaScale-Infer, arXiv 2504.02263, section 3 (attention nodes hold all but the experts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from planish.base.errors import EngineError
from planish.engines.vllm.taken import load
from planish.engines.weights import FolderWeights
from planish.models.experts import is_expert

LOAD_FORMAT = "planish_without_experts"
"""Name of the load format that reads all tensors of a policy folder except those of routed
experts."""

Compute = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Function (sparse layer from 0, hidden states [n, hidden], expert ids [n, k] int64, weights [n,
k]) -> weighted sums [n, hidden]."""

_STARTING: ContextVar[bool] = ContextVar("planish_vllm_starts_without_experts", default=False)
"""True while vLLM starts in this thread. Passes that measure memory or warm up then get zeros,
since no expert rank is connected yet. Only `without_experts` sets it."""


class RemoteMethod(FusedMoEMethodBase):  # type: ignore[misc]  # vllm is untyped here
    """vLLM's method for the experts of one layer: it has no weights and calls `compute`."""

    compute: Compute | None = None
    """Function that computes the experts; `connect` sets it."""
    layer_index = 0
    """Number of the sparse layer in the model, from 0."""

    def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
        """Create no weights."""

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """Return None: this process computes no experts."""

    def process_weights_after_loading(self, layer: Any) -> None:
        """Do nothing."""

    def apply(
        self,
        layer: Any,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: Any,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Return the weighted sums of the experts of each row, [n, hidden]."""
        if self.compute is None:
            if _STARTING.get():
                return torch.zeros_like(x)
            raise EngineError(
                f"experts must be connected before vLLM computes rows of a request, got none for "
                f"{layer.layer_name}; call `connect` once `without_experts` has closed"
            )
        weights = topk_weights.to(x.dtype)
        if layer.apply_router_weight_on_input:
            raise EngineError(
                "experts apart need routers whose weights multiply the outputs of experts, got "
                f"one that multiplies their inputs in {layer.layer_name}; take the engine `vllm`"
            )
        return self.compute(self.layer_index, x, topk_ids.long(), weights)


class RemoteRoutedExperts(RoutedExperts):  # type: ignore[misc]  # vllm is untyped here
    """vLLM's layer of routed experts, without weights."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> RemoteMethod:
        return RemoteMethod(moe_config)

    def load_weights(self, weights: Any) -> Iterator[str]:
        """Refuse weights, since they belong on the expert ranks."""
        raise EngineError(
            f"no weight of an expert may be read here, got {[name for name, _ in weights][:3]}"
        )


class WithoutExperts(BaseModelLoader):  # type: ignore[misc]  # vllm is untyped here
    """Loader that reads a policy folder without the routed experts."""

    def download_model(self, model_config: Any) -> None:
        """Do nothing: the folder is local."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """Load the tensors of the policy folder."""
        weights = FolderWeights(Path(model_config.model))
        names = [name for name in weights.names() if not is_expert(name)]
        load(model, ((name, weights.read(name)) for name in names))


@contextmanager
def without_experts() -> Iterator[None]:
    """Let vLLM start models without routed experts in the block, by `LOAD_FORMAT`.

    During the start the experts return zeros for all rows; after the block they never do.
    """
    name = RoutedExperts.__name__
    PluggableLayer.register_oot(name=name)(RemoteRoutedExperts)
    register_model_loader(LOAD_FORMAT)(WithoutExperts)
    token = _STARTING.set(True)
    try:
        yield
    finally:
        _STARTING.reset(token)
        del op_registry_oot[name]


def connect(model: torch.nn.Module, compute: Compute) -> int:
    """Set `compute` in every layer of a loaded model; return the number of layers.

    Raises:
        EngineError: the model has no such layer, because it is dense or has its own experts module.
    """
    methods = [m.quant_method for m in model.modules() if isinstance(m, RemoteRoutedExperts)]
    if not methods:
        raise EngineError(
            f"attention and experts can be apart only in a model with experts that vLLM builds on "
            f"its fused layer, got {type(model).__name__}; take the engine `vllm`"
        )
    for index, method in enumerate(methods):
        method.layer_index, method.compute = index, compute
    return len(methods)
