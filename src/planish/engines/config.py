"""Settings of rollout engines, the same for every stage that generates."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from planish.base.config import Section
from planish.engines import ENGINES


class EngineConfig(Section):
    """Which engine samples, and how it uses its machine."""

    name: str = "transformers"
    """Key in the table of engines; rollouts, evaluation and pass rates use the same one."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share every layer; each has an accelerator of its own. Engine `vllm`."""
    expert_parallel: bool = False
    """Give each of those ranks whole experts in place of a part of every expert. Engine `vllm`."""
    quantization: Literal["none", "fp8"] = "none"
    """Type of the weights while they serve; they are read and changed in the policy's own. Engine
    `vllm` on accelerators."""
    memory_share: float = Field(default=0.85, gt=0.0, le=1.0)
    """Share of each accelerator's memory for weights and cache. Engine `vllm`."""
    cache_bytes: int = Field(default=0, ge=0)
    """Bytes of the cache of keys and values on each rank; 0 takes what `memory_share` leaves, on
    the CPU 1 GiB. Engine `vllm`."""
    batch_tokens: int = Field(default=0, ge=0)
    """Most tokens of one forward pass over prompts; 0 is the engine's own choice."""
    compile: bool = True
    """Compile the model and capture its graphs, which takes minutes at the start. Engine `vllm` on
    accelerators."""

    @model_validator(mode="after")
    def _check(self) -> EngineConfig:
        if self.name not in ENGINES:
            raise ValueError(f"`name` must be one of {sorted(ENGINES)}, got {self.name!r}")
        foreign = [key for key in self.model_fields_set if key in _OF_VLLM]
        if self.name != "vllm" and foreign:
            raise ValueError(
                f"`{sorted(foreign)[0]}` must be left out with the engine {self.name!r}, got "
                f"{getattr(self, sorted(foreign)[0])!r}; only `vllm` has it"
            )
        return self

    def _off(self) -> list[str]:
        return [
            name
            for name, field in type(self).model_fields.items()
            if getattr(self, name) == field.default
        ]


_OF_VLLM = frozenset(EngineConfig.model_fields) - {"name", "batch_tokens"}
