"""DAPO: asymmetric clip, token-level loss, group-relative advantages, no KL penalty.

Dynamic sampling belongs to the rollout stage, overlong reward shaping to the reward stage; what
is left for the update is here.

Source: DAPO, arXiv 2503.14476, sections 2.3, 3.1, 3.3, 3.4 and 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from planish.algorithms.base import Denominators, LossOutput, Recipe, TrainBatch
from planish.algorithms.group_policy import (
    GroupPolicyConfig,
    fill_group_advantages,
    policy_loss,
)
from planish.algorithms.losses import Aggregation, loss_counts

if TYPE_CHECKING:
    from torch import Tensor


class DapoConfig(GroupPolicyConfig):
    """Published constants of DAPO."""

    name: Literal["dapo"] = "dapo"
    """Key in the table of algorithms."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """The ratio is clipped above 1 + clip_high: room for unlikely tokens (section 3.1)."""
    aggregation: Aggregation = "token-mean"
    """Every token of the mini-batch weighs the same (section 3.3)."""


class Dapo:
    """Group-relative advantages and the clipped policy loss."""

    needs_values: ClassVar[bool] = False

    def __init__(self, config: GroupPolicyConfig) -> None:
        self.config = config

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fill in the policy mask and the group-relative advantages."""
        return fill_group_advantages(batch, self.config)

    def counts(self, batch: TrainBatch) -> dict[str, float]:
        """Count tokens and sequences in the policy loss."""
        return loss_counts(batch.policy_mask)

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch, denominators: Denominators
    ) -> LossOutput:
        """Return one micro-batch's part of the clipped surrogate."""
        return policy_loss(logprobs, entropy, batch, denominators, self.config)


RECIPE = Recipe(DapoConfig, Dapo)
