"""Mismatch of the policy that sampled and the policy that trains: metrics and correction weights.

Engine and trainer compute the same network with different kernels, and sometimes with different
weights. The metrics are always logged; the correction is off unless it is configured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from planish.algorithms.losses import LOG_RATIO_LIMIT, kl_estimate
from planish.algorithms.masked import hidden
from planish.base.errors import ConfigError
from planish.base.parallel import ALONE, Share

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal[
    "off", "token_truncate", "sequence_truncate", "token_mask", "sequence_mask", "bypass"
]


def mismatch_limit(config: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the largest mean difference of log-probabilities that number formats explain, in nats.

    Kernels of one network differ by at most 1e-5 in float32 and by some hundredths in bfloat16;
    they differ by more if routers choose other experts. Another network differs by whole nats. The
    limit is infinite if `rollout.top_p` or `top_k` cuts the engine's distribution.

    Example:
        >>> mismatch_limit({"model": {"dtype": "float32"}, "train": {"compute_dtype": "bfloat16"}})
        0.25
    """
    rollout, engine = config.get("rollout", {}), config.get("engine", {})
    if rollout.get("top_p", 1.0) < 1.0 or rollout.get("top_k", 0):
        return math.inf
    if engine.get("quantization", "none") != "none":
        return 0.5
    formats = {
        config.get("model", {}).get("dtype", "float32"),
        config.get("train", {}).get("compute_dtype", "float32"),
    }
    return 0.02 if formats == {"float32"} else 0.25


def check_mismatch(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    limit: float,
    share: Share = ALONE,
) -> None:
    """Refuse rollouts that another network sampled than the one that trains.

    Log-probabilities are [B, S] float32, from trainer and engine; `limit` is that of
    `mismatch_limit`.

    Raises:
        ConfigError: the mean absolute difference is above the limit.
    """
    trainer, engine = old_logprobs[mask != 0], rollout_logprobs[mask != 0]
    means = share.means((trainer - engine).abs(), engine, trainer)
    # A NaN is refused as well.
    if means and not means[0] <= limit:
        seen, by_engine, by_trainer = means
        raise ConfigError(
            "engine and trainer must compute the same policy, got log-probabilities of "
            f"{by_engine:.4f} by the engine and {by_trainer:.4f} by the trainer in the mean of the "
            f"tokens that this policy sampled, {seen:.4f} "
            f"apart where the number formats explain {limit:g}; take the engine `transformers`, or "
            "another trainer"
        )


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    *,
    mode: Correction,
    minimum: float = 0.0,
    maximum: float = 2.0,
) -> Tensor:
    """Return the weight of each token's policy loss, without gradient.

    Args:
        old_logprobs: [B, S] float32, from the trainer.
        rollout_logprobs: [B, S] float32, from the engine.
        mask: [B, S] bool, tokens of the loss.
        mode: `*_truncate` caps the weight at `maximum`; `*_mask` sets weights outside
            [minimum, maximum] to 0; `sequence_*` decides by the product over the response, and
            `sequence_mask` then weighs each token by its own ratio. `off` and `bypass` give 1.
        minimum: lower bound of the two mask modes.
        maximum: cap of the truncate modes, or upper bound of the mask modes.

    Returns:
        [B, S] float32.
    """
    difference = hidden(old_logprobs - rollout_logprobs, mask).detach()
    token = difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode in ("off", "bypass"):
        return token.new_ones(token.shape)
    if mode == "token_truncate":
        return token.clamp(max=maximum)
    if mode == "token_mask":
        return token.where((token >= minimum) & (token <= maximum), 0.0)
    sequence = difference.sum(1, keepdim=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    if mode == "sequence_truncate":
        return sequence.clamp(max=maximum).expand(token.shape)
    return token.where((sequence >= minimum) & (sequence <= maximum), 0.0)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor, share: Share = ALONE
) -> dict[str, float]:
    """Return metrics of the difference between engine and trainer, over the rows of all ranks.

    Returns:
        Empty for an empty mask. Else mean and maximum of the absolute difference of
        log-probabilities and of probabilities; `mismatch_k3`, the divergence of the trainer's
        distribution from the engine's; `mismatch_ppl_ratio`, the trainer's perplexity over the
        engine's; and `mismatch_effective_samples`, (sum w)^2 / (n sum w^2) of the importance
        weights.
    """
    old, engine = old_logprobs[mask != 0], rollout_logprobs[mask != 0]
    by_log = (old - engine).abs()
    by_probability = (old.exp() - engine.exp()).abs()
    weights = (old - engine).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    k3 = kl_estimate(engine, old, "k3")
    means = share.means(by_log, by_probability, k3, engine - old, weights, weights**2)
    if not means:
        return {}
    return {
        "mismatch_logprob_mean": means[0],
        "mismatch_logprob_max": share.max(by_log),
        "mismatch_probability_mean": means[1],
        "mismatch_probability_max": share.max(by_probability),
        "mismatch_k3": means[2],
        "mismatch_ppl_ratio": math.exp(min(means[3], 700.0)),
        "mismatch_effective_samples": means[4] ** 2 / means[5],
    }
