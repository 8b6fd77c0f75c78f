"""Selection of the groups of an iteration that train the policy.

It takes whole groups and drops nothing: responses of the other groups go on in their slots, and
train the critic once they are finished, like all responses.

Source: T-PPO, arXiv 2506.15050; the order of preference is that of its authors' public code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planish.algorithms.base import TrainBatch
from planish.stages.train.config import TrainConfig


@dataclass(frozen=True)
class Selection:
    """The rows that train the policy."""

    chosen: Tensor | None
    """[B] bool; None if all rows train the policy."""
    num_groups: int = 0
    """Groups that train the policy, of all ranks; 0 if `chosen` is None."""

    def apply(self, batch: TrainBatch) -> TrainBatch:
        """Return the batch with `policy_mask` and `positive_mask` False outside the chosen rows.

        `value_mask` stays as it is, so the critic trains on all rows.
        """
        if self.chosen is None:
            return batch
        kept = self.chosen.unsqueeze(1)
        return batch.updated(
            policy_mask=batch.policy_mask & kept, positive_mask=batch.positive_mask & kept
        )

    def metrics(self, batch: TrainBatch) -> dict[str, float]:
        """Count the groups that train the policy, and the policy tokens of the other groups.

        `batch` is the batch before `apply`. The result is empty if all rows train the policy.
        """
        if self.chosen is None:
            return {}
        left_out = batch.policy_mask & ~self.chosen.unsqueeze(1)
        return {
            "num_selected_groups": float(self.num_groups),
            "num_unselected_tokens": float(batch.share.sum(left_out.sum())),
        }


def select_groups(
    batch: TrainBatch,
    config: TrainConfig,
    places: Sequence[int] | None = None,
) -> Selection:
    """Select the groups that train the policy; arguments as for `preferred_groups`."""
    if config.selection == "all" or config.max_groups is None:
        return Selection(None)
    taken = preferred_groups(batch, places)[: config.max_groups]
    chosen = torch.isin(batch.group_index, batch.group_index.new_tensor(taken))
    return Selection(chosen, len(taken))


def preferred_groups(batch: TrainBatch, places: Sequence[int] | None = None) -> list[int]:
    """Return the group indices of a batch in the order of preference.

    Groups with right and wrong responses come first, then the others by falling number of
    responses that go on; ties follow the stream of prompts. Only a finished response counts as
    right or wrong, and only one with tokens of this iteration counts as going on.

    Args:
        batch: kept rollouts with the masks of `train_batch`.
        places: place in the stream of prompts by group index; None takes the index itself.
    """
    verdicts: dict[int, set[bool]] = {}
    growing: Counter[int] = Counter()
    per_row = (batch.is_finished, batch.accuracy > 0, batch.policy_mask.any(1))
    facts = torch.stack(batch.share.every(batch.group_index, *per_row), 1)
    for group, is_finished, is_right, has_tokens in facts.long().tolist():
        seen = verdicts.setdefault(group, set())
        if is_finished:
            seen.add(is_right)
        else:
            growing[group] += has_tokens

    def preference(group: int) -> tuple[int, int]:
        rank = -growing[group] if len(verdicts[group]) < 2 else -len(facts) - 1
        return rank, group if places is None else places[group]

    return sorted(verdicts, key=preference)
