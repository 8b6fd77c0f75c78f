"""Surplus of dynamic sampling: groups with a signal that one batch had no room for, for the next.

Only with `rollout.max_staleness` above 0. Ages are counted in policy versions: a group that version
v sampled is v' - v old for version v'. Every group of the earlier sets is used, carried on or
counted as expired by exactly one shard, so that none is lost and none is trained twice.

Source: DAPO, arXiv 2503.14476, algorithm 1 (its buffer of one step; reuse over steps is ours).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from planish.records.prompts import PromptSet
from planish.records.rollouts import RolloutSet
from planish.stages.rollout.groups import Group, as_rollouts
from planish.stages.rollout.side_sets import read_side_set


@dataclass(frozen=True)
class Surplus:
    """Whole groups with what is known of each; columns as they were sampled.

    Example:
        >>> len(Surplus()), Surplus().attributes()
        (0, {'ordinals': [], 'versions': [], 'num_right': []})
    """

    rollouts: RolloutSet = field(default_factory=RolloutSet.empty)
    """G groups."""
    ordinals: list[int] = field(default_factory=list)
    """[G] place of the prompt in the stream."""
    versions: list[int] = field(default_factory=list)
    """[G] oldest policy version that sampled a token of the group."""
    num_right: list[int] = field(default_factory=list)
    """[G] right responses."""

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.ordinals)

    @classmethod
    def of(cls, groups: Sequence[Group], prompts: PromptSet, version: int) -> Surplus:
        """Turn complete groups that policy `version` has sampled into a surplus."""
        return cls(
            as_rollouts(groups, prompts),
            [g.ordinal for g in groups],
            [min((v for o in g.outputs for v in o.versions), default=version) for g in groups],
            [int(sum(g.accuracy)) for g in groups],
        )

    @staticmethod
    def concat(parts: Sequence[Surplus]) -> Surplus:
        """Put the groups of all parts one after another."""
        return Surplus(
            RolloutSet.concat([part.rollouts for part in parts]),
            [k for part in parts for k in part.ordinals],
            [v for part in parts for v in part.versions],
            [n for part in parts for n in part.num_right],
        )

    def take(self, indices: Sequence[int]) -> Surplus:
        """Return groups in the order of `indices`."""
        return Surplus(
            self.rollouts.take_groups(indices) if indices else RolloutSet.empty(),
            [self.ordinals[k] for k in indices],
            [self.versions[k] for k in indices],
            [self.num_right[k] for k in indices],
        )

    def share(self, shard: int, num_shards: int) -> Surplus:
        """Return what one shard takes over: every `num_shards`-th group, oldest first."""
        order = sorted(range(len(self)), key=lambda k: (self.versions[k], self.ordinals[k]))
        return self.take(order[shard::num_shards])

    def split(self, oldest: int) -> tuple[Surplus, int]:
        """Return the groups of version `oldest` or later, and how many are older."""
        good = [k for k, version in enumerate(self.versions) if version >= oldest]
        return self.take(good), len(self) - len(good)

    def attributes(self) -> dict[str, list[int]]:
        """Return what the manifest of the set says of each group."""
        return {
            "ordinals": self.ordinals,
            "versions": self.versions,
            "num_right": self.num_right,
        }


@dataclass(frozen=True)
class Taken:
    """A shard's part of the earlier surplus: used + left + expired."""

    used: Surplus
    """Go into the batch before anything is generated."""
    left: Surplus
    """Young enough, but the batch has no room."""
    num_expired: int
    """Groups that are too old."""

    def __len__(self) -> int:
        """Number of groups."""
        return len(self.used) + len(self.left) + self.num_expired


@dataclass(frozen=True)
class Exchange:
    """What became of all surplus groups of one shard.

    taken + surplus of this batch = used + carried + undrawn + expired.
    """

    num_taken: int
    """Groups of earlier sets that are this shard's."""
    used: Surplus
    """Are in the batch."""
    carried: Surplus
    """Are written for the next iteration."""
    num_undrawn: int
    """Surplus groups of this batch whose prompts are to be drawn again."""
    num_expired: int
    """Too old for this iteration or for the next."""


def take_over(mine: Surplus, *, room: int, version: int, max_staleness: int) -> Taken:
    """Fill the batch from a shard's share.

    Args:
        mine: the share, oldest first.
        room: groups of the batch.
        version: of the policy that samples now.
        max_staleness: highest age that may be trained on, in policy versions.
    """
    usable, num_expired = mine.split(version - max_staleness)
    order = range(len(usable))
    return Taken(usable.take(order[:room]), usable.take(order[room:]), num_expired)


def settle(
    taken: Taken, fresh: Surplus, *, next_version: int, max_staleness: int, num_undrawn: int = 0
) -> Exchange:
    """Decide which groups the next iteration gets: those that it may still train on.

    Args:
        taken: the shard's part of the earlier surplus.
        fresh: surplus of this batch whose ordinals count as consumed.
        next_version: of the policy that samples next.
        max_staleness: highest age that may be trained on, in policy versions.
        num_undrawn: surplus groups of this batch whose ordinals do not count as consumed.
    """
    carried, late = Surplus.concat([taken.left, fresh]).split(next_version - max_staleness)
    return Exchange(len(taken), taken.used, carried, num_undrawn, taken.num_expired + late)


def read_surplus(pins: Sequence[str]) -> Surplus:
    """Read the groups of all sets.

    Raises:
        ObjectMissing: a set is gone.
        RecordError: a set is damaged.
    """
    return Surplus.concat([_read(pin) for pin in pins])


def _read(pin: str) -> Surplus:
    rollouts, columns = read_side_set(pin, tuple(Surplus().attributes()), kind="surplus")
    return Surplus(rollouts, **columns)
