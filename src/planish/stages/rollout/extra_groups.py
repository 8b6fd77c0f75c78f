"""Surplus of dynamic sampling: groups with a signal that did not fit in one batch, for the next.

Surplus exists only with `rollout.max_staleness` above 0. Ages are in policy versions: a group that
version v sampled has age v' - v for version v'. Exactly one shard uses a group of the earlier sets,
carries it on or counts it as expired, so no group is lost and none is trained on twice.

Source: DAPO, arXiv 2503.14476, algorithm 1 (its buffer of one step; reuse over steps is ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planish.stages.rollout.groups import Group, from_set
from planish.stages.rollout.side_sets import read_side_set


@dataclass(frozen=True)
class SurplusExchange:
    """The fate of all surplus groups of one shard.

    taken + surplus of this batch = used + carried + undrawn + expired.
    """

    used: list[Group]
    """Groups that enter the batch before anything is generated."""
    carried: list[Group]
    """Young groups that the batch has no room for: written for the next iteration."""
    num_taken: int
    """Number of groups of earlier sets that this shard takes over."""
    num_expired: int
    """Number of groups that are too old for this iteration or for the next."""
    num_undrawn: int = 0
    """Number of surplus groups of this batch whose prompts will be drawn again."""


def share(groups: Sequence[Group], shard: int, num_shards: int) -> list[Group]:
    """Return the groups that one shard takes over: every `num_shards`-th, oldest first."""
    ordered = sorted(groups, key=lambda group: (group.oldest_version, group.ordinal))
    return ordered[shard::num_shards]


def take_over(
    mine: Sequence[Group], *, room: int, version: int, max_staleness: int
) -> SurplusExchange:
    """Fill the batch with up to `room` groups of a shard's share, oldest first.

    `version` is that of the policy that samples now, `max_staleness` the highest age to train on.
    """
    usable = [group for group in mine if version - group.oldest_version <= max_staleness]
    return SurplusExchange(usable[:room], usable[room:], len(mine), len(mine) - len(usable))


def settle(
    taken: SurplusExchange, fresh: Sequence[Group], *, next_version: int, max_staleness: int
) -> SurplusExchange:
    """Carry on the groups that the next iteration may still train on; count the others.

    Args:
        taken: result of `take_over`.
        fresh: surplus of this batch. Without reuse its prompts will be drawn again.
        next_version: version of the policy that samples next.
        max_staleness: highest age that may be trained on, in policy versions; 0 is no reuse.
    """
    kept = [*taken.carried, *(fresh if max_staleness else ())]
    young = [group for group in kept if next_version - group.oldest_version <= max_staleness]
    return replace(
        taken,
        carried=young,
        num_expired=taken.num_expired + len(kept) - len(young),
        num_undrawn=0 if max_staleness else len(fresh),
    )


def group_facts(groups: Sequence[Group]) -> dict[str, list[int]]:
    """Return the numbers of each group in the manifest of a surplus set."""
    return {
        "ordinals": [group.ordinal for group in groups],
        "versions": [group.oldest_version for group in groups],
    }


def read_surplus(pins: Sequence[str], config_sha256: str) -> list[Group]:
    """Read the groups of all sets, with the verdicts of runs with this configuration.

    Raises:
        ObjectMissing: a set is gone.
        RecordError: a set is damaged.
    """
    groups: list[Group] = []
    for pin in pins:
        rollouts, facts = read_side_set(pin, config_sha256, "ordinals")
        # only responses that go on need the iteration in which they entered
        groups += from_set(rollouts, facts["ordinals"], [0] * rollouts.num_groups)
    return groups
