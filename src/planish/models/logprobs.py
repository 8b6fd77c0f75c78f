"""Log-probabilities, entropies and values of given tokens: the only place that shifts columns.

What belongs to a token comes from the hidden state before it: the distribution that it was sampled
from, and the value of the state in which it was chosen. Nothing here samples or knows a mask but
the selection that it is given.

Source: entropy of the full distribution and float32 numerics as in DAPO, arXiv 2503.14476; values
of the state before each action as in generalised advantage estimation, arXiv 1506.02438, section 2.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from planish.models import selected_states
from planish.models.packing import Packing

TOKENS_PER_CHUNK = 4096
"""Selected tokens whose logits exist in memory at once."""


class VocabularyPart(Protocol):
    """The tokens whose scores this process computes, and how parts become a whole."""

    first: int
    """Id of the first one."""
    size: int
    """How many there are; scores behind them are those of no token."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over all parts; the gradient of the sum is that of each part."""

    def max(self, tensor: Tensor) -> Tensor:
        """Take the largest value of each element over all parts, without a gradient."""


def hidden_before(body: Any, input_ids: Tensor, packing: Packing | None, select: Tensor) -> Tensor:
    """Return the last hidden state before each selected token.

    Args:
        body: decoder of transformers without its head (untyped, hence Any).
        input_ids: [B, S] int64, padded on the right; padding needs no attention mask since
            attention is causal.
        packing: computes rows end to end, without their padding, by a body whose attention
            `packing.pack_attention` has changed, or that takes `packing` itself; None computes all
            columns.
        select: [B, S] bool; column 0 has no token before it and must be False.

    Returns:
        [K, H] in the body's type, of the K selected tokens in row-major order.
    """
    extra: dict[str, Any] = {}
    before = select.roll(-1, 1)
    if packing is not None:
        input_ids, before = packing.take(input_ids)[None], packing.take(before)[None]
        extra = {"position_ids": packing.positions[None], "packing": packing}
    if selected_states.fits(body):
        where = before.flatten().nonzero().flatten()
        return selected_states.hidden_at(body, input_ids, where, packing)
    output = body(input_ids=input_ids, use_cache=False, **extra)
    hidden: Tensor = output.last_hidden_state[before]
    return hidden


class TokenScorer(nn.Module):
    """A causal language model that returns log-probabilities instead of logits.

    Its forward is the whole computation, so that it can be the root of a sharded module tree.
    The LM head runs on the selected positions only, `tokens_per_chunk` of them at a time.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens_per_chunk: int = TOKENS_PER_CHUNK,
        vocabulary: VocabularyPart | None = None,
    ) -> None:
        """Wrap a causal LM of transformers (untyped, hence Any); parameters are shared.

        Args:
            model: its LM head gives the scores of `vocabulary`.
            tokens_per_chunk: selected tokens whose scores exist at once.
            vocabulary: part of the tokens that this process scores; None is all of them.
        """
        super().__init__()
        self.model = model
        self.tokens_per_chunk = tokens_per_chunk
        self.vocabulary = vocabulary

    def forward(
        self,
        input_ids: Tensor,
        packing: Packing | None,
        select: Tensor,
        temperature: float,
        with_entropy: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Score the selected tokens given the tokens before them.

        Args:
            input_ids: [B, S] int64, as for `hidden_before`.
            packing: as for `hidden_before`.
            select: [B, S] bool; column `t` selects the token `input_ids[:, t]`.
            temperature: of the distribution that is scored, > 0.
            with_entropy: False returns zeros as entropies and saves their time.

        Returns:
            Log-probabilities and entropies, [K] float32 each, of the K selected tokens in row-major
            order. Gradients flow through the log-probabilities only.
        """
        body = getattr(self.model, self.model.base_model_prefix)
        hidden = hidden_before(body, input_ids, packing, select)
        targets = input_ids[select]
        return self._score(hidden, targets, temperature, with_entropy)

    def _score(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        step = self.tokens_per_chunk
        if len(targets) <= step:
            return self._score_chunk(hidden, targets, temperature, with_entropy)
        parts: list[tuple[Tensor, Tensor]] = []
        for start in range(0, len(targets), step):
            piece = (hidden[start : start + step], targets[start : start + step])
            if torch.is_grad_enabled():
                # Keeping the logits of all chunks for backward would undo the chunking.
                parts.append(
                    checkpoint(
                        self._score_chunk, *piece, temperature, with_entropy, use_reentrant=False
                    )
                )
            else:
                parts.append(self._score_chunk(*piece, temperature, with_entropy))
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _score_chunk(
        self, hidden: Tensor, targets: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        scores = logits(self.model, hidden).float()
        if temperature != 1.0:
            scores = scores / temperature
        part = self.vocabulary
        if part is None:
            logprobs = torch.log_softmax(scores, dim=-1)
            chosen = logprobs.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
        else:
            logprobs, chosen = log_softmax_of_part(scores, targets, part)
        if not with_entropy:
            return chosen, torch.zeros_like(chosen.detach())
        with torch.no_grad():
            # p * log p is 0, not NaN, where a token is masked out with a logit of -inf. torch's own
            # `entr` takes ten times as long on CPU.
            finite = logprobs.detach().clamp(min=torch.finfo(logprobs.dtype).min)
            entropy = -finite.mul_(logprobs.detach().exp()).sum(-1)
            return chosen, entropy if part is None else part.sum(entropy)


def log_softmax_of_part(
    scores: Tensor, targets: Tensor, part: VocabularyPart
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of a part's tokens, [K, part], and of the targets, [K].

    Source: Megatron-LM, arXiv 1909.08053, section 3 (cross-entropy over parts of a vocabulary).
    """
    is_padding = torch.arange(scores.shape[-1], device=scores.device) >= part.size
    scores = scores.masked_fill(is_padding, -torch.inf)
    top = part.max(scores.detach().amax(-1, keepdim=True))
    total = part.sum((scores - top).exp().sum(-1, keepdim=True)).log() + top
    place = (targets - part.first).unsqueeze(-1)
    is_here = (place >= 0) & (place < part.size)
    own = scores.gather(-1, place.clamp(0, scores.shape[-1] - 1)).where(is_here, 0.0)
    return scores - total, (part.sum(own) - total).squeeze(-1)


class ValueScorer(nn.Module):
    """A critic that returns the values of selected tokens; its forward is the whole computation."""

    def __init__(self, critic: Any) -> None:
        """Wrap a `planish.models.critic.Critic`; parameters are shared."""
        super().__init__()
        self.critic = critic

    def forward(self, input_ids: Tensor, packing: Packing | None, select: Tensor) -> Tensor:
        """Return the value of the state before each selected token.

        Args:
            input_ids: [B, S] int64, as for `hidden_before`.
            packing: as for `hidden_before`.
            select: [B, S] bool; column `t` selects the token `input_ids[:, t]`.

        Returns:
            [K] float32 of the K selected tokens in row-major order.
        """
        hidden = hidden_before(self.critic.body, input_ids, packing, select)
        # Values are subtracted from each other: half precision would drown small advantages.
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = self.critic.head(hidden.float())
        return scores.squeeze(-1)


def logits(model: Any, hidden: Tensor) -> Tensor:
    """Apply the LM head to hidden states with the scaling that the model's family defines.

    Args:
        model: causal LM of transformers.
        hidden: [K, H] last hidden states, after the final norm.

    Returns:
        [K, V] in the model's type.
    """
    scores: Tensor = model.get_output_embeddings()(hidden)
    config = model.config
    for name in ("logit_scale", "logits_scale"):
        if getattr(config, name, None) is not None:
            scores = scores * getattr(config, name)
    if getattr(config, "logits_scaling", None) is not None:
        scores = scores / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return scores if cap is None else torch.tanh(scores / cap) * cap
