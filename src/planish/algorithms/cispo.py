"""CISPO: log-probabilities weighted by the clipped ratio, which itself has no gradient.

The clip bounds how much a token counts and takes none out of the gradient, whatever its ratio.

Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5: the lower clip is off and the upper one is
tuned, to a value that is not told; the default is that of ScaleRL, arXiv 2510.13786.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from planish.algorithms.base import Denominators, LossOutput, Recipe, TrainBatch
from planish.algorithms.clipped_policy import ClippedPolicyConfig, clipped_policy_loss
from planish.algorithms.dapo import Dapo, GroupPolicyConfig
from planish.algorithms.losses import policy_ratio

if TYPE_CHECKING:
    from torch import Tensor


class CispoConfig(GroupPolicyConfig):
    """Published constants of CISPO; the loss is averaged over all tokens of the mini-batch."""

    name: Literal["cispo"] = "cispo"
    """Key in the table of algorithms."""
    clip_low: float = Field(default=1.0, ge=0.0, le=1.0)
    """A token counts at least 1 - clip_low times; 1 is no lower limit, as published."""
    clip_high: float = Field(default=4.0, ge=0.0)
    """And at most 1 + clip_high times."""
    dual_clip: None = None
    """No loss here grows with the ratio without a limit."""


class Cispo(Dapo):
    """Group-relative advantages and a policy loss whose ratios are clipped weights."""

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch, denominators: Denominators
    ) -> LossOutput:
        """Return one micro-batch's part of the loss (equation 4)."""
        return clipped_policy_loss(
            logprobs, entropy, batch, denominators, self.config, weighted_losses
        )


def weighted_losses(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: ClippedPolicyConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's own ratio, and its log-probability times advantage and clipped ratio."""
    ratio = policy_ratio(new.detach(), old)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return ratio, -weight * advantages * new


RECIPE = Recipe(CispoConfig, Cispo)
