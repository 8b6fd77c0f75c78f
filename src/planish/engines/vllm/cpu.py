"""Limits of vLLM on the CPU: features that only accelerators have, and sizes that its kernels
need.
"""

from __future__ import annotations

from typing import Any

from planish.base.errors import ConfigError, EngineError
from planish.engines.config import EngineConfig
from planish.models.experts import num_experts

_CPU_VECTOR = 8
"""Vector length of the CPU kernels, in numbers."""


def refuse_on_cpu(settings: EngineConfig, config: dict[str, Any], *, routing: bool) -> None:
    """Refuse features that vLLM has only on accelerators; some would fail at the first token."""
    if settings.quantization != "none":
        raise ConfigError(
            f"`engine.quantization` must be 'none' on the CPU, got {settings.quantization!r}"
        )
    if settings.guesses:
        # Observed with vLLM 0.32: NaN for one in twelve tokens of steps that accepted guesses.
        raise ConfigError(
            "`engine.vllm.speculative_config` must be left out on the CPU, where vLLM gives no "
            f"log-probability for some tokens, got {settings.vllm['speculative_config']}"
        )
    if settings.tensor_parallel > 1 and num_experts(config):
        # Ranks with whole experts crash with a memory fault; ranks with parts accept no new
        # weights.
        raise ConfigError(
            "`engine.tensor_parallel` must be 1 on the CPU for a model with experts, got "
            f"{settings.tensor_parallel}; take an accelerator"
        )
    if routing:
        raise ConfigError(
            "`rollout.keep_routing` must be false with the engine `vllm` on the CPU, which "
            "can not return the experts of a token, and so must `train.replay_routing`, got true; "
            "take the engine `transformers`"
        )
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    head_sizes = CPUAttentionBackend.get_supported_head_sizes()
    check_cpu_sizes(config, head_sizes, settings.tensor_parallel)


def check_cpu_sizes(config: dict[str, Any], head_sizes: list[int], ranks: int) -> None:
    """Refuse sizes that vLLM's CPU kernels do not support.

    Args:
        config: config.json of the model.
        head_sizes: head widths that attention supports.
        ranks: number of ranks that share a matrix.

    Raises:
        EngineError: the message names all sizes that do not fit.
    """
    faults = []
    size = config.get("head_dim")
    if size is None and config.get("num_attention_heads") and "kv_lora_rank" not in config:
        size = int(config["hidden_size"]) // int(config["num_attention_heads"])
    if size is not None and size not in head_sizes:
        faults.append(f"`head_dim` must be one of {head_sizes}, got {size}")
    # Norms and activations are computed in vectors of this many numbers.
    for name, divided in (("hidden_size", 1), ("intermediate_size", ranks)):
        width = int(config.get(name) or 0)
        if width % (_CPU_VECTOR * divided):
            faults.append(f"`{name}` must be a multiple of {_CPU_VECTOR * divided}, got {width}")
    if faults:
        raise EngineError(
            f"{'; '.join(faults)} for vLLM on the CPU; take the engine `transformers`"
        )
