"""Losses of tokens and their aggregation; denominators are those of a whole optimizer step.

This module has no models: inputs are log-probabilities, advantages and masks.

Source: PPO arXiv 1707.06347 equation 7; DAPO arXiv 2503.14476 section 3.1 (asymmetric clip) and 3.3
(token-level loss); dual clip arXiv 1912.09729 equation 5; the estimators of KL divergence are those
of J. Schulman, "Approximating KL divergence" (2020); k3 is also in GRPO arXiv 2402.03300, equation
4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from planish.algorithms.base import Denominators
from planish.algorithms.masked import hidden, masked_sum

if TYPE_CHECKING:
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0
"""Bound of differences of log-probabilities, so that a ratio is always finite."""

Aggregation = Literal[
    "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-sum-norm", "batch-token"
]
KlEstimator = Literal["k1", "k2", "k3"]


def policy_ratio(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """Return exp(logprobs - old_logprobs), with the difference clamped to +-20."""
    return (logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> Tensor:
    """Return the clipped policy loss of each token (to minimise).

    Args:
        ratio: policy / old policy, any shape.
        advantages: same shape.
        clip_low: the ratio is kept above 1 - clip_low where that lowers the loss.
        clip_high: the ratio is kept below 1 + clip_high where that lowers the loss.
        dual_clip: > 1; bounds the loss of tokens with a negative advantage by this factor.

    Source: DAPO, arXiv 2503.14476, equation 10; dual clip arXiv 1912.09729, equation 5.
    """
    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    loss = free.maximum(clipped)
    if dual_clip is None:
        return loss
    return loss.minimum(-advantages * dual_clip).where(advantages < 0, loss)


def loss_counts(mask: Tensor) -> dict[str, float]:
    """Return the number of tokens, and of sequences with any token, in a loss mask."""
    kept = mask != 0
    return {"tokens": float(kept.sum()), "sequences": float(kept.any(1).sum())}


def aggregate(
    losses: Tensor,
    mask: Tensor,
    mode: Aggregation,
    denominators: Denominators,
    *,
    norm_tokens: int | None = None,
) -> Tensor:
    """Return one micro-batch's part of the aggregated loss.

    The parts of all micro-batches and ranks add up to the loss of the mini-batch, because each part
    is divided by the denominators of the whole optimizer step.

    Args:
        losses: [B, S] float32.
        mask: [B, S] bool; sequences without a token do not count.
        mode: `token-mean` averages over all tokens; `seq-mean-token-mean` averages each sequence,
            then the sequences; `seq-mean-token-sum` averages the sums of sequences; `seq-sum-norm`
            divides by sequences * `norm_tokens`; `batch-token` divides by the tokens of the whole
            rollout batch over the number of mini-batches.
        denominators: counts made by `loss_counts`.
        norm_tokens: maximum response length, for `seq-sum-norm` only.
    """
    if mode == "seq-mean-token-mean":
        lengths = (mask != 0).sum(1).clamp(min=1)
        total = (masked_sum(losses, mask, 1) / lengths).sum()
    else:
        total = masked_sum(losses, mask)
    return total / max(_denominator(mode, denominators, norm_tokens), 1e-9)


def _denominator(mode: Aggregation, denominators: Denominators, norm_tokens: int | None) -> float:
    if mode == "token-mean":
        return denominators.minibatch["tokens"]
    if mode == "batch-token":
        return denominators.batch["tokens"] / denominators.num_minibatches
    if mode == "seq-sum-norm":
        assert norm_tokens is not None, "the configuration must require it for this mode"
        return denominators.minibatch["sequences"] * norm_tokens
    return denominators.minibatch["sequences"]


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimate KL(policy || reference) per token from tokens that the policy sampled.

    The estimators have different gradients. With d = logprobs - reference the gradient of a token
    is that of its log-probability times 1 (`k1`, whose mean over the policy's own tokens is 0:
    noise alone), times d (`k2`, whose mean is the gradient of the divergence itself), or times 1 -
    exp(-d) (`k3`, which is d near the reference and 0 beyond the cuts).

    Args:
        logprobs: log-probabilities under the policy, any shape, nats.
        reference: under the reference policy, same shape.
        estimator: `k1` plain difference, `k2` half its square, `k3` exp(-d) + d - 1 (unbiased and
            never negative; d is cut to +-20 and the result to 10).

    Returns:
        Nats, same shape; k1 alone can be negative.
    """
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference**2
    cut = (-difference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return (cut.exp() - cut - 1).clamp(-10, 10)


def value_losses(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
) -> Tensor:
    """Return half the squared error of each value: the larger of the unclipped and the clipped
    error.

    Args:
        values: current critic, any shape.
        old_values: critic at the start of the iteration.
        returns: targets.
        clip_low: largest distance of the clipped value below `old_values`; None is any distance.
        clip_high: largest distance above `old_values`; None is any distance.
    """
    clipped = values
    if clip_low is not None:
        clipped = clipped.maximum(old_values - clip_low)
    if clip_high is not None:
        clipped = clipped.minimum(old_values + clip_high)
    return 0.5 * ((values - returns) ** 2).maximum((clipped - returns) ** 2)


def negative_log_likelihood(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return the sum of -log p over the mask; the caller divides it by the step's token count."""
    return -hidden(logprobs, mask).sum()
