"""CISPO: log-probabilities weighted by the clipped ratio, which has no gradient.

The clip bounds the weight of a token. No token loses its gradient, whatever the ratio.

Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5. There the lower clip is off and the upper
one has a tuned, unpublished value; the default here is that of ScaleRL, arXiv 2510.13786.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from planish.algorithms.base import Recipe
from planish.algorithms.clipped_policy import ClippedPolicyConfig, TokenLosses
from planish.algorithms.dapo import Dapo, GroupPolicyConfig
from planish.algorithms.losses import policy_ratio

if TYPE_CHECKING:
    from torch import Tensor


class CispoConfig(GroupPolicyConfig):
    """Published constants of CISPO; the loss is averaged over all tokens of the mini-batch."""

    name: Literal["cispo"] = "cispo"
    """Key in the table of algorithms."""
    clip_low: float = Field(default=1.0, ge=0.0, le=1.0)
    """Smallest weight of a token is 1 - clip_low; 1 means no lower bound, as published."""
    clip_high: float = Field(default=4.0, ge=0.0)
    """Largest weight of a token is 1 + clip_high."""
    dual_clip: None = None
    """Always off: no loss here grows with the ratio without limit."""
    clips_weights: ClassVar[bool] = True


def weighted_losses(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: ClippedPolicyConfig
) -> tuple[Tensor, Tensor]:
    """Return each token's ratio, and its loss: -log-probability times advantage and clipped
    ratio.
    """
    ratio = policy_ratio(new.detach(), old)
    weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return ratio, -weight * advantages * new


class Cispo(Dapo):
    """Group-relative advantages and a policy loss whose ratios are clipped weights (equation 4)."""

    token_losses: ClassVar[TokenLosses] = staticmethod(weighted_losses)


RECIPE = Recipe(CispoConfig, Cispo)
