"""Log-probabilities, entropies and values of given tokens: the only module that shifts columns.

The hidden state before a token gives the distribution from which the token was sampled, and the
value of the state. This module samples nothing, and knows no mask except the selection in its
arguments.

Source: entropy of the full distribution and float32 numerics as in DAPO, arXiv 2503.14476; values
of the state before each action as in generalised advantage estimation, arXiv 1506.02438, section
2.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from planish.models import selected_states
from planish.models.packing import Packing, cap_attention, product_dtype
from planish.models.policy import add_product, head_dtype, product, project

TOKENS_PER_CHUNK = {"cpu": 1024, "cuda": 8192}
"""Number of selected tokens whose logits are in memory at once, on the CPU and on accelerators."""


class VocabularyPart(Protocol):
    """The part of the vocabulary that this process scores, and reductions over all parts."""

    first: int
    """Id of the first token of this part."""
    size: int
    """Number of tokens of this part; further columns of the scores belong to no token."""

    def share(self, hidden: Tensor) -> Tensor:
        """Return the hidden states; their gradient becomes the sum over all parts."""

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over all parts, without a gradient."""

    def max(self, tensor: Tensor) -> Tensor:
        """Return the elementwise maximum over all parts, without a gradient."""


class WholeVocabulary:
    """A vocabulary in one part."""

    first = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def share(self, hidden: Tensor) -> Tensor:
        """Return the input unchanged: there is no other part."""
        return hidden

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the input unchanged."""
        return tensor

    max = sum


def hidden_before(body: Any, input_ids: Tensor, packing: Packing | None, select: Tensor) -> Tensor:
    """Return the last hidden state before each selected token.

    Args:
        body: decoder of transformers without its head (untyped, hence Any).
        input_ids: [B, S] int64, padded on the right; padding needs no attention mask since
            attention is causal.
        packing: computes rows end to end, without their padding. The body's attention must have
            been changed by `packing.pack_attention`, or must accept `packing` itself. None
            computes all columns.
        select: [B, S] bool; column 0 has no token before it and must be False.

    Returns:
        [K, H] in the body's type, for the K selected tokens in row-major order; under a packing
        with a context only for this rank's tokens.
    """
    extra: dict[str, Any] = {}
    before = select.roll(-1, 1)
    if packing is not None:
        input_ids, before = packing.take(input_ids)[None], packing.take(before)[None]
        extra = {"position_ids": packing.own(packing.positions)[None], "packing": packing}
    if selected_states.fits(body):
        where = before.flatten().nonzero().flatten()
        return selected_states.hidden_at(body, input_ids, where, packing)
    output = body(input_ids=input_ids, use_cache=False, **extra)
    hidden: Tensor = output.last_hidden_state[before]
    return hidden


def targets_here(input_ids: Tensor, packing: Packing | None, select: Tensor) -> Tensor:
    """Return [K] int64, the tokens whose previous states `hidden_before` returns."""
    if packing is None or packing.context is None:
        return input_ids[select]
    return packing.take(input_ids.roll(-1, 1))[packing.take(select.roll(-1, 1))]


def joined(values: Tensor, packing: Packing | None, select: Tensor) -> Tensor:
    """Return the [K] values of all selected tokens, from those for `targets_here`."""
    if packing is None or packing.context is None:
        return values
    before = select.roll(-1, 1)
    here = packing.take(before)
    every = packing.context.join(values.new_zeros(len(here)).index_put((here,), values))
    return every[: len(packing.tokens)][before.flatten()[packing.tokens]]


class TokenScorer(nn.Module):
    """A causal language model that returns log-probabilities in place of logits.

    Its `forward` does the whole computation, so the module can be the root of a sharded module
    tree. The LM head runs only on the selected positions, a chunk of them at a time.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens_per_chunk: int | None = None,
        vocabulary: VocabularyPart | None = None,
        compiles: bool = False,
    ) -> None:
        """Wrap a causal language model of transformers (untyped, hence Any); parameters are shared.

        Args:
            model: model whose LM head gives the scores of `vocabulary`.
            tokens_per_chunk: number of selected tokens whose scores are in memory at once; None
                takes that of `TOKENS_PER_CHUNK`.
            vocabulary: part of the tokens that this process scores; None is all of them.
            compiles: True compiles the steps between the products of the head, which then is whole.
        """
        super().__init__()
        cap_attention(model)
        self.model = model
        self.tokens_per_chunk = tokens_per_chunk
        self.vocabulary = vocabulary
        self.compiles = compiles

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
            temperature: temperature of the distribution that is scored, > 0.
            with_entropy: False returns zeros as entropies and saves their time.

        Returns:
            Log-probabilities and entropies, [K] float32 each, of the K selected tokens in row-major
            order. Gradients flow through the log-probabilities only.
        """
        body = getattr(self.model, self.model.base_model_prefix)
        hidden = hidden_before(body, input_ids, packing, select)
        targets = targets_here(input_ids, packing, select)
        config, head = self.model.config, self.model.get_output_embeddings()
        vocabulary = self.vocabulary or WholeVocabulary(head.weight.shape[0])
        dtype, is_on_cpu = head_dtype(vars(config)), hidden.device.type == "cpu"
        computation = (fused_head() if self.compiles else Head)(
            config,
            temperature,
            vocabulary,
            self.tokens_per_chunk or TOKENS_PER_CHUNK["cpu" if is_on_cpu else "cuda"],
            with_entropy,
            dtype,
            operand_dtype(dtype, hidden),
        )
        given = [vocabulary.share(hidden), head.weight, getattr(head, "bias", None)]
        if computation.operands == dtype:
            given = [None if x is None else x.to(dtype) for x in given]
        apply: Any = _Scores.apply  # untyped in torch
        with torch.autocast(hidden.device.type, enabled=False):
            logprobs, entropy = apply(computation, targets, *given)
        return joined(logprobs, packing, select), joined(entropy, packing, select)


def operand_dtype(dtype: torch.dtype, hidden: Tensor) -> torch.dtype:
    """Return the type in which a trainer multiplies hidden states and weights for these scores."""
    is_exact = hidden.device.type == "cpu" or dtype != torch.float32
    return dtype if is_exact else product_dtype(hidden)


@dataclass(frozen=True)
class Head:
    """Settings of the step from hidden states to log-probabilities, without the head's weights."""

    config: Any
    """Configuration of the model; a family may scale its logits."""
    temperature: float
    vocabulary: VocabularyPart
    chunk: int
    """Number of tokens whose scores are in memory at once."""
    with_entropy: bool
    dtype: torch.dtype = torch.float32
    """Type of the products."""
    operands: torch.dtype = torch.float32
    """Type of what is multiplied."""

    def scores(self, products: Tensor) -> Tensor:
        """Return the scores of [K, part] products of hidden states and weights, in float32."""
        scores = scaled(products.float(), self.config)
        if self.temperature != 1.0:
            scores = scores / self.temperature
        columns = torch.arange(scores.shape[-1], device=scores.device)
        if self.vocabulary.size < len(columns):
            scores = scores.masked_fill(columns >= self.vocabulary.size, -torch.inf)
        return scores

    def places(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the columns of target tokens, [K] int64, and [K] bool, True for targets in this
        part.
        """
        places = targets - self.vocabulary.first
        is_here = (places >= 0) & (places < self.vocabulary.size)
        return places.where(is_here, 0), is_here

    def measure(self, targets: Tensor, products: Tensor) -> Tensor:
        """Return statistics of [k] tokens from their [k, part] products, which are overwritten.

        Returns:
            [4, k] float32: log-probabilities, entropies, the largest score, and the logarithm of
            the sum of exp(score - largest score).
        """
        part, scores = self.vocabulary, self.scores(products)
        if torch.compiler.is_compiling():
            # A graph would write its results back into what it is given.
            scores = scores.clone()
        top = part.max(scores.amax(-1, keepdim=True))
        shares = scores.sub_(top).exp()
        total = part.sum(shares.sum(-1, keepdim=True))
        norm = total.log()
        logprobs = scores.sub_(norm)
        places, is_here = self.places(targets)
        chosen = part.sum(logprobs.gather(-1, places[:, None]).where(is_here[:, None], 0.0))
        entropy = torch.zeros_like(chosen)
        if self.with_entropy:
            # p * log p must be 0, not NaN, for a token with a score of -inf.
            finite = logprobs.clamp_(min=torch.finfo(logprobs.dtype).min)
            entropy = part.sum(-shares.mul_(finite).sum(-1, keepdim=True)) / total
        return torch.cat([chosen, entropy, top, norm], 1).mT

    def slopes(
        self, products: Tensor, targets: Tensor, top: Tensor, norm: Tensor, gradient: Tensor
    ) -> Tensor:
        """Return the gradient of [k, part] products, given that of [k] log-probabilities.

        The gradient with respect to the scores is a one-hot vector minus the softmax.
        """
        scores, pull = torch.func.vjp(self.scores, products)[:2]
        slopes = scores - top[:, None]
        slopes = slopes.sub_(norm[:, None]).exp_().mul_(-gradient[:, None])
        places, is_here = self.places(targets)
        each = torch.arange(len(places), device=places.device)
        slopes[each, places] += gradient * is_here
        of_products: Tensor = pull(slopes)[0]
        return of_products


@functools.cache
def fused_head() -> type[Head]:
    """Return a `Head` whose steps between products are compiled, for any number of rows."""

    class FusedHead(Head):
        measure = torch.compile(Head.measure, dynamic=True)
        slopes = torch.compile(Head.slopes, dynamic=True)

    return FusedHead


class _Scores(torch.autograd.Function):
    """Log-probabilities and entropies, chunk by chunk; the backward pass computes the scores again.

    Source: Megatron-LM, arXiv 1909.08053, section 3 (cross-entropy over parts of a vocabulary).
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head, targets: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.types = [None if x is None else x.dtype for x in (hidden, weight, bias)]
        hidden, weight = hidden.to(head.operands), weight.to(head.operands)
        chunks = zip(*(torch.split(x, head.chunk) for x in (hidden, targets)), strict=True)
        measured = torch.cat(
            [head.measure(t, project(h, weight, bias, head.dtype)) for h, t in chunks], 1
        )
        chosen, entropy, tops, norms = measured
        ctx.head = head
        ctx.save_for_backward(targets, tops, norms, hidden, weight, bias)
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        head: Head = ctx.head
        targets, tops, norms, hidden, weight, bias = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        # Chunks are summed in float32, whatever the type of the products.
        of_hidden, of_weight, of_bias = (
            torch.zeros_like(x, dtype=torch.float32) if needs else None
            for x, needs in zip((hidden, weight, bias), needed, strict=True)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), head.chunk):
                rows = slice(start, start + head.chunk)
                products = project(hidden[rows], weight, bias, head.dtype)
                per_token = targets[rows], tops[rows], norms[rows], gradient[rows]
                slopes = head.slopes(products, *per_token)
                # The products of the gradients need their room.
                del products
                if of_bias is not None:
                    of_bias += slopes.sum(0)
                slopes = slopes.to(head.operands)
                if of_hidden is not None:
                    of_hidden[rows] = product(slopes, weight)
                if of_weight is not None:
                    add_product(of_weight, slopes.mT, hidden[rows])
                del slopes
        found = zip((of_hidden, of_weight, of_bias), ctx.types, strict=True)
        return (None, None, *(None if total is None else total.to(kind) for total, kind in found))


class ValueScorer(nn.Module):
    """A critic that returns the values of selected tokens; its `forward` does the whole
    computation.
    """

    def __init__(self, critic: Any) -> None:
        """Wrap a `planish.models.critic.Critic`; parameters are shared."""
        super().__init__()
        cap_attention(critic.body)
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
        # Values are subtracted from each other, and half precision would hide small advantages.
        with torch.autocast(hidden.device.type, enabled=False):
            scores: Tensor = self.critic.head(hidden.float())
        return joined(scores.squeeze(-1), packing, select)


def scaled(scores: Tensor, config: Any) -> Tensor:
    """Return [K, V] products of an LM head with the scaling that the model's family defines."""
    for name in ("logit_scale", "logits_scale"):
        if getattr(config, name, None) is not None:
            scores = scores * getattr(config, name)
    if getattr(config, "logits_scaling", None) is not None:
        scores = scores / config.logits_scaling
    cap = getattr(config, "final_logit_softcapping", None)
    return scores if cap is None else torch.tanh(scores / cap) * cap
