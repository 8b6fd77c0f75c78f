"""Settings of rollout engines, the same for every stage that generates."""

from __future__ import annotations

from typing import Literal

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
    in which ranks read their weights. Engines `disagg`, `vllm_disagg`."""
    batch_tokens: int = Field(default=0, ge=0)
    """Most tokens of one forward pass over prompts; 0 is the engine's own choice."""
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
    def frame_tokens(self) -> int:
        """Most tokens of one forward over prompts, with engines apart; frames are as large."""
        return self.batch_tokens or 512

    def _off(self) -> list[str]:
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) == field.default
        ]


DEAD_S = 10.0
"""Silence of a rank, asked whether it lives, after which it counts as dead."""

VLLM_SETTINGS = frozenset({"memory_share", "cache_bytes", "batch_tokens"})
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
