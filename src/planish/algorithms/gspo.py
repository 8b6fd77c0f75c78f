"""GSPO: one ratio for a whole response, the geometric mean of its tokens' ratios.

A response is clipped as a whole, and every response weighs the same. A geometric mean over
thousands of tokens stays much nearer to 1 than the ratio of one token, so the clips are nearer to 1
too.

Source: GSPO, arXiv 2507.18071, sections 4.1 (equations 5 and 7) and 5.1 (constants).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from planish.algorithms.base import Recipe
from planish.algorithms.clipped_policy import (
    ClippedPolicyConfig,
    TokenLosses,
    clipped_token_losses,
)
from planish.algorithms.dapo import Dapo, GroupPolicyConfig
from planish.algorithms.losses import Aggregation
from planish.algorithms.masked import masked_mean

if TYPE_CHECKING:
    from torch import Tensor


class GspoConfig(GroupPolicyConfig):
    """Published constants of GSPO."""

    name: Literal["gspo"] = "gspo"
    """Key in the table of algorithms."""
    clip_low: float = Field(default=3e-4, ge=0.0, le=1.0)
    """The lower clip of the ratio of a response is 1 - clip_low (section 5.1)."""
    clip_high: float = Field(default=4e-4, ge=0.0)
    """The upper clip of the ratio is 1 + clip_high; shorter responses need wider clips."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """Every response has the same weight (equation 5)."""


def response_losses(
    new: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, config: ClippedPolicyConfig
) -> tuple[Tensor, Tensor]:
    """Return for every token the ratio of its response, and the clipped surrogate.

    The ratio is exp of the mean difference of log-probabilities over the tokens in `mask` (equation
    7). The mean of the losses over these tokens has value and gradient of equation 5.
    """
    mean = masked_mean(new - old, mask, 1).unsqueeze(1).expand_as(new)
    return clipped_token_losses(mean, mean.new_zeros(()), advantages, mask, config)


class Gspo(Dapo):
    """Group-relative advantages and a policy loss that clips whole responses (equation 5)."""

    token_losses: ClassVar[TokenLosses] = staticmethod(response_losses)


RECIPE = Recipe(GspoConfig, Gspo)
