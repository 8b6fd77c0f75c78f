"""Distance between the policy that sampled and the one that trains: metrics, correction weights.

The engine and the trainer compute the same network with other kernels, and sometimes with other
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

    Kernels of one network in float32 differ by 1e-5 and less, in bfloat16 by some hundredths, more
    where routers choose other experts. Another network differs by whole nats. The limit is infinite
    if `rollout.top_p` or `top_k` cuts the engine's distribution.

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
    """Refuse rollouts that were sampled by another network than the one that trains.

    Log-probabilities are [B, S] float32 of trainer and engine; `limit` is that of `mismatch_limit`.

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
        old_logprobs: [B, S] float32, trainer's.
        rollout_logprobs: [B, S] float32, engine's.
        mask: [B, S] bool, tokens of the loss.
        mode: `*_truncate` caps the weight at `maximum`; `*_mask` drops weights outside
            [minimum, maximum]; `sequence_*` decides by the product over the response, and
            `sequence_mask` then weighs each token by its own ratio. `off` and `bypass` give 1.
        minimum: lower end of the band of the two mask modes.
        maximum: cap, or upper end of the band.

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
    """Measure the difference between engine and trainer on the tokens of all ranks' rows.

    Returns:
        Nothing for an empty mask, else: mean and maximum of the absolute difference of
        log-probabilities and of probabilities; `mismatch_k3`, the divergence of the trainer's from
        the engine's distribution; `mismatch_ppl_ratio`, trainer's over engine's perplexity; and
        `mismatch_effective_samples`, (sum w)^2 / (n sum w^2) of the importance weights.
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
