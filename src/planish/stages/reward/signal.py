"""Iterations whose rewards carry no signal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from planish.records.rewards import RewardSet
from planish.records.rollouts import RolloutSet

_EQUAL = 1e-6
"""Difference up to which two rewards count as equal."""


def groups_without_signal(
    rollouts: RolloutSet, rewards: RewardSet, shards: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the numbers of all-wrong and all-right groups if all rewards are equal, else {}.

    Rewards are compared within each group. If no group has two scored responses, they are compared
    over the iteration, because only a critic can then give a signal.

    `shards` are the metrics of each shard, which count the groups that dynamic sampling dropped.
    The result is also {} if no response has a reward yet.
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
