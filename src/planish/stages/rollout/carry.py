"""Slots of successive batching: responses that generate in this iteration, wait, or go on.

A shard has a fixed number of slots. Responses with tokens keep theirs. Free slots go to waiting
samples in the order of their entry, then to new prompts, which enter with all their samples. This
module needs no engine, so tests can simulate many iterations.

Source: T-PPO, arXiv 2506.15050 (successive batching); the order of entry, and that no response is
ever dropped, are ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from planish.stages.rollout.config import Unfinished
from planish.stages.rollout.groups import Group, from_set
from planish.stages.rollout.side_sets import read_side_set


def deal(sets: Sequence[Sequence[Group]], shard: int, num_shards: int) -> list[Group]:
    """Return the carried groups of one shard, in the order of their entry.

    Shard s goes on with set s. If the number of shards has changed, all groups are dealt out one
    by one. A group is never split.

    Args:
        sets: groups of each carry set of the iteration before, in the order of its shards.
        shard: index of this shard.
        num_shards: shards of this iteration.
    """
    is_same = len(sets) == num_shards
    groups = sets[shard] if is_same else [group for part in sets for group in part]
    by_entry = sorted(groups, key=lambda group: (group.drawn, group.ordinal))
    return by_entry if is_same else by_entry[shard::num_shards]


def refill(carried: Sequence[Group], num_slots: int, draw: Iterator[Group]) -> list[Group]:
    """Return the carried groups, and new ones behind them until every slot is taken."""
    groups = list(carried)
    free = num_slots - sum(group.num_open for group in groups)
    while free > 0:
        groups.append(next(draw))
        free -= groups[-1].num_open
    return groups


def place(groups: Sequence[Group], num_slots: int) -> list[tuple[int, int]]:
    """Return (group, slot) of the responses that generate now: those with tokens come first.

    Example:
        >>> from planish.stages.rollout.groups import Slot
        >>> group = Group(0, 1, "0" * 16, (7,), "5", "exact", (Slot(0), Slot(1), Slot(2)))
        >>> place([group], 2)
        [(0, 0), (0, 1)]
    """
    waiting = [
        (g, s)
        for g, group in enumerate(groups)
        for s, slot in enumerate(group.slots)
        if slot.is_open
    ]
    # stable: within both kinds the order of entry stays
    waiting.sort(key=lambda at: groups[at[0]].slots[at[1]].num_tokens == 0)
    return sorted(waiting[:num_slots])


def settle(groups: Sequence[Group], unfinished: Unfinished) -> tuple[list[Group], list[Group]]:
    """Divide groups after generation into those for the rollout set and those for the carry set.

    Args:
        groups: all groups of the shard.
        unfinished: `train` gives every response with tokens to the rollout set, with its current
            window; `hold` gives a response when it is finished, `hold_group` when its whole group
            is, each once and with all tokens.

    Returns:
        (rollout, carry). Every open response is in the carry; a finished one is in exactly one.
    """
    given: list[Group] = []
    kept: list[Group] = []
    for group in groups:
        ready = [replace(slot, start=0) for slot in group.slots if not slot.is_open]
        waits = [slot for slot in group.slots if slot.is_open]
        if unfinished == "train":
            ready = [slot for slot in group.slots if slot.num_tokens]
        elif unfinished == "hold_group" and waits:
            ready, waits = [], list(group.slots)
        for slots, target in ((ready, given), (waits, kept)):
            if slots:
                target.append(replace(group, slots=tuple(slots)))
    return given, kept


def read_carry(pins: Sequence[str], config_sha256: str) -> list[list[Group]]:
    """Read the groups of each carry set; the window of each response starts after its last token.

    Verdicts of a run with another configuration are left out.

    Raises:
        ObjectMissing: a set is gone.
        RecordError: a set is damaged.
    """
    sets: list[list[Group]] = []
    for pin in pins:
        rollouts, facts = read_side_set(pin, config_sha256, "ordinals", "drawn")
        groups = from_set(rollouts, facts["ordinals"], facts["drawn"])
        sets.append(
            [
                replace(g, slots=tuple(replace(s, start=s.num_tokens) for s in g.slots))
                for g in groups
            ]
        )
    return sets
