"""GRPO, as the baseline of DAPO: symmetric clip and a loss averaged within each response first.

The optional KL penalty to a reference policy is left out: its coefficient is 0 in the baseline
that DAPO compares with.

Source: GRPO, arXiv 2402.03300, section 4.1; DAPO, arXiv 2503.14476, section 2.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from planish.algorithms.base import Denominators, LossOutput, TrainBatch
from planish.algorithms.group_policy import (
    GroupPolicyConfig,
    fill_group_advantages,
    policy_loss,
)
from planish.algorithms.losses import Aggregation, loss_counts
from planish.config import Section, parse_section

if TYPE_CHECKING:
    from torch import Tensor


class GrpoConfig(GroupPolicyConfig):
    """Published constants of GRPO; the symmetric clip of 0.2 is the shared default."""

    name: Literal["grpo"] = "grpo"
    """Key in the table of algorithms."""
    aggregation: Aggregation = "seq-mean-token-mean"
    """Every response weighs the same, whatever its length."""


class Grpo:
    """GRPO's policy update."""

    config_class: ClassVar[type[Section]] = GrpoConfig
    needs_values: ClassVar[bool] = False

    def __init__(self, config: GrpoConfig) -> None:
        self.config = config

    @classmethod
    def from_table(cls, raw: Mapping[str, Any]) -> Grpo:
        """Build from the raw `[algorithm]` table."""
        return cls(parse_section(GrpoConfig, raw, section="algorithm"))

    def advantages(self, batch: TrainBatch) -> TrainBatch:
        """Fill in the policy mask and the group-relative advantages."""
        return fill_group_advantages(batch, self.config)

    def counts(self, batch: TrainBatch) -> dict[str, float]:
        """Count tokens and sequences in the policy loss."""
        return loss_counts(batch.policy_mask)

    def loss(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        values: Tensor | None,
        batch: TrainBatch,
        denominators: Denominators,
    ) -> LossOutput:
        """Return one micro-batch's part of the clipped surrogate."""
        return policy_loss(logprobs, entropy, batch, denominators, self.config)
