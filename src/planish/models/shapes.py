"""Sizes of a decoder, from its config.json or by the name of a known model; imports no torch.

Norms, biases and routers count if the family has them, so parameter counts are exact for Qwen2,
Qwen3, Llama, Mistral and Mixtral.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.models.experts import num_experts
from planish.models.headers import UNLIMITED, config_size, language_config

MEGATRON_FAMILIES = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""`model_type` of the models for which megatron-core computes the same as transformers."""

PACKED_FAMILIES = frozenset({*MEGATRON_FAMILIES, "mistral"})
"""`model_type` of the transformers decoders that can compute packed rows."""

CAP = "attn_logit_softcapping"
"""Key of config.json: the cap of attention scores, which become `CAP * tanh(scores / CAP)`."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes that determine the memory of a model.

    Example:
        >>> f"{known_shape('Qwen/Qwen2.5-7B').parameters:,}"
        '7,615,616,512'
    """

    layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the feed-forward layer, or of one expert."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_model_tokens: int
    """Longest prompt plus response in tokens."""
    num_experts: int = 0
    """Number of routed experts of each layer; 0 for a dense model."""
    experts_per_token: int = 1
    has_qkv_bias: bool = False
    """True if query, key and value projections have a bias, as in Qwen2."""
    has_qk_norm: bool = False
    """True if queries and keys have a norm for each head, as in Qwen3."""
    family: str = ""
    """`model_type` of config.json."""
    has_windows: bool = False
    """True if some layers have sliding-window attention."""
    beside_megatron: tuple[str, ...] = ()
    """Differences between megatron-core and this model, in words."""
    keeps_scores: bool = False
    """True if attention keeps the scores of all pairs of tokens in memory, e.g. because of a
    cap."""

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of one decoder layer."""
        width, rows = self.hidden_size, self.q_size + 2 * self.kv_size
        attention = width * rows + self.q_size * width
        attention += rows * self.has_qkv_bias + 2 * self.head_dim * self.has_qk_norm
        experts = max(1, self.num_experts)
        router = width * self.num_experts
        return attention + 3 * width * self.intermediate_size * experts + router + 2 * width

    @property
    def expert_parameters(self) -> int:
        """Number of parameters of all routed experts; 0 in a dense model."""
        return 3 * self.hidden_size * self.intermediate_size * self.num_experts * self.layers

    @property
    def adapter_rows(self) -> int:
        """Sum of inputs and outputs of all matrices of a layer, which is the number of parameters
        of its adapters of rank 1.
        """
        heads = 2 * self.q_size + 2 * self.kv_size + 4 * self.hidden_size
        experts = max(1, self.num_experts)
        return heads + 3 * experts * (self.hidden_size + self.intermediate_size)

    @property
    def embedding_parameters(self) -> int:
        """Number of parameters of the embedding; a separate LM head has as many."""
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Number of parameters of the causal language model."""
        return self.body_parameters + (0 if self.tied_embeddings else self.embedding_parameters)

    @property
    def body_parameters(self) -> int:
        """Number of parameters without a separate LM head, as in a critic."""
        return self.embedding_parameters + self.layers * self.layer_parameters + self.hidden_size

    def kv_bytes_per_token(self, bytes_per_number: int) -> int:
        """Return the bytes of the keys and values of one token, over all layers."""
        return 2 * self.layers * self.kv_size * bytes_per_number


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """Return the sizes in a config.json.

    Raises:
        ConfigError: the model has latent attention or layers of several kinds, or a size is
            missing or not a positive whole number.
    """
    config = language_config(config)
    size = functools.partial(config_size, config)
    family = str(config.get("model_type", ""))
    mixed = [
        k for k in ("kv_lora_rank", "first_k_dense_replace", "mlp_only_layers") if config.get(k)
    ]
    if mixed:
        raise ConfigError(
            "memory is planned for models whose layers are alike and keep keys and values, got "
            f"`{mixed[0]}` in the config.json of a {family!r} model; measure it with a short run"
        )
    width, heads = size("hidden_size"), size("num_attention_heads")
    has_experts = bool(num_experts(config))
    keys = ("moe_intermediate_size",) if has_experts and config.get("moe_intermediate_size") else ()
    return ModelShape(
        layers=size("num_hidden_layers"),
        hidden_size=width,
        intermediate_size=size(*keys, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=size("num_key_value_heads", default=heads),
        head_dim=size("head_dim", default=max(1, width // heads)),
        vocab_size=size("vocab_size"),
        tied_embeddings=bool(config.get("tie_word_embeddings")),
        max_model_tokens=size("max_position_embeddings", default=UNLIMITED),
        num_experts=num_experts(config),
        experts_per_token=size("num_experts_per_tok") if has_experts else 1,
        has_qkv_bias=family.startswith("qwen2") or bool(config.get("attention_bias")),
        has_qk_norm=family.startswith("qwen3"),
        family=family,
        has_windows=has_windows(config),
        beside_megatron=tuple(beside_megatron(config)),
        keeps_scores=config.get(CAP) is not None,
    )


def has_windows(config: Mapping[str, Any]) -> bool:
    """Return whether some layers of a decoder have sliding-window attention."""
    if config.get("model_type") in ("mistral", "mixtral"):
        return config.get("sliding_window") is not None
    if "layer_types" not in config and config.get("use_sliding_window"):
        return int(config.get("max_window_layers", 28)) < int(config["num_hidden_layers"])
    return "sliding_attention" in (config.get("layer_types") or ())


def beside_megatron(config: Mapping[str, Any]) -> list[str]:
    """Return the differences between a GPTModel of megatron-core and this model, in words."""
    family, act = config.get("model_type"), config.get("hidden_act", "silu")
    turn = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = turn.get("rope_type", turn.get("type", "default"))
    has_bias = family != "qwen2" and (config.get("attention_bias") or config.get("mlp_bias"))
    faults = {
        f"`model_type` {family!r}": family not in MEGATRON_FAMILIES,
        f"`hidden_act` {act!r}": act != "silu",
        "biases of its projections": has_bias,
        "sliding windows": has_windows(config),
        f"`rope_type` {kind!r}": kind not in ("default", "linear", "llama3"),
    }
    if num_experts(config):
        is_dense = config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1
        faults["layers without experts"] = is_dense
        faults["one expert for each token"] = config.get("num_experts_per_tok") == 1
    return [name for name, is_there in faults.items() if is_there]


def context_fault(
    family: str, heads: int, kv_heads: int, ranks: int, *, has_windows: bool = False
) -> str:
    """Return why `ranks` ranks cannot share the tokens of a decoder's rows; "" if they can.

    Example:
        >>> context_fault("qwen2", 32, 8, 4), context_fault("qwen2", 32, 2, 4)
        ('', '')
        >>> context_fault("qwen2", 12, 4, 8)[:60]
        '`train.context_parallel` must divide the heads of a model, a'
    """
    if ranks > 1 and (has_windows or family not in PACKED_FAMILIES):
        return (
            "`train.context_parallel` must be 1 for a model whose rows can not be packed, got "
            f"{ranks} for {family!r}{' with sliding windows' * has_windows}; take one of "
            f"{', '.join(sorted(PACKED_FAMILIES))} without"
        )
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        return (
            "`train.context_parallel` must divide the heads of a model, and its heads of keys and "
            f"values or be a multiple of them, got {ranks} for {heads} and {kv_heads} (on each of "
            "`train.tensor_parallel` ranks); choose another number of ranks"
        )
    return ""


def built_shape(config: ModelConfig) -> ModelShape:
    """Return the sizes of a model that is built from scratch."""
    return ModelShape(
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        intermediate_size=(
            config.expert_intermediate_size if config.num_experts else config.intermediate_size
        ),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        tied_embeddings=True,
        max_model_tokens=config.max_model_tokens,
        num_experts=config.num_experts,
        experts_per_token=config.experts_per_token if config.num_experts else 1,
        has_qk_norm=True,
        family="qwen3_moe" if config.num_experts else "qwen3",
    )


_QWEN2_5: dict[str, tuple[int, int, int, int, int, int]] = {
    # layers, hidden size, intermediate size, heads, key and value heads, vocabulary
    "0.5b": (24, 896, 4864, 14, 2, 151936),
    "1.5b": (28, 1536, 8960, 12, 2, 151936),
    "3b": (36, 2048, 11008, 16, 2, 151936),
    "7b": (28, 3584, 18944, 28, 4, 152064),
    "14b": (48, 5120, 13824, 40, 8, 152064),
    "32b": (64, 5120, 27648, 40, 8, 152064),
    "72b": (80, 8192, 29568, 64, 8, 152064),
}
_QWEN2_5_NAME = re.compile(
    r"(?:.*/)?qwen2\.5(?:-(?:math|coder))?-(?P<size>[\d.]+b)(?:-instruct)?(?:@.*)?", re.IGNORECASE
)
_TIED = ("0.5b", "1.5b", "3b")
_CONTEXT = 32_768
"""Context length in tokens that every general model of Qwen2.5 supports; some support more."""


def known_shape(name: str) -> ModelShape | None:
    """Return the sizes of a model of the Qwen2.5 family by its name; None for any other name.

    Source: Qwen2.5 technical report, arXiv 2412.15115, table 1, and the config.json of the
    models.
    """
    found = _QWEN2_5_NAME.fullmatch(name.rstrip("/"))
    size = found["size"].lower() if found else ""
    if size not in _QWEN2_5:
        return None
    layers, width, feed_forward, heads, kv_heads, vocabulary = _QWEN2_5[size]
    return ModelShape(
        layers=layers,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width // heads,
        vocab_size=vocabulary,
        tied_embeddings=size in _TIED,
        max_model_tokens=_CONTEXT,
        has_qkv_bias=True,
        family="qwen2",
    )
