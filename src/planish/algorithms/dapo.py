"""DAPO: asymmetric clip, token-level loss, group-relative advantages, no KL penalty, no critic.

This file has the update. Dynamic sampling is in the rollout stage, overlong reward shaping in the
reward stage.

Source: DAPO, arXiv 2503.14476, sections 2.3, 3.1, 3.3, 3.4 and 4.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from planish.algorithms.advantages import StdKind, group_advantages, spread
from planish.algorithms.base import Denominators, LossOutput, Recipe, TrainBatch
from planish.algorithms.clipped_policy import (
    ClippedPolicy,
    ClippedPolicyConfig,
    TokenLosses,
    clipped_policy_loss,
    clipped_token_losses,
    with_old_policy,
)
from planish.algorithms.losses import Aggregation, loss_counts

if TYPE_CHECKING:
    from torch import Tensor


class GroupPolicyConfig(ClippedPolicyConfig):
    """Constants of an update whose advantages compare the rollouts of a group."""

    std: StdKind = "sample"
    """Divisor of a group's squared deviations: n - 1 ("sample") or n ("population")."""
    advantage_epsilon: float = Field(default=1e-6, ge=0.0)
    """Number that is added to the standard deviation of a group."""
    overlong_filtering: bool = False
    """Leave truncated responses out of the loss (DAPO section 3.4); off in the full recipe."""
    exclude_truncated_from_stats: bool = False
    """Leave truncated responses out of the mean and deviation of their group too."""


class DapoConfig(GroupPolicyConfig):
    """Published constants of DAPO."""

    name: Literal["dapo"] = "dapo"
    """Key in the table of algorithms."""
    clip_high: float = Field(default=0.28, ge=0.0)
    """The upper clip of the ratio is 1 + clip_high: unlikely tokens may gain more (section 3.1)."""
    aggregation: Aggregation = "token-mean"
    """Every token of the mini-batch has the same weight (section 3.3)."""


class Dapo(ClippedPolicy):
    """Group-relative advantages and the clipped policy loss."""

    config: GroupPolicyConfig
    needs_values: ClassVar[bool] = False
    token_losses: ClassVar[TokenLosses] = staticmethod(clipped_token_losses)

    def __init__(self, config: GroupPolicyConfig) -> None:
        self.config = config

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch in which every token has its response's reward relative to the group
        (section 2.3).
        """
        config = self.config
        whole = batch.is_truncated.logical_not()
        rewards, groups, counted = batch.share.every(batch.reward, batch.group_index, whole)
        per_row = group_advantages(
            rewards,
            groups,
            std=config.std,
            epsilon=config.advantage_epsilon,
            in_stats=counted != 0 if config.exclude_truncated_from_stats else None,
        )
        mask = batch.policy_mask
        if config.overlong_filtering:
            mask = mask & whole.unsqueeze(1)
        batch = with_old_policy(batch, config)
        return batch.updated(
            policy_mask=mask, advantages=spread(batch.share.own(per_row).float(), mask)
        )

    def counts(self, batch: TrainBatch) -> dict[str, float]:
        """Return the number of tokens and sequences in the policy loss."""
        return loss_counts(batch.policy_mask)

    def loss(
        self, logprobs: Tensor, entropy: Tensor, batch: TrainBatch, denominators: Denominators
    ) -> LossOutput:
        """Return one micro-batch's part of the clipped loss (sections 3.1 and 3.3)."""
        return clipped_policy_loss(
            logprobs, entropy, batch, denominators, self.config, self.token_losses
        )


RECIPE = Recipe(DapoConfig, Dapo)
