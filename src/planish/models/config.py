"""Settings of the policy: a pretrained model, or a small one built from scratch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from planish.base.config import Needs, Section, setting
from planish.models.tokens import check_stop_strings
from planish.store.sources import parse_source

NUM_SPECIAL_TOKENS = 4
"""Number of special tokens (pad, bos, eos, unk), whose ids come before the alphabet's."""


class ModelConfig(Section):
    """The policy with which a run starts; the sizes apply only if `path` is empty."""

    path: str = ""
    """Address of a pretrained causal language model: a folder, `owner/name` on the hub, `hf:
    owner/name[@revision]`, `s3:
    bucket/folder`, or `https:
    ...#sha256=<digest>` of a tar archive. Empty: the run builds a model from scratch."""
    revision: str = "main"
    """Branch, tag or commit on the hub, if `path` names none."""
    chat_template: str = ""
    """Jinja chat template that replaces that of a pretrained tokenizer; empty keeps the
    tokenizer's."""
    template_variables: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str
    ] = setting({}, quiet="template_variables")
    """Variables of a pretrained tokenizer's chat template, such as `{enable_thinking = false}`.
    Every export of the policy has their values in its template. The date in the template is the day
    on which the model was imported."""
    stop_strings: list[str] = setting([], quiet="stop_strings")
    """Texts that end a response, in addition to the end tokens; the response ends with the token
    that completes the text. Every export of the policy names them in its generation_config.json."""
    end_tokens: list[str] = setting([], quiet="end_tokens")
    """Tokens that end a response of a pretrained model, such as `["<|im_end|>"]`. Empty: the end
    tokens in its tokenizer and configurations, and the token with which its chat template closes an
    assistant's turn."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights, and of the weights in rollout engines."""
    head_dtype: Literal["float32", "bfloat16"] = setting("float32", quiet="head_dtype dtype")
    """Type of the scores of the LM head in trainer and engines. float32 keeps the log-probabilities
    of both close together (MiniMax-M1, arXiv 2506.13585, section 3.2). On accelerators the head
    multiplies numbers in `train.compute_dtype`, or in the type of an engine's weights, and adds
    the products in this type. The policy's config.json has the type; without an entry it is
    float32."""
    lora_rank: NonNegativeInt = setting(
        0,
        Needs("train.trainer", "fsdp2", "megatron trains no adapters"),
        quiet="lora_rank",
    )
    """Rank of low-rank adapters (LoRA), which are trained in place of the weights; 0 trains all
    weights. An exported policy has the adapters merged into its weights."""
    lora_alpha: PositiveFloat = setting(32.0, quiet="lora_rank")
    """The output of the adapters is multiplied by `lora_alpha / lora_rank` (32 as in TRL). Only
    with `lora_rank`."""
    lora_target_modules: list[str] = setting([], quiet="lora_rank")
    """Linear layers of each decoder layer that get adapters, such as `q_proj`; empty: all except
    those of routed experts. Only with `lora_rank`."""
    num_layers: PositiveInt = 2
    """Number of decoder layers."""
    hidden_size: PositiveInt = 64
    """Hidden size, the width of the residual stream."""
    intermediate_size: PositiveInt = 192
    """Width of the gated feed-forward layer."""
    num_experts: NonNegativeInt = 0
    """Number of experts of each layer, as in Qwen3-MoE; 0 builds a dense model."""
    experts_per_token: PositiveInt = setting(2, quiet="num_experts")
    """Number of experts that compute each token; only with `num_experts`."""
    expert_intermediate_size: PositiveInt = setting(64, quiet="num_experts")
    """Width of one expert, in place of `intermediate_size`; only with `num_experts`."""
    num_heads: PositiveInt = 2
    """Number of query heads."""
    num_kv_heads: PositiveInt = 1
    """Number of key and value heads; must divide `num_heads`."""
    head_dim: int = Field(32, ge=2)
    """Width of one head; even, because of the rotary embedding."""
    initializer_range: PositiveFloat = 0.08
    """Standard deviation of the initial weights."""
    max_model_tokens: int = Field(1024, ge=2)
    """Longest prompt plus response in tokens; positions are defined up to this length."""
    alphabet: str = "0123456789abcdefghijklmnopqrstuvwxyz+-*/=;:.,()% \n"
    """Characters of the character-level tokenizer; any other character becomes `<unk>`."""

    @field_validator("alphabet")
    @classmethod
    def _each_character_once(cls, alphabet: str) -> str:
        twice = sorted({character for character in alphabet if alphabet.count(character) > 1})
        if twice or not alphabet:
            raise ValueError(
                f"must hold at least one character, and each only once, got {alphabet!r} "
                f"(repeated: {twice}); remove the repeats"
            )
        return alphabet

    @field_validator("path")
    @classmethod
    def _is_address(cls, path: str) -> str:
        if path:
            parse_source(path, key="model.path")
        return path

    @field_validator("stop_strings")
    @classmethod
    def _usable(cls, stop_strings: list[str]) -> list[str]:
        check_stop_strings(stop_strings)
        return stop_strings

    @model_validator(mode="after")
    def _heads_fit(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                "`num_kv_heads` must divide `num_heads` and `head_dim` must be even, got "
                f"{self.num_kv_heads}, {self.num_heads} and {self.head_dim}"
            )
        if self.num_experts and self.experts_per_token > self.num_experts:
            raise ValueError(
                f"`experts_per_token` must be at most `num_experts` ({self.num_experts}), got "
                f"{self.experts_per_token}"
            )
        return self

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the from-scratch tokenizer."""
        return NUM_SPECIAL_TOKENS + len(self.alphabet)
