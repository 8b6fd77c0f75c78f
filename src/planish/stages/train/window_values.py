"""Values of responses that a window cut: kept from the iteration that sampled their tokens.

Source: T-PPO, arXiv 2506.15050; that the value of a token is the one of its own window is as in the
authors' public code.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from planish.algorithms.base import TrainBatch
from planish.records.rewards import RewardSet
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.values import ValueSet

Key = tuple[int, int]


def row_keys(rollouts: RolloutSet, ordinals: list[int]) -> list[Key]:
    """Return (ordinal, sample_index) of each rollout; `ordinals` are those of its groups."""
    groups, samples = rollouts.group_index.tolist(), rollouts.sample_index.tolist()
    return [(ordinals[group], sample) for group, sample in zip(groups, samples, strict=True)]


def earlier_values(
    batch: TrainBatch,
    rollouts: RolloutSet,
    rewards: RewardSet,
    ordinals: list[int],
    stored: ValueSet,
) -> Tensor:
    """Return the stored values of tokens that earlier iterations sampled.

    Args:
        batch: made of `rollouts` and `rewards`.
        rollouts: all shards of the iteration.
        rewards: of the rollouts.
        ordinals: of each group.
        stored: from the iteration before.

    Returns:
        [B, S] float32, NaN for tokens without a stored value.
    """
    known, keys = stored.to_rows(), row_keys(rollouts, ordinals)
    kept = torch.full(batch.values.shape, float("nan"))
    for position, row in enumerate(np.flatnonzero(rewards.keep).tolist()):
        values = known.get(keys[row], np.zeros(0, np.float32))
        columns = batch.value_mask[position].nonzero().flatten()[: len(values)]
        kept[position, columns] = torch.from_numpy(values.copy())
    return kept


def values_to_store(
    batch: TrainBatch,
    values: Tensor | None,
    rollouts: RolloutSet,
    rewards: RewardSet,
    ordinals: list[int],
    stored: ValueSet,
) -> ValueSet:
    """Return the values that the next iteration needs: of every response that goes on.

    A response that waits, or took no part in the update, keeps what was stored of it. Arguments are
    those of `earlier_values`, and `values`, [B, S] float32 of the critic before the iteration;
    None for an empty batch.
    """
    keys, kept = row_keys(rollouts, ordinals), stored.to_rows()
    goes_on = rollouts.finish == FinishReason.WINDOW
    for row in np.flatnonzero(~goes_on).tolist():
        kept.pop(keys[row], None)
    for position, row in enumerate(np.flatnonzero(rewards.keep).tolist()):
        if goes_on[row] and values is not None:
            kept[keys[row]] = values[position][batch.value_mask[position]].numpy()
    return ValueSet.from_rows(kept)
