"""Settings of rollout engines, the same for every stage that generates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from planish.base.config import Section
from planish.engines import APART, ENGINES


class EngineConfig(Section):
    """Which engine samples, and how it uses its machine."""

    name: str = "transformers"
    """Key in the table of engines; rollouts, evaluation, pass rates and the probe of the cold
    start use the same one."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every layer; each has an accelerator of its own, or is a process on the CPU,
    for dense policies. Engine `vllm`."""
    expert_parallel: bool = False
    """Give each of those ranks whole experts in place of a part of every expert. Engine `vllm`."""
    quantization: Literal["none", "fp8"] = "none"
    """Type of the weights while they serve; they are read and changed in the policy's own. Engine
    `vllm` on accelerators."""
    memory_share: float = Field(default=0.85, gt=0.0, le=1.0)
    """Share of each accelerator's memory for weights and cache; beside the cold start it is
    `sft.probe_memory_share`. Engines `vllm`, `vllm_disagg`."""
    cache_bytes: int = Field(default=0, ge=0)
    """Bytes of the cache of keys and values on each rank; 0 takes what `memory_share` leaves, on
    the CPU 1 GiB. Engines `vllm`, `vllm_disagg`."""
    attention_ranks: int = Field(default=1, ge=1)
    """Processes that hold attention and the requests, each with whole copies; every rank of a pod
    has an accelerator of its own. Engines `disagg`, `vllm_disagg`."""
    expert_ranks: int = Field(default=1, ge=1)
    """Processes that hold the experts between them. Engines `disagg`, `vllm_disagg`."""
    micro_batches: int = Field(default=2, ge=1, le=4)
    """Parts of the requests of each attention rank; one computes while the rows of the others are
    at the experts. Engine `disagg`."""
    redundant_experts: int = Field(default=0, ge=0)
    """Replicas of busy experts that each expert rank holds besides its own. Engines `disagg`,
    `vllm_disagg`."""
    transport: Literal["sockets", "nixl"] = "sockets"
    """What carries rows between ranks: TCP by way of the host's memory, or NIXL from the memory of
    one device into that of another. Engines `disagg`, `vllm_disagg`."""
    peers: tuple[str, ...] = Field(default=(), strict=False)
    """`host:port` of each rank that runs elsewhere as `planish rollout rank`, attention ranks
    first; empty starts the ranks beside the engine. Needs the token in PLANISH_RANKS_TOKEN.
    Engines `disagg`, `vllm_disagg`."""
    rank_timeout_seconds: float = Field(default=60.0, gt=0.0)
    """Longest wait for an iteration, a change of weights or another rank; twice that for the start,
    in which ranks read their weights, and 15 minutes at least where vLLM starts as well. Engines
    `disagg`, `vllm_disagg`."""
    batch_tokens: int = Field(default=0, ge=0)
    """Most tokens of one forward pass over prompts; 0 is the engine's own choice."""
    vllm: dict[str, Any] = Field(default={})
    """Options of vLLM's `EngineArgs` that have no setting here, such as `kv_cache_dtype`,
    `attention_backend`, or on accelerators `speculative_config` of method `ngram`. Engines `vllm`,
    `vllm_disagg`."""
    compile: bool = True
    """Compile the model and capture its graphs, which takes minutes at the start. Engine `vllm` on
    accelerators."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.name not in ENGINES:
            raise ValueError(f"`name` must be one of {sorted(ENGINES)}, got {self.name!r}")
        for key in sorted(self.model_fields_set & _OWNERS.keys()):
            if self.name not in _OWNERS[key]:
                raise ValueError(
                    f"`{key}` must be left out with the engine {self.name!r}, got "
                    f"{getattr(self, key)!r}; it belongs to "
                    + " and ".join(f"`{name}`" for name in _OWNERS[key])
                )
        for option in sorted(self.vllm.keys() & VLLM_OURS.keys()):
            raise ValueError(
                f"`vllm` must leave out `{option}`, got {self.vllm[option]!r:.80}; "
                + VLLM_OURS[option]
            )
        guesses = self.vllm.get("speculative_config", {"method": "ngram"})
        if not isinstance(guesses, dict) or guesses.get("method") != "ngram":
            raise ValueError(
                "`vllm.speculative_config` must have the method 'ngram', got "
                f"{guesses!r:.80}; a model that guesses would stay as it was at the start"
            )
        if self.guesses and self.name != "vllm":
            raise ValueError(
                "`vllm.speculative_config` must be left out with the engine 'vllm_disagg', got "
                f"{guesses!r:.80}; frames between ranks have no room for guesses"
            )
        num_ranks = self.num_ranks
        if self.peers and (len(set(self.peers)) != num_ranks or len(self.peers) != num_ranks):
            raise ValueError(
                f"`peers` must name each of the {num_ranks} ranks once, got {list(self.peers)}; "
                "give `attention_ranks` addresses of attention ranks and `expert_ranks` of others"
            )
        return self

    @property
    def num_ranks(self) -> int:
        """Ranks of an engine whose attention and experts are apart."""
        return self.attention_ranks + self.expert_ranks

    @property
    def guesses(self) -> bool:
        """Whether vLLM guesses tokens, and takes several in a step."""
        return "speculative_config" in self.vllm

    @property
    def start_seconds(self) -> float:
        """Longest wait until ranks are ready; those that wait for each other give up before."""
        return max(2 * self.rank_timeout_seconds, _VLLM_START_S * (self.name == "vllm_disagg"))

    @property
    def frame_tokens(self) -> int:
        """Most tokens of one forward over prompts, with engines apart; frames are as large."""
        return self.batch_tokens or 512

    def _off(self) -> list[str]:
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) == field.default
        ]


TEMPERATURES = (1e-4, 1e4)
"""Least and greatest above 0: vLLM takes less than 1e-5 for 0, and quotients of logits must be
numbers of float32."""

DEAD_S = 10.0
"""Silence of a rank, asked whether it lives, after which it counts as dead."""

_VLLM_START_S = 900.0
"""vLLM alone takes minutes where its kernels are compiled from cold."""

_CHOSEN = "the engine itself chooses it"
_FIXED = "it would change the model, or run other code than this engine's"
VLLM_OURS = {
    "tensor_parallel_size": "set `engine.tensor_parallel`",
    "enable_expert_parallel": "set `engine.expert_parallel`",
    "quantization": "set `engine.quantization`",
    "gpu_memory_utilization": "set `engine.memory_share`",
    "kv_cache_memory_bytes": "set `engine.cache_bytes`",
    "max_num_batched_tokens": "set `engine.batch_tokens`",
    "enforce_eager": "set `engine.compile`",
    "max_num_seqs": "set `rollout.max_rows`",
    "max_model_len": "set `rollout.max_response_tokens` and `rollout.max_prompt_tokens`",
    "dtype": "set `model.dtype`",
    "enable_return_routed_experts": "set `rollout.keep_routing`",
    "model": "set `model.path`",
    **dict.fromkeys(
        (
            *("skip_tokenizer_init", "load_format", "generation_config", "enable_chunked_prefill"),
            *("distributed_executor_backend", "enable_sleep_mode", "compilation_config"),
            *("logprobs_mode", "weight_transfer_config", "worker_extension_cls"),
            *("disable_log_stats", "async_scheduling"),
        ),
        _CHOSEN,
    ),
    **dict.fromkeys(
        (
            *("tokenizer", "trust_remote_code", "hf_overrides", "worker_cls", "scheduler_cls"),
            *("logits_processors", "enable_lora", "pipeline_parallel_size", "data_parallel_size"),
        ),
        _FIXED,
    ),
}
"""Options of vLLM that `engine.vllm` must leave out, and why."""

VLLM_SETTINGS = frozenset({"memory_share", "cache_bytes", "batch_tokens", "vllm"})
"""Of vLLM wherever it runs, the attention side of experts apart included."""

_OWNERS = {
    **dict.fromkeys(set(EngineConfig.model_fields) - {"name", "batch_tokens"}, ("vllm",)),
    **dict.fromkeys(VLLM_SETTINGS - {"batch_tokens"}, ("vllm", "vllm_disagg")),
    "attention_ranks": APART,
    "expert_ranks": APART,
    "micro_batches": ("disagg",),
    "redundant_experts": APART,
    "transport": APART,
    "peers": APART,
    "rank_timeout_seconds": APART,
}
"""Settings that not every engine has, and the engines that have them."""
