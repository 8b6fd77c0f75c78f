"""Model classes that vLLM serves, because `prepare` runs in an image without vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planish.models.headers import language_config

_FAMILIES = """
AXK1 Afmoe Apertus Bloom Cohere2 Cohere2Moe Cohere Dbrx DeepseekV2 DeepseekV32 DeepseekV3
DeepseekV4 Ernie4_5 Ernie4_5_Moe Exaone4 ExaoneMoe Falcon FalconH1 FalconMamba GPTJ Gemma2
Gemma3 Gemma3n Gemma4 Gemma Glm4 Glm4Moe Glm4MoeLite GlmMoeDsa GptOss Granite GraniteMoe
GraniteMoeHybrid GraniteMoeSWA GraniteMoeShared GraniteSWA HYV3 HYV4 HrmText HyperCLOVAX
Inkling Jamba KimiLinear Laguna Lfm2 Lfm2Moe Llama4 Llama LongcatFlash Mamba2 Mamba
MiMoV2Flash MiniCPM3 MiniMaxM2 Ministral3 Mistral Mixtral Nemotron NemotronH OPT OlmoHybrid
Olmoe Phi3 Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next Qwen3_5 Qwen3_5Moe Qwen4Exp StableLm
Zamba2
"""
VLLM = frozenset(f"{family}ForCausalLM" for family in _FAMILIES.split())
"""Causal language models of transformers 5.19 for which vLLM 0.32 has a class; a test in vLLM's
environment compares both lists."""

_WINDOWED = """
Afmoe Apertus Cohere Cohere2 Cohere2Moe DeepseekV4 Exaone4 ExaoneMoe Gemma2 Gemma3 Gemma3n Gemma4
GptOss Granite GraniteMoe GraniteSWA Inkling Laguna Llama MiMoV2Flash MiniMaxM2 NemotronH
"""
WINDOWED = frozenset(f"{family}ForCausalLM" for family in _WINDOWED.split())
"""Models whose class in vLLM has a sliding window for each layer. Other classes of vLLM refuse
layers that differ, or give all layers the window, which is another model."""
_BY_NUMBER = ("qwen2", "qwen2_moe", "qwen3")
"""Types of models in which the first `max_window_layers` layers have no sliding window."""


def window_fault(config: Mapping[str, Any]) -> str:
    """Return why vLLM does not compute the sliding windows of a config.json; "" if it does.

    Example:
        >>> kinds = ["full_attention", "sliding_attention"]
        >>> window_fault({"architectures": ["Gemma2ForCausalLM"], "layer_types": kinds})
        ''
        >>> window_fault({"architectures": ["Qwen2ForCausalLM"], "layer_types": kinds})[:57]
        'windows in some layers of Qwen2ForCausalLM, which vLLM la'
    """
    config = language_config(config)
    kinds, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(kinds, list):
        varies = "sliding_attention" in kinds and len(set(kinds)) > 1
    else:
        varies = (
            config.get("model_type") in _BY_NUMBER
            and bool(config.get("use_sliding_window") and config.get("sliding_window"))
            and isinstance(first, int)
            and 0 < first < int(config.get("num_hidden_layers") or 0)
        )
    name = str((config.get("architectures") or [""])[0])
    if not varies or name in WINDOWED:
        return ""
    return f"windows in some layers of {name}, which vLLM lacks; take the engine 'transformers'"
