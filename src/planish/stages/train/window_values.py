"""Values of responses that a window cut, each from the iteration that sampled its token.

Source: T-PPO, arXiv 2506.15050; the authors' public code, too, gives a token the value of its own
window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from planish.algorithms.base import TrainBatch
from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet
from planish.records.values import ValueSet

Key = tuple[int, int]


def row_keys(rollouts: RolloutSet, ordinals: list[int]) -> list[Key]:
    """Return (ordinal, sample_index) of each rollout; `ordinals` are those of its groups."""
    groups, samples = rollouts.group_index.tolist(), rollouts.sample_index.tolist()
    return [(ordinals[group], sample) for group, sample in zip(groups, samples, strict=True)]


def earlier_values(
    batch: TrainBatch,
    keys: Sequence[Key],
    rewards: RewardSet,
    stored: ValueSet,
) -> Tensor:
    """Return the stored values of tokens that earlier iterations sampled.

    Args:
        batch: batch of the rollouts and their rewards.
        keys: keys of the rollouts, from `row_keys`.
        rewards: rewards of the rollouts.
        stored: values from the iteration before.

    Returns:
        [B, S] float32, NaN for tokens without a stored value.
    """
    known, rows = stored.to_rows(), torch.from_numpy(np.flatnonzero(rewards.keep))
    kept = torch.full(batch.values.shape, float("nan"))
    for position, row in enumerate(batch.share.own(rows).tolist()):
        values = known.get(keys[row], np.zeros(0, np.float32))
        columns = batch.value_mask[position].nonzero().flatten()[: len(values)]
        kept[position, columns] = torch.from_numpy(values.copy())
    return kept


def values_to_store(
    batch: TrainBatch,
    values: Tensor | None,
    keys: Sequence[Key],
    goes_on: npt.NDArray[np.bool_],
    rewards: RewardSet,
    stored: ValueSet,
) -> ValueSet:
    """Return the values that the next iteration needs: those of every response that goes on.

    A response that waits, or took no part in the update, keeps its stored values. Every rank calls
    this function and gets the whole set. `values` are [B, S] float32 of the critic before the
    iteration, None for an empty batch; `goes_on` is True for rollouts that a window cut. The other
    arguments are those of `earlier_values`.
    """
    kept = stored.to_rows()
    for row in np.flatnonzero(~goes_on).tolist():
        kept.pop(keys[row], None)
    if values is not None:
        rows = np.flatnonzero(rewards.keep)
        cut = batch.share.own(torch.from_numpy(goes_on[rows]))
        found, lengths = batch.share.join(values, batch.value_mask & cut.unsqueeze(1))
        parts = np.split(found.numpy(), lengths.cumsum(0).numpy()[:-1])
        kept |= {keys[r]: x for r, x in zip(rows.tolist(), parts, strict=True) if goes_on[r]}
    return ValueSet.from_rows(kept)
