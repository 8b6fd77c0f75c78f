"""Configuration of the policy: a pretrained model by name, or a small one built from scratch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from planish.base.config import Section
from planish.models.tokens import check_stop_strings
from planish.store.sources import parse_source

NUM_SPECIAL_TOKENS = 4
"""pad, bos, eos and unk come before the alphabet."""


class ModelConfig(Section):
    """The policy that a run starts from; the sizes count only while `path` is empty."""

    path: str = ""
    """Pretrained causal language model: a folder, `owner/name` on the hub,
    `hf://owner/name[@revision]`, `s3://bucket/folder`, or `https://...#sha256=<digest>` of a tar
    archive; empty builds one from scratch."""
    revision: str = "main"
    """Branch, tag or commit on the hub, if `path` names none."""
    chat_template: str = ""
    """Jinja chat template of a pretrained tokenizer, in place of its own; empty keeps its own."""
    template_variables: dict[
        Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], bool | int | float | str
    ] = Field(default={})
    """Variables of a pretrained tokenizer's chat template, such as `{enable_thinking = false}`.
    Every export of the policy has their values in its template; the template's date is the day of
    import."""
    stop_strings: list[str] = Field(default_factory=list)
    """Texts that end a response with the token that completes them, beside the end tokens; every
    export of the policy names them in its generation_config.json."""
    end_tokens: list[str] = Field(default_factory=list)
    """Tokens of a pretrained model that end a response, such as `["<|im_end|>"]`. Empty takes the
    end tokens in its tokenizer and its configurations, and the token by which its chat template
    closes an assistant's turn."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the saved weights, and of the weights in rollout engines."""
    head_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the scores of the LM head in trainer and engines; float32 keeps log-probabilities of
    both close (MiniMax-M1, arXiv 2506.13585, section 3.2). On accelerators it sums products of
    numbers in `train.compute_dtype`, or in the type of an engine's weights. A policy has it in its
    config.json; without it there the head is float32."""
    lora_rank: int = Field(default=0, ge=0)
    """Rank of low-rank adapters (LoRA), which train in place of the weights; 0 trains all
    weights. An exported policy has the adapters merged into its weights."""
    lora_alpha: float = Field(default=32.0, gt=0.0)
    """The output of the adapters is multiplied by `lora_alpha / lora_rank` (32 as in TRL); only
    with `lora_rank`."""
    lora_target_modules: list[str] = Field(default_factory=list)
    """Linear layers of each decoder layer that get adapters, such as `q_proj`; empty: all of
    them but those of routed experts; only with `lora_rank`."""
    num_layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    hidden_size: int = Field(default=64, ge=1)
    """Width of the residual stream."""
    intermediate_size: int = Field(default=192, ge=1)
    """Width of the gated feed-forward layer."""
    num_experts: int = Field(default=0, ge=0)
    """Experts of each layer, as in Qwen3-MoE; 0 builds a dense model."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that compute a token; only with `num_experts`."""
    expert_intermediate_size: int = Field(default=64, ge=1)
    """Width of one expert, in place of `intermediate_size`; only with `num_experts`."""
    num_heads: int = Field(default=2, ge=1)
    """Query heads."""
    num_kv_heads: int = Field(default=1, ge=1)
    """Key and value heads; must divide `num_heads`."""
    head_dim: int = Field(default=32, ge=2)
    """Width of one head; even, because of the rotary embedding."""
    initializer_range: float = Field(default=0.08, gt=0.0)
    """Standard deviation of the initial weights."""
    max_model_tokens: int = Field(default=1024, ge=2)
    """Longest prompt plus response, in tokens, for which positions are defined."""
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

    def _off(self) -> list[str]:
        dense = () if self.num_experts else ("experts_per_token", "expert_intermediate_size")
        whole = () if self.lora_rank else ("lora_rank", "lora_alpha", "lora_target_modules")
        tables = ("stop_strings", "end_tokens", "template_variables")
        off = [*dense, *whole, *(key for key in tables if not getattr(self, key))]
        return off + (["head_dtype"] if self.head_dtype == self.dtype == "float32" else [])

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
        """Tokens of the from-scratch tokenizer."""
        return NUM_SPECIAL_TOKENS + len(self.alphabet)
