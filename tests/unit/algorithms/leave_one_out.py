"""A seventh recipe, for tests: REINFORCE whose baseline is the mean reward of the other rollouts.

Source: "Back to Basics", arXiv 2402.14740, section 3.
"""

from typing import Literal

from planish.algorithms.advantages import spread
from planish.algorithms.base import LossOutput, Recipe
from planish.algorithms.losses import aggregate, loss_counts
from planish.algorithms.masked import hidden
from planish.base.config import Section


class LeaveOneOutConfig(Section):
    """Constants of the recipe."""

    name: Literal["leave_one_out"] = "leave_one_out"
    """Key in the table of algorithms."""
    scale: float = 1.0
    """Factor of every advantage."""


class LeaveOneOut:
    """Advantage n / (n - 1) * (reward - mean of the group), loss -advantage * log p."""

    needs_values = False
    needs_old_logprobs = True
    needs_reference = False

    def __init__(self, config):
        self.config = config

    def advantages(self, batch):
        same = (batch.group_index[:, None] == batch.group_index[None]).float()
        size = same.sum(1)
        centred = batch.reward - same @ batch.reward / size
        per_row = self.config.scale * centred * size / (size - 1).clamp(min=1)
        return batch.updated(advantages=spread(per_row, batch.policy_mask))

    def counts(self, batch):
        return loss_counts(batch.policy_mask)

    def loss(self, logprobs, entropy, batch, denominators):
        losses = -batch.advantages * hidden(logprobs, batch.policy_mask)
        return LossOutput(aggregate(losses, batch.policy_mask, "seq-mean-token-sum", denominators))


RECIPE = Recipe(LeaveOneOutConfig, LeaveOneOut)
