"""Decoder of any Hugging Face causal language model, one token per row, over the static cache.

The model's own forward pass does the work; a custom `Cache` writes into our rows, and this module
builds the masks. It supports models with full or sliding-window attention, and refuses state-space
and chunked layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from planish.base.errors import EngineError
from planish.engines.transformers.kv_cache import KeyValueCache
from planish.models.packing import cap_attention


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """One layer of the static cache as transformers sees it."""

    is_sliding = False
    is_compileable = False

    def __init__(self, cache: KeyValueCache, index: int) -> None:
        super().__init__()
        self.is_initialized = True
        self.cache, self.index = cache, index
        self.cells: Tensor | None = None
        self.longest = 0
        self.rows = self.owner = torch.empty(0, dtype=torch.int64)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the storage is made at the first write."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new keys and values; return all that the queries may see."""
        if self.cells is not None:
            return self.cache.append(self.index, key_states, value_states, self.cells, self.longest)
        self.cache.fill(self.index, key_states, value_states, self.rows, self.owner)
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (columns, offset); masks are given, so the result has no effect."""
        return (self.longest if self.cells is not None else query_length), 0

    def get_seq_length(self) -> int:
        """Return 0; positions are given, so the result has no effect."""
        return 0

    def get_max_length(self) -> int:
        """Return the width of a row."""
        return self.cache.width


class ModuleDecoder:
    """Decoder over the model's own forward pass."""

    def __init__(self, model: Any, cache: KeyValueCache) -> None:
        cap_attention(model)
        self.model = model
        self.cache = cache
        config = model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        odd = kinds - {"full_attention", "sliding_attention"}
        if odd:
            raise EngineError(
                f"layers must be full or sliding-window attention, got {sorted(odd)} in "
                f"{type(model).__name__}; use another engine for this model"
            )
        has_kinds = hasattr(config, "layer_types")
        self._by_kind = has_kinds and "sliding_attention" in kinds
        slides = self._by_kind or not has_kinds
        self._window = (getattr(config, "sliding_window", None) or 0) if slides else 0
        self._layers = [_RowLayer(cache, i) for i in range(config.num_hidden_layers)]
        self._past = Cache(layers=self._layers)
        self._dtype = next(model.parameters()).dtype

    def refresh(self) -> None:
        """Do nothing: the modules have the weights."""

    def _mask(self, bias: Tensor, positions: Tensor) -> Any:
        """Return `attention_mask` for a causal bias [n, 1, q, k] and query positions [n, q]."""
        full = bias.to(self._dtype)
        if not self._window:
            return full
        columns = torch.arange(bias.shape[-1], device=bias.device)
        far = columns <= positions[:, None, :, None] - self._window
        near = full.masked_fill(far, -torch.inf)
        if self._by_kind:
            return {"full_attention": full, "sliding_attention": near}
        return near

    def prefill(self, tokens: Tensor, rows: Tensor, owner: Tensor) -> None:
        """Fill rows from position 0; see `Decoder.prefill`."""
        length = tokens.shape[1]
        for layer in self._layers:
            layer.cells, layer.rows, layer.owner = None, rows, owner
        positions = torch.arange(length, device=tokens.device).expand_as(tokens)
        causal = torch.full((length, length), -torch.inf, device=tokens.device).triu(1)
        self.model(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=self._mask(causal[None, None], positions[:1]),
            past_key_values=self._past,
            use_cache=True,
            logits_to_keep=1,
        )

    def decode(self, tokens: Tensor, positions: Tensor, cells: Tensor, bias: Tensor) -> Tensor:
        """Add one token to each row; see `Decoder.decode`."""
        for layer in self._layers:
            layer.cells, layer.longest = cells, bias.shape[1]
        logits: Tensor = self.model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._mask(bias[:, None, None], positions[:, None]),
            past_key_values=self._past,
            use_cache=True,
        ).logits
        return logits[:, -1]
