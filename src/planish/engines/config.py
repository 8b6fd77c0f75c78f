"""Settings of rollout engines, common to all stages that generate."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from planish.base.config import Needs, Section, setting
from planish.engines import APART, ENGINES

_VLLM = Needs("engine.name", "vllm")
_ANY_VLLM = Needs("engine.name", ("vllm", "vllm_disagg"))
_APART = Needs("engine.name", APART)
RETURNS_EXPERTS = Needs(
    "engine.name",
    ("transformers", *APART),
    "it can not return the experts of a token there",
    beside={"rollout.device": "cpu"},
)
"""Need of the settings that record the experts of each token."""
OLDER_TOKENS = (
    "responses have tokens of policies before the one that trains: take 'token_truncate' or "
    "'bypass'"
)
"""Why training on them needs `algorithm.correction`."""


class EngineConfig(Section):
    """The engine that samples, and its use of the machine."""

    name: str = "transformers"
    """Name of the engine; rollouts, evaluation, pass rates and the probe of the cold start use
    it."""
    tensor_parallel: PositiveInt = setting(1, _VLLM)
    """Ranks that split every layer; each rank has its own accelerator. For dense policies a rank
    may be a process on the CPU."""
    expert_parallel: bool = setting(False, _VLLM)
    """Distribute whole experts over the ranks of `tensor_parallel`, in place of a part of every
    expert on each."""
    quantization: Literal["none", "fp8"] = setting("none", _VLLM)
    """Type of the weights inside the engine, which converts them from the policy's type. It
    works on accelerators only."""
    memory_share: float = setting(0.85, _ANY_VLLM, gt=0.0, le=1.0)
    """Share of each accelerator's memory for weights and cache; the probe of the cold start uses
    `sft.probe_memory_share`."""
    cache_bytes: NonNegativeInt = setting(0, _ANY_VLLM)
    """Bytes of the KV cache on each rank; 0 takes the rest of `memory_share`, on the CPU 1 GiB."""
    attention_ranks: PositiveInt = setting(1, _APART)
    """Processes that compute attention, each with a whole copy of it and with its own requests.
    Every rank of a pod has its own accelerator."""
    expert_ranks: PositiveInt = setting(1, _APART)
    """Processes that share the experts."""
    micro_batches: int = setting(2, Needs("engine.name", "disagg"), ge=1, le=4)
    """Parts into which each attention rank splits its requests. One part computes attention while
    the tokens of the others are at the experts."""
    redundant_experts: NonNegativeInt = setting(0, _APART)
    """Number of replicas of busy experts on each expert rank, in addition to its own experts."""
    transport: Literal["sockets", "nixl"] = setting("sockets", _APART)
    """Transport of hidden states between ranks: TCP through host memory, or NIXL from device memory
    to device memory."""
    peers: tuple[str, ...] = setting((), _APART, strict=False)
    """`host:port` of each rank that runs on another machine as `planish rollout rank`, attention
    ranks first. Empty: the engine starts the ranks on its own machine. Ranks elsewhere need the
    token in PLANISH_RANKS_TOKEN."""
    rank_timeout_seconds: PositiveFloat = setting(60.0, _APART)
    """Longest wait in seconds for an iteration, a weight update or another rank. The start, in
    which ranks read their weights, may take twice as long, and with vLLM at least 15 minutes."""
    batch_tokens: NonNegativeInt = 0
    """Most tokens in one forward pass over prompts; 0: the engine chooses."""
    vllm: dict[str, Any] = setting({}, _ANY_VLLM)
    """Options of vLLM's `EngineArgs` that have no setting here, such as `kv_cache_dtype`,
    `attention_backend`, or on accelerators `speculative_config` of method `ngram`."""
    compile: bool = setting(True, _VLLM)
    """Compile the model and capture CUDA graphs; the start then takes minutes. It has
    effect on accelerators only."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.name not in ENGINES:
            raise ValueError(f"`name` must be one of {sorted(ENGINES)}, got {self.name!r}")
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
        """Ranks of an engine with separate attention and experts."""
        return self.attention_ranks + self.expert_ranks

    @property
    def guesses(self) -> bool:
        """True if vLLM guesses tokens (speculative decoding), so that a step may add several
        tokens.
        """
        return "speculative_config" in self.vllm

    @property
    def start_seconds(self) -> float:
        """Longest wait in seconds until ranks are ready; ranks that wait for each other fail
        earlier.
        """
        return max(2 * self.rank_timeout_seconds, _VLLM_START_S * (self.name == "vllm_disagg"))

    @property
    def frame_tokens(self) -> int:
        """Most tokens of a forward pass over prompts, and of a frame between ranks, with separate
        experts.
        """
        return self.batch_tokens or 512

    def uses(self, name: str) -> bool:
        """Return whether a setting is given, even as its default."""
        return name in self.model_fields_set

    def _off(self) -> list[str]:
        fields = type(self).model_fields
        return [name for name, field in fields.items() if getattr(self, name) == field.default]


TEMPERATURES = (1e-4, 1e4)
"""Smallest and largest temperature above 0. vLLM treats less than 1e-5 as 0, and logits divided by
the temperature must fit float32."""

DEAD_S = 10.0
"""Seconds without an answer to a ping after which a rank counts as dead."""

_VLLM_START_S = 900.0
"""Seconds that vLLM may take to start; without a cache it compiles its kernels for minutes."""

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
"""Options that `engine.vllm` must not set, with the reasons."""

VLLM_SETTINGS = frozenset({"memory_share", "cache_bytes", "batch_tokens", "vllm"})
"""Settings that both engines with vLLM read."""
