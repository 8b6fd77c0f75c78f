"""Mixture-of-experts models for the planner: shapes, from a name or a config.json.

The planner reads no weights. Router, norms and biases do not count in times and memory, since they
are small; the memory reserve covers them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import NonNegativeInt, PositiveInt, with_config

from planish.base.errors import ConfigError
from planish.engines.planner.gpus import STORED
from planish.models.experts import num_experts
from planish.models.headers import MAX_SIZE, config_size, language_config, parse_config

BYTES = 2
"""Size of a weight, an activation or a cached number: bfloat16."""


@with_config(STORED)
@dataclass(frozen=True)
class MoeModel:
    """Shapes of one model."""

    name: str
    """Name in the table, or the folder of its config.json."""
    layers: PositiveInt
    """Number of layers with experts."""
    hidden_size: PositiveInt
    expert_size: PositiveInt
    num_experts: PositiveInt
    experts_per_token: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    """Width of a head; not used with latent attention, and neither is `num_kv_heads`."""
    vocab_size: PositiveInt
    tied_embeddings: bool = False
    dense_layers: NonNegativeInt = 0
    """Number of layers without experts."""
    dense_size: NonNegativeInt = 0
    """Intermediate size of the feed-forward network in layers without experts."""
    shared_size: NonNegativeInt = 0
    """Intermediate size of all shared experts of a layer together."""
    q_rank: NonNegativeInt = 0
    """Rank of the queries in latent attention; 0: queries are not compressed."""
    kv_rank: NonNegativeInt = 0
    """Rank of keys and values in latent attention; 0: grouped-query attention. The next three sizes
    are only for latent attention: the rotary part of a head, its other part, and a value head."""
    rope_dim: NonNegativeInt = 0
    nope_dim: NonNegativeInt = 0
    value_dim: NonNegativeInt = 0

    def attention_matrices(self, tp: int) -> list[tuple[int, int]]:
        """Return (rows, columns) of each attention matrix on one of `tp` GPUs.

        Key and value heads are replicated if there are more GPUs than heads; the compressing
        matrices of latent attention are replicated always. Keys and values of latent attention stay
        compressed: their expanding matrices are applied to the queries and to the result.
        """
        width, heads = self.hidden_size, self.num_heads // tp
        if not self.kv_rank:
            queries = heads * self.head_dim
            keys = self.num_kv_heads * self.head_dim // min(tp, self.num_kv_heads)
            return [(width, queries + 2 * keys), (queries, width)]
        into_queries = heads * (self.nope_dim + self.rope_dim)
        compressed = self.kv_rank + self.rope_dim
        if self.q_rank:
            first = [(width, self.q_rank + compressed), (self.q_rank, into_queries)]
        else:
            first = [(width, into_queries + compressed)]
        absorbed = [(heads * self.nope_dim, self.kv_rank), (self.kv_rank, heads * self.value_dim)]
        return [*first, *absorbed, (heads * self.value_dim, width)]

    def feed_forward_matrices(self, size: int, tp: int) -> list[tuple[int, int]]:
        """Return (rows, columns) of each matrix of a gated feed-forward network; none for size
        0.
        """
        if not size:
            return []
        return [(self.hidden_size, 2 * size // tp), (size // tp, self.hidden_size)]

    def kv_bytes(self, tp: int) -> int:
        """Return the bytes that one of `tp` GPUs caches for a token in one layer."""
        if self.kv_rank:
            return BYTES * (self.kv_rank + self.rope_dim)
        return 2 * BYTES * self.head_dim * self.num_kv_heads // min(tp, self.num_kv_heads)

    def core_flops(self, tp: int) -> int:
        """Return the operations of one of `tp` GPUs per row, cached token and layer."""
        if self.kv_rank:
            return 2 * (self.num_heads // tp) * (2 * self.kv_rank + self.rope_dim)
        return 4 * (self.num_heads // tp) * self.head_dim

    @property
    def all_layers(self) -> int:
        """Number of layers, with and without experts."""
        return self.layers + self.dense_layers

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of one routed expert over all layers: P_e of the paper."""
        return self.layers * 3 * self.hidden_size * self.expert_size

    def splits_over(self, tp: int) -> bool:
        """Return whether GPUs can share the heads evenly; KV heads may be replicated."""
        kv = tp if self.kv_rank else self.num_kv_heads
        return not self.num_heads % tp and not (kv % tp and tp % kv)

    def attention_bytes(self, tp: int) -> int:
        """Return the bytes of weights on one of `tp` GPUs of an attention node."""
        attention = self.all_layers * numbers_in(self.attention_matrices(tp))
        shared = self.layers * numbers_in(self.feed_forward_matrices(self.shared_size, tp))
        dense = self.dense_layers * numbers_in(self.feed_forward_matrices(self.dense_size, tp))
        tables = (1 if self.tied_embeddings else 2) * self.vocab_size * self.hidden_size // tp
        return BYTES * (attention + shared + dense + tables)


def numbers_in(matrices: Sequence[tuple[int, int]]) -> int:
    """Return the numbers of all matrices together."""
    return sum(rows * columns for rows, columns in matrices)


MODELS: dict[str, MoeModel] = {
    model.name: model
    for model in (
        MoeModel("mixtral-8x22b", 56, 6144, 16384, 8, 2, 48, 8, 128, 32768),
        MoeModel("dbrx", 40, 6144, 10752, 16, 4, 48, 8, 128, 100352),
        MoeModel("scaled-moe", 48, 8192, 8192, 32, 4, 64, 8, 128, 32768),
        MoeModel("qwen3-235b", 94, 4096, 1536, 128, 8, 64, 4, 128, 151936),
        MoeModel("qwen3-30b", 48, 2048, 768, 128, 8, 32, 4, 128, 151936),
        MoeModel(
            name="deepseek-v3",
            layers=58,
            hidden_size=7168,
            expert_size=2048,
            num_experts=256,
            experts_per_token=8,
            num_heads=128,
            num_kv_heads=128,
            head_dim=128,
            vocab_size=129280,
            dense_layers=3,
            dense_size=18432,
            shared_size=2048,
            q_rank=1536,
            kv_rank=512,
            rope_dim=64,
            nope_dim=128,
            value_dim=128,
        ),
    )
}
"""Published models by name. We assume that Scaled-MoE, a model of the paper, has the vocabulary of
Mixtral and 64 heads of 128."""


def find_model(text: str) -> MoeModel:
    """Return a model by its name, or by the path of a config.json or its folder."""
    if text.lower() in MODELS:
        return MODELS[text.lower()]
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(
            f"`--model` must be one of {', '.join(MODELS)} or a config.json, got {text!r}; "
            "choose a name or give the path of a file"
        )
    return model_of(parse_config(path.read_bytes(), str(path)), path.resolve().parent.name)


def model_of(config: Mapping[str, Any], name: str) -> MoeModel:
    """Return the shapes in a config.json of any family with experts, or raise ConfigError.

    Keys are those of Qwen3-MoE, Mixtral and DeepSeek-V3; a family with these keys needs no
    entry.
    """
    config = language_config(config)
    experts = num_experts(config)
    if not experts:
        raise ConfigError(
            f"the model must have routed experts, got a dense one ({config.get('model_type')!r}, "
            "without `num_experts`, `num_local_experts` and `n_routed_experts`); a dense model has "
            "nothing to disaggregate"
        )
    size = functools.partial(config_size, config)
    optional = functools.partial(size, least=0, default=0)
    layers, heads = size("num_hidden_layers"), size("num_attention_heads")
    step = max(1, optional("decoder_sparse_step", "moe_layer_freq", default=1))
    first, listed = optional("first_k_dense_replace"), config.get("mlp_only_layers") or []
    offset = 1 if "decoder_sparse_step" in config else 0
    if not isinstance(listed, list):
        raise ConfigError(
            f"`mlp_only_layers` of config.json must be a list, got {listed!r}; correct the file"
        )
    sparse = sum(
        layer >= first and layer not in listed and (layer + offset) % step == 0
        for layer in range(layers)
    )
    expert_size = size("moe_intermediate_size", "intermediate_size")
    shared = optional("n_shared_experts") * expert_size
    latent = optional("kv_lora_rank")
    chosen = size("num_experts_per_tok")
    if not sparse or not chosen <= experts <= MAX_SIZE:
        raise ConfigError(
            "config.json must describe at least one layer with experts and at most as many experts "
            f"per token as experts, got {sparse} layers, {chosen} of {experts}; correct the file"
        )
    return MoeModel(
        name=name,
        layers=sparse,
        hidden_size=size("hidden_size"),
        expert_size=expert_size,
        num_experts=experts,
        experts_per_token=chosen,
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=size("hidden_size") // heads),
        vocab_size=size("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        dense_layers=layers - sparse,
        dense_size=optional("intermediate_size") if sparse < layers else 0,
        shared_size=optional("shared_expert_intermediate_size", default=shared),
        q_rank=optional("q_lora_rank") if latent else 0,
        kv_rank=latent,
        rope_dim=size("qk_rope_head_dim") if latent else 0,
        nope_dim=size("qk_nope_head_dim") if latent else 0,
        value_dim=size("v_head_dim") if latent else 0,
    )
