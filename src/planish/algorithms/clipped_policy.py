"""The policy loss that all recipes share, clipped token by token, with its metrics and constants.

Advantages may come from a group or from a critic. A penalty on the divergence from a reference
policy can be added to the loss of any recipe. It is off by default, since none of DAPO, VAPO and
T-PPO has such a penalty.

Source: PPO, arXiv 1707.06347, section 3; DAPO, arXiv 2503.14476, section 3.1; the penalty is that
of GRPO, arXiv 2402.03300, equations 3 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from pydantic import Field, model_validator

from planish.algorithms.base import Denominators, LossOutput, TrainBatch
from planish.algorithms.losses import (
    Aggregation,
    KlEstimator,
    aggregate,
    clipped_surrogate,
    kl_estimate,
    policy_ratio,
)
from planish.algorithms.masked import hidden
from planish.algorithms.mismatch import Correction, correction_weights
from planish.base.config import Section, setting

if TYPE_CHECKING:
    from torch import Tensor


class ClippedPolicyConfig(Section):
    """Constants of the clipped policy loss."""

    clip_low: float = Field(default=0.2, ge=0.0, le=1.0)
    """The lower clip of the policy ratio is 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0.0)
    """The upper clip of the policy ratio is 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1.0)
    """Bound of the loss of tokens with negative advantage, as a multiple of the advantage; None is
    off, as published."""
    aggregation: Aggregation = "token-mean"
    """Rule by which the losses of tokens become one number."""
    norm_tokens: int | None = Field(default=None, ge=1)
    """Maximum response length in tokens; only aggregation `seq-sum-norm` needs it."""
    correction: Correction = "off"
    """Importance weights that correct the difference between engine and trainer; `bypass` takes the
    engine's log-probabilities as those of the old policy."""
    correction_min: float = Field(default=0.0, ge=0.0)
    """Lower bound of the weights that the two mask modes keep."""
    correction_max: float = Field(default=2.0, gt=0.0)
    """Largest weight of the truncate modes, or upper bound of the weights that the mask modes
    keep."""
    kl_coefficient: float = setting(0.0, quiet="kl_coefficient", ge=0.0)
    """Weight of the divergence from the reference policy. The weighted divergence is added to the
    loss, with the aggregation of the loss. 0 switches it off and loads no reference policy. GRPO,
    arXiv 2402.03300, section 4.2: 0.04. `train.reference_policy` says which policy is the
    reference."""
    kl_estimator: KlEstimator = setting("k3", quiet="kl_coefficient")
    """Estimator of the divergence of a token. `k3` is the estimator of GRPO (arXiv 2402.03300,
    equation 4), `k2` has the gradient of the divergence, `k1` has a gradient of 0 on average."""
    clips_weights: ClassVar[bool] = False
    """True: both clips apply to advantages of either sign. False: each clip applies to one sign."""

    @model_validator(mode="after")
    def _complete(self) -> ClippedPolicyConfig:
        if self.aggregation == "seq-sum-norm" and self.norm_tokens is None:
            raise ValueError("`norm_tokens` must be given for aggregation 'seq-sum-norm', got None")
        if self.correction_min > self.correction_max:
            raise ValueError(
                "`correction_min` must not exceed `correction_max`, got "
                f"{self.correction_min} > {self.correction_max}"
            )
        return self


class ClippedPolicy(Protocol):
    """Properties of every algorithm with the clipped policy loss, derived from its constants."""

    config: ClippedPolicyConfig

    @property
    def needs_old_logprobs(self) -> bool:
        """False under `correction = "bypass"`."""
        return self.config.correction != "bypass"

    @property
    def needs_reference(self) -> bool:
        """True with a KL penalty."""
        return self.config.kl_coefficient > 0


def with_old_policy(batch: TrainBatch, config: ClippedPolicyConfig) -> TrainBatch:
    """Return the batch; under `bypass` the engine's log-probabilities replace the old ones."""
    if config.correction != "bypass":
        return batch
    return batch.updated(old_logprobs=batch.rollout_logprobs)


class TokenLosses(Protocol):
    """A recipe's loss of each token, from log-probabilities and advantages."""

    def __call__(
        self, new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the ratio that the clips bound, and the loss, of each token.

        All tensors are [B, S] and 0 outside `mask`; `config` is the configuration of the recipe.
        """


def clipped_token_losses(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: ClippedPolicyConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's ratio and its clipped surrogate; meets `TokenLosses`."""
    ratio = policy_ratio(new, old)
    return ratio, clipped_surrogate(
        ratio,
        advantages,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
        dual_clip=config.dual_clip,
    )


def clipped_policy_loss(
    logprobs: Tensor,
    entropy: Tensor,
    batch: TrainBatch,
    denominators: Denominators,
    config: ClippedPolicyConfig,
    token_losses: TokenLosses = clipped_token_losses,
) -> LossOutput:
    """Return one micro-batch's part of a policy loss, with its metrics.

    `logprobs` and `entropy` are [B, S] float32 under the current policy. The batch has old
    log-probabilities and advantages; if there is a penalty, also log-probabilities of the reference
    policy.
    """
    mask = batch.policy_mask
    count = mask.sum()
    new, old = hidden(logprobs, mask), hidden(batch.old_logprobs, mask)
    advantages = hidden(batch.advantages, mask)
    ratio, losses = token_losses(new, old, advantages, mask, config)
    metrics = _clip_metrics(ratio.detach(), advantages, old, mask, config)
    if config.correction not in ("off", "bypass"):
        weights = correction_weights(
            old,
            batch.rollout_logprobs,
            mask,
            mode=config.correction,
            minimum=config.correction_min,
            maximum=config.correction_max,
        )
        losses = losses * weights
        metrics["correction_weight"] = (hidden(weights, mask).sum(), count)
    loss = aggregate(losses, mask, config.aggregation, denominators, norm_tokens=config.norm_tokens)
    if config.kl_coefficient:
        divergence = kl_estimate(new, hidden(batch.reference_logprobs, mask), config.kl_estimator)
        loss = loss + config.kl_coefficient * aggregate(
            divergence, mask, config.aggregation, denominators, norm_tokens=config.norm_tokens
        )
        metrics["reference_kl"] = (divergence.detach().sum(), count)
    metrics["entropy"] = (hidden(entropy.detach(), mask).sum(), count)
    metrics["approx_kl"] = ((old - new.detach()).sum(), count)
    error = hidden((ratio.detach() - 1).abs(), mask).max()
    return LossOutput(loss, metrics, {"ratio_error_max": error})


def _clip_metrics(
    ratio: Tensor, advantages: Tensor, old: Tensor, mask: Tensor, config: ClippedPolicyConfig
) -> dict[str, tuple[Tensor, Tensor]]:
    count = mask.sum()
    raised, lowered = advantages > 0, advantages < 0
    if config.clips_weights:
        raised = lowered = advantages != 0
    above = mask & raised & (ratio > 1 + config.clip_high)
    below = mask & lowered & (ratio < 1 - config.clip_low)
    metrics = {
        "clipfrac_high": (above.sum(), count),
        "clipfrac_low": (below.sum(), count),
        "mean_upclipped_prob": (hidden(old.exp(), above).sum(), above.sum()),
    }
    if config.dual_clip is not None:
        bounded = mask & (advantages < 0) & (ratio > config.dual_clip)
        metrics["clipfrac_dual"] = (bounded.sum(), count)
    return metrics
