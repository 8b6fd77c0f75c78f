"""Input and output of an engine: token ids, never text.

An engine knows no chat messages, groups or rewards.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from planish.engines.config import TEMPERATURES
from planish.records.rollouts import FinishReason

_MOST = 2**63 - 1
"""Largest number in int64."""


class EngineState(StrEnum):
    """States of an engine: new -> ready <-> running or asleep; any state -> failed or closed."""

    NEW = "new"
    READY = "ready"
    RUNNING = "running"
    ASLEEP = "asleep"
    FAILED = "failed"
    CLOSED = "closed"


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling for one response."""

    max_new_tokens: int
    """Most tokens of this call, 1 to 2**63 - 1."""
    temperature: float = 1.0
    """Divisor of the logits, within `TEMPERATURES`; 0 takes the most likely token."""
    top_p: float = 1.0
    """Nucleus sampling: probability that the smallest set of most likely tokens must reach; 0 <
    top_p <= 1."""
    top_k: int = 0
    """Number of most likely tokens to sample from, 0 to 2**63 - 1; 0 is off."""
    ignore_eos: bool = False
    """Ignore the end tokens and the stop strings of the model."""
    seed: int = 0
    """Seed of the noise. The noise of response position t is a hash of (seed, t), whatever the
    windows; 0 to 2**63 - 1."""
    want_routing: bool = False
    """Return the experts of each token; the engine needs `routing`."""

    def fault(self) -> str:
        """Return why no engine can serve these settings; "" if there is no fault.

        Example:
            >>> Sampling(max_new_tokens=1, seed=-1).fault()
            '`seed` must be a whole number of 0 to 9223372036854775807, got -1'
        """
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", 0)):
            number = getattr(self, name)
            if type(number) is not int or not least <= number <= _MOST:
                return f"`{name}` must be a whole number of {least} to {_MOST}, got {_show(number)}"
        coolest, hottest = TEMPERATURES
        heat, share = self.temperature, self.top_p
        if not _is_real(heat) or not (heat == 0 or coolest <= heat <= hottest):
            limits = f"a number, 0 or {coolest:g} to {hottest:g}"
            return f"`temperature` must be {limits}, got {_show(heat)}"
        if not _is_real(share) or not 0 < share <= 1:
            return f"`top_p` must be above 0 and at most 1, got {_show(share)}"
        for name in ("ignore_eos", "want_routing"):
            if type(getattr(self, name)) is not bool:
                return f"`{name}` must be true or false, got {_show(getattr(self, name))}"
        return ""


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: object) -> str:
    """Return the start of a value's text; Python has no text for numbers of thousands of digits."""
    try:
        return f"{value!r:.80}"
    except ValueError:
        return f"one of type {type(value).__name__} that has no text"


@dataclass(frozen=True)
class Request:
    """One response to generate, or to continue."""

    request_id: str
    """Unique among the queued and running requests."""
    prompt_ids: tuple[int, ...]
    """Prompt after the chat template, at least one token."""
    sampling: Sampling
    response_prefix: tuple[int, ...] = ()
    """Response tokens of earlier windows, as they were sampled."""

    def fault(self) -> str:
        """Return why no engine can serve the request; "" if there is no fault."""
        for name in ("prompt_ids", "response_prefix"):
            ids = getattr(self, name)
            if type(ids) is not tuple or not set(map(type, ids)) <= {int}:
                return f"`{name}` must be a tuple of whole numbers, got {_show(ids)}"
            if ids and not -_MOST <= min(ids) <= max(ids) <= _MOST:
                return f"`{name}` must be of ids that int64 holds, got {_show(ids)}"
        if not isinstance(self.sampling, Sampling):
            return f"`sampling` must be a `Sampling`, got {_show(self.sampling)}"
        return self.sampling.fault()


@dataclass
class Output:
    """Output of one request; its three lists have equal length."""

    request_id: str
    token_ids: list[int]
    """New tokens of this call, the stop token included."""
    logprobs: list[float]
    """Natural log of each token's probability under the distribution that it was sampled from
    (after temperature, top-k and top-p); for temperature 0, under that of temperature 1."""
    versions: list[int]
    """Policy version that sampled each token; never decreasing."""
    finish_reason: FinishReason
    """Why the call ended: STOP at an end token or at the token that completes a stop string, LENGTH
    if the call's budget is used up, or ABORT."""
    routing: np.ndarray | None = None
    """[prompt + response tokens - 1, layers with experts, experts per token], int8 or int16: the
    logical ids of the experts of each input token of this call, prompt and prefix included. The
    last token was not an input yet. -1 where unknown; None if the request did not ask for routing
    or no token was sampled."""
    error: str = ""
    """Why this request alone failed, with ABORT: a value of `Sampling` that no engine serves, a
    prompt that is too long, non-finite logits."""
    is_lost: bool = False
    """True if the request failed because a part of the engine did; the rest of the engine serves it
    if it is submitted again. Only with an `error`."""

    @classmethod
    def failed(cls, request_id: str, error: str, *, is_lost: bool = False) -> Output:
        """Return the output of a request whose tokens are lost."""
        return cls(request_id, [], [], [], FinishReason.ABORT, error=error, is_lost=is_lost)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids)


@dataclass(frozen=True)
class ModelRef:
    """The model that an engine serves: a pinned policy, or one that is already in memory."""

    pin: str = ""
    """Pinned URI of a `policy/1` export."""
    folder: str = ""
    """Local folder of a policy whose digests were verified, in place of `pin`."""
    version: int = 0
    """Policy version of `folder`."""
    policy: Any = None
    """A loaded `planish.models.policy.Policy`. The engine may keep weights in its own layout, so
    change them only by `update_weights`, which writes into this policy object."""


@dataclass(frozen=True)
class WeightUpdate:
    """Result of a weight update."""

    version: int
    num_tensors: int
    num_bytes: int
    seconds: float
