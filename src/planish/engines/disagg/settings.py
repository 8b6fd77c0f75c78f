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
    """One rank of an instance; all but `rank` and `role` are equal on all ranks."""

    rank: int
    """Attention ranks come first, then expert ranks."""
    role: Role
    num_attention: int
    num_expert: int
    micro_batches: int
    rows: int
    """Requests of one micro-batch of one attention rank at once."""
    max_model_len: int
    prefill_tokens: int
    """Most tokens, padding included, of one forward over prompts."""
    folder: str
    version: int
    device: str
    dtype: str
    """Type of the rows, by its name in torch."""
    hidden_size: int
    top_k: int
    local_experts: int
    """Most experts of a layer on one expert rank, with replicas."""
    token: str
    """Secret of this start of the instance, by which its ranks recognise each other."""
    scratch: str
    """Folder of this start of the instance for temporary files."""
    timeout_s: float
    layout: dict[str, Any]
    routing: str = ""
    """Integer type in which attention ranks record the experts of each token; "" records none."""
    transport: str = "sockets"
    """Transport of rows, a value of `engine.transport`."""
    pin: str = ""
    """Pinned URI by which a rank of another machine fetches the policy; empty for `folder`."""
    vllm: dict[str, Any] | None = None
    """Settings of `EngineConfig` for vLLM on the attention side; None for our own."""
    stage_s: tuple[float, float] = (0.0, 0.0)
    """Minimum seconds of a layer on an attention rank and on an expert rank, for measurements."""

    @property
    def attention_ranks(self) -> range:
        """Number of attention ranks."""
        return range(self.num_attention)

    @property
    def expert_ranks(self) -> range:
        """Number of expert ranks."""
        return range(self.num_attention, self.num_attention + self.num_expert)

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest frame; a forward over more sends several, one after another."""
        return max(self.rows, self.prefill_tokens)

    @property
    def limits(self) -> FrameLimits:
        """Sizes of frames."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        # A token sends a rank at most one row for each expert there.
        num_rows = self.max_tokens * min(self.top_k, self.local_experts)
        row_bytes = self.hidden_size * dtype.itemsize
        return FrameLimits(self.micro_batches, num_rows, row_bytes, self.local_experts)

    @property
    def path(self) -> Path:
        """The folder of the policy."""
        return Path(self.folder)

    def plain(self) -> dict[str, Any]:
        """Return this in JSON form."""
        return asdict(self)

    @classmethod
    def parse(cls, plain: Mapping[str, Any]) -> RankSettings:
        """Return what `plain` was given."""
        return cls(**{**plain, "stage_s": tuple(plain["stage_s"])})
