"""Settings of a rank at its start, as JSON on its standard input."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from planish.engines.disagg.m2n.frames import FrameLimits

Role = Literal["attention", "expert"]


@dataclass(frozen=True)
class RankSettings:
    """Settings of one rank; all but `rank` and `role` are equal on all ranks."""

    rank: int
    """Number of the rank; attention ranks come first, then expert ranks."""
    role: Role
    num_attention: int
    num_expert: int
    micro_batches: int
    rows: int
    """Most requests in one micro-batch of one attention rank."""
    max_model_len: int
    prefill_tokens: int
    """Most tokens, padding included, of one forward pass over prompts."""
    folder: str
    version: int
    device: str
    dtype: str
    """Name in torch of the hidden states' type."""
    hidden_size: int
    top_k: int
    local_experts: int
    """Largest number of experts of a layer on one expert rank, replicas included."""
    token: str
    """Secret of this start of the engine, by which its ranks recognise each other."""
    scratch: str
    """Folder for temporary files of this start of the engine."""
    timeout_s: float
    layout: dict[str, Any]
    routing: str = ""
    """Integer type in which attention ranks record the experts of each token; "" records none."""
    transport: str = "sockets"
    """Transport of hidden states, a value of `engine.transport`."""
    pin: str = ""
    """Pinned URI by which a rank of another machine fetches the policy; empty for `folder`."""
    vllm: dict[str, Any] | None = None
    """Settings of `EngineConfig` for vLLM on attention ranks; None for the engine `disagg`."""
    stage_s: tuple[float, float] = (0.0, 0.0)
    """Minimum seconds of a layer on an attention rank and on an expert rank, for measurements."""

    @property
    def attention_ranks(self) -> range:
        """Numbers of the attention ranks."""
        return range(self.num_attention)

    @property
    def expert_ranks(self) -> range:
        """Numbers of the expert ranks."""
        return range(self.num_attention, self.num_attention + self.num_expert)

    @property
    def max_tokens(self) -> int:
        """Most tokens of a frame; a larger forward pass sends several frames, one after another."""
        return max(self.rows, self.prefill_tokens)

    @property
    def limits(self) -> FrameLimits:
        """Sizes of frames."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        # A token sends an expert rank at most one row for each expert of the rank.
        num_rows = self.max_tokens * min(self.top_k, self.local_experts)
        row_bytes = self.hidden_size * dtype.itemsize
        return FrameLimits(self.micro_batches, num_rows, row_bytes, self.local_experts)

    @property
    def path(self) -> Path:
        """The folder of the policy."""
        return Path(self.folder)

    def plain(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> RankSettings:
        """Restore settings from the result of `plain`."""
        return cls(**{**plain, "stage_s": tuple(plain["stage_s"])})
