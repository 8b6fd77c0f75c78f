"""Experts of each token, converted from vLLM's report to the form of an `Output`.

vLLM counts all decoder layers, with 0 for those without experts. It returns the choices in chunks
of positions, but not for a request that was aborted. If other processes compute the experts, our
own layer records the choices instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

_LAYER = re.compile(r"\.layers\.(\d+)\..*\.experts\.")


def layers_with_experts(names: Iterable[str]) -> list[int]:
    """Return the decoder layers that have experts, by the names of a policy folder.

    Example:
        >>> layers_with_experts(["model.layers.3.mlp.experts.0.up_proj.weight", "lm_head.weight"])
        [3]
    """
    return sorted({int(match[1]) for match in map(_LAYER.search, names) if match})


def inputs_routing(
    chunks: Sequence[np.ndarray], layers: Sequence[int], num_inputs: int, dtype: str
) -> np.ndarray | None:
    """Return [num_inputs, layers with experts, experts per token] of `dtype`.

    Args:
        chunks: [positions, decoder layers, experts per token] each, starting at position 0.
        layers: decoder layers with experts.
        num_inputs: number of input tokens; positions in no chunk are -1.
        dtype: `int8` or `int16`.

    Returns:
        None without chunks.

    Example:
        >>> inputs_routing([np.array([[[5], [6]]], np.uint8)], [1], 2, "int8").tolist()
        [[[6]], [[-1]]]
    """
    if not chunks:
        return None
    known = np.concatenate(chunks)[:num_inputs, list(layers)]
    routing = np.full((num_inputs, *known.shape[1:]), -1, dtype)
    routing[: len(known)] = known
    return routing


class SlotRouting:
    """Choices of experts by slot of vLLM's KV cache.

    A slot belongs to one token as long as its keys and values do. If a prompt shares a cached
    prefix with another request, the choices of that prefix are therefore found too.
    """

    def __init__(self, llm: Any, num_layers: int, dtype: str) -> None:
        """Start empty; `llm` has its scheduler in this process."""
        self._scheduler = llm.engine_core.engine_core.scheduler
        group = self._scheduler.kv_cache_config.kv_cache_groups[0]
        self._name, self._block_size = group.layer_names[0], group.kv_cache_spec.block_size
        self._num_layers, self._dtype = num_layers, dtype
        self._slots = np.empty(0, np.int64)
        self._blocks: dict[str, list[int]] = {}
        self._cells: np.ndarray | None = None

    def hear(self, layer: int, index: Tensor) -> None:
        """Record the choices [tokens, k] of one layer with experts in the current forward pass."""
        from vllm.forward_context import get_forward_context

        if layer == 0:
            slots = get_forward_context().slot_mapping
            assert isinstance(slots, dict), "vLLM must not split its batch in two"
            self._slots = slots[self._name].cpu().numpy()
            manager = self._scheduler.kv_cache_manager
            self._blocks = {
                request.request_id: manager.get_block_ids(request.request_id)[0]
                for request in self._scheduler.running
            }
        choices = index.cpu().numpy()
        if self._cells is None:
            num_slots = self._scheduler.kv_cache_config.num_blocks * self._block_size
            shape = (num_slots, self._num_layers, choices.shape[1])
            self._cells = np.full(shape, -1, self._dtype)
        slots = self._slots[: len(choices)]
        self._cells[slots[slots >= 0], layer] = choices[slots >= 0]

    def read(self, internal_id: str, num_inputs: int) -> np.ndarray | None:
        """Return [num_inputs, layers, k] of a request that was in the last forward pass.

        It is -1 everywhere for a request that left the cache before that pass, and None before any
        pass.
        """
        if self._cells is None:
            return None
        if internal_id not in self._blocks:
            return np.full((num_inputs, *self._cells.shape[1:]), -1, self._dtype)
        places = np.arange(num_inputs)
        blocks = np.array(self._blocks[internal_id])[places // self._block_size]
        slots = blocks * self._block_size + places % self._block_size
        return np.asarray(self._cells[slots])
