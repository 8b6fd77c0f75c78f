"""Which model classes vLLM serves: `prepare` runs in an image that has no vLLM to ask."""

from __future__ import annotations

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
"""Causal language models of transformers 5.19 that vLLM 0.32 has a class for; a test in vLLM's
environment compares."""
