"""What goes into an engine and what comes out: token ids only, never text.

Deliberately left out: prompts as messages, groups as objects, rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from planish.records.rollouts import FinishReason


class EngineState(StrEnum):
    """Life of an engine: new -> ready <-> running or asleep; any -> failed, closed."""

    NEW = "new"
    READY = "ready"
    RUNNING = "running"
    ASLEEP = "asleep"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Sampling:
    """How to sample one response."""

    max_new_tokens: int
    """Budget of this call in tokens, >= 1."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the smallest set of tokens whose probability reaches this; 0 < top_p <= 1."""
    top_k: int = 0
    """Sample from so many likeliest tokens; 0 is off."""
    ignore_eos: bool = False
    """Go on past the end tokens and the stop strings of the model."""
    seed: int = 0
    """Noise of response position t is a hash of (seed, t), whatever the windows."""
    want_routing: bool = False
    """Return the experts that each token was sent to; the engine must be made with `routing`."""


@dataclass(frozen=True)
class Request:
    """One response to generate, or to continue."""

    request_id: str
    """Unique among the requests that are alive."""
    prompt_ids: tuple[int, ...]
    """Prompt after the chat template, at least one token."""
    sampling: Sampling
    response_prefix: tuple[int, ...] = ()
    """Response tokens of earlier windows; never tokenised again."""


@dataclass
class Output:
    """What one request gave; the three lists have equal length."""

    request_id: str
    token_ids: list[int]
    """New tokens of this call; the stop token included."""
    logprobs: list[float]
    """Natural log of each token's probability in the distribution that it was sampled from
    (after temperature, top-k and top-p); at temperature 0 that of temperature 1."""
    versions: list[int]
    """Policy version that sampled each token; never decreasing."""
    finish_reason: FinishReason
    """Why it ended: STOP at an end token or at the token that completes a stop string, LENGTH where
    the budget of this call is used up, or ABORT."""
    routing: np.ndarray | None = None
    """[prompt + response tokens - 1, layers with experts, experts per token], int8 or int16: the
    logical ids of the experts that each token was sent to as an input of this call, prompt and
    prefix included. The last token has been no input yet. -1 where unknown; None where nobody asked
    for it or nothing was sampled."""
    error: str = ""
    """Why this request failed alone, for ABORT: too long a prompt, non-finite logits."""
    is_lost: bool = False
    """It failed with a part of the engine, and not by its own fault: asked again it is served by
    what is left. With an `error` only."""

    @property
    def num_tokens(self) -> int:
        """Count of new tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class ModelRef:
    """Which model an engine serves: a pinned policy, or one that is already in memory."""

    pin: str = ""
    """Pinned URI of a `policy/1` export."""
    folder: str = ""
    """Local folder of a policy whose digests were verified, in place of `pin`."""
    version: int = 0
    """Policy version of `folder`."""
    policy: Any = None
    """A loaded `planish.models.policy.Policy`. The engine may keep weights in a layout of its own:
    change them by `update_weights` only, which writes into this very policy."""


@dataclass(frozen=True)
class WeightUpdate:
    """What a change of weights did."""

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
