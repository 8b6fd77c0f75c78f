"""Iterations whose rewards carry no signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet

_EQUAL = 1e-6
"""Least difference between two rewards."""


def groups_without_signal(
    rollouts: RolloutSet, rewards: RewardSet, shards: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Count groups all wrong and all right where no two rewards differ; {} where some do.

    Rewards are compared within a group, and over the iteration where no group has two scored
    responses: there a critic makes the difference.

    The metrics of each shard know the groups that dynamic sampling has dropped. {} is returned too
    where no response has a reward yet.
    """
    used = rewards.has_reward & rewards.keep
    groups = rollouts.group_index
    scored = groups[rewards.has_reward]
    if len(np.unique(scored)) == len(scored):
        groups = np.zeros_like(groups)
    for group in np.unique(groups[used]):
        values = rewards.reward[used & (groups == group)]
        if float(values.max() - values.min()) > _EQUAL:
            return {}
    wrong = right = 0.0
    for shard in shards:
        complete = shard.get("num_generated_groups", 0.0) - shard.get(
            "group_dropped_incomplete", 0.0
        )
        wrong += round(complete * shard.get("ds/all_wrong_frac", 0.0))
        right += round(complete * shard.get("ds/all_correct_frac", 0.0))
    if not wrong + right:
        for group in np.unique(scored):
            rows = rewards.has_reward & (rollouts.group_index == group)
            is_right = rewards.accuracy[rows]
            right += float(is_right.all())
            wrong += float(not is_right.any())
    if not wrong + right:
        return {}
    return {"num_groups_wrong": wrong, "num_groups_right": right}
