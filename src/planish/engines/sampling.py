"""Choice of tokens: inverse CDF with noise that is a hash of (seed, response position).

Noise that depends on a counter, not on a generator's stream, makes a response independent of the
other rows of its batch, of the order in which rows finish, and of its windows. This holds up to
rounding: logits of another batch size differ in their last bits, and noise near the border between
two tokens may then choose the other token. There are no penalties and there is no beam search.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


def request_seed(run_seed: int, iteration: int, prompt_id: str, sample_index: int) -> int:
    """Return the 63-bit seed of one sample of one prompt.

    Equal arguments give equal seeds on every machine, whatever the shards, retries and order of
    requests.
    """
    text = f"{run_seed}/{iteration}/{prompt_id}/{sample_index}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift int64 as if it were unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 by the finaliser of SplitMix64 (products wrap modulo 2**64)."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def noise(seeds: Tensor, positions: Tensor) -> Tensor:
    """Return a uniform float64 in (0, 1) for each pair of a seed and a position from 0.

    Both arguments are int64 and broadcast. The result has 32 random bits and is never 0 or 1.

    Source: the mixing function of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014, figure 17).
    """
    bits = _shift_right(_mix(_mix(seeds + _GOLDEN) + positions * _GOLDEN), 32)
    return (bits.to(torch.float64) + 0.5) * 2.0**-32


@dataclass(frozen=True)
class Choice:
    """Sampling settings of the rows of one step; a field is None if no row uses it."""

    temperature: Tensor | None = None
    """[rows] float32, 1 for greedy rows."""
    greedy: Tensor | None = None
    """[rows] bool."""
    top_k: Tensor | None = None
    """[rows] int64; the vocabulary size if off."""
    top_p: Tensor | None = None
    """[rows] float32."""


PLAIN = Choice()
"""Temperature 1 without top-k and top-p."""


def _truncate(logprobs: Tensor, choice: Choice) -> Tensor:
    """Keep the top-k and then the top-p tokens of each row, and normalise again."""
    ordered, order = torch.sort(logprobs, dim=-1, descending=True, stable=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if choice.top_k is not None:
        ranks = torch.arange(ordered.shape[-1], device=ordered.device)
        drop |= ranks >= choice.top_k[:, None]
    if choice.top_p is not None:
        kept = torch.log_softmax(ordered.masked_fill(drop, -torch.inf), dim=-1).exp()
        before = kept.cumsum(-1, dtype=torch.float64) - kept
        drop |= (before >= choice.top_p[:, None]) & (choice.top_p[:, None] < 1.0)
    drop[:, 0] = False
    masked = torch.empty_like(logprobs).scatter_(-1, order, ordered.masked_fill(drop, -torch.inf))
    return torch.log_softmax(masked, dim=-1)


def choose(logits: Tensor, uniform: Tensor, choice: Choice = PLAIN) -> tuple[Tensor, Tensor]:
    """Choose one token per row.

    Args:
        logits: [rows, vocabulary], any float dtype; -inf for tokens that are forbidden.
        uniform: [rows] float64 in (0, 1).
        choice: settings of the rows.

    Returns:
        Token ids [rows] int64, and their log-probabilities [rows] float32 under the distribution
        that was sampled from (of temperature 1 for greedy rows). A row with NaN or +inf logits
        gives
        a log-probability that is not finite, and a token that must not be used.
    """
    raw = logits.float()
    if choice.temperature is not None:
        raw = raw / choice.temperature[:, None]
    logprobs = torch.log_softmax(raw, dim=-1)
    if choice.top_k is not None or choice.top_p is not None:
        logprobs = _truncate(logprobs, choice)
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    # `right` finds the first sum above the target, so never a token of probability 0
    ids = torch.searchsorted(cumulative, target, right=True)
    ids.clamp_(max=logprobs.shape[-1] - 1)
    if choice.greedy is not None:
        plain = torch.log_softmax(logits.float(), dim=-1)
        ids = torch.where(choice.greedy[:, None], plain.argmax(-1, keepdim=True), ids)
        logprobs = torch.where(choice.greedy[:, None], plain, logprobs)
    return ids.squeeze(-1), logprobs.gather(-1, ids).squeeze(-1)
