"""Slots of successive batching: who generates in this iteration, who waits, who goes on.

A shard has a fixed number of slots. Responses with tokens keep theirs, then samples that wait for
one in the order of their entry, then new prompts: a prompt enters with all its samples. No engine
here, so that the rule can be tested over many simulated iterations.

Source: T-PPO, arXiv 2506.15050 (successive batching); the order of entry, and that no response is
ever dropped, are ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from planish.base.errors import RecordError
from planish.records.rollouts import FinishReason
from planish.records.stream import Cursor
from planish.stages.rollout.side_sets import read_side_set
from planish.stages.rollout.slots import Slot, SlotGroup, from_set

Unfinished = Literal["train", "hold", "hold_group"]
"""What becomes of a response that goes on: the configuration explains it."""


def deal(sets: Sequence[Sequence[SlotGroup]], shard: int, num_shards: int) -> list[SlotGroup]:
    """Return the carried groups of one shard, in the order of their entry.

    Shard s goes on with set s; where the number of shards has changed, all groups are dealt out
    one by one. A group is never split.

    Args:
        sets: groups of each carry set of the iteration before, in the order of its shards.
        shard: index of this shard.
        num_shards: shards of this iteration.
    """
    if len(sets) == num_shards:
        return _by_entry(sets[shard])
    return _by_entry([group for part in sets for group in part])[shard::num_shards]


def _by_entry(groups: Sequence[SlotGroup]) -> list[SlotGroup]:
    return sorted(groups, key=lambda group: (group.drawn, group.ordinal))


def num_open(groups: Sequence[SlotGroup]) -> int:
    """Return how many responses go on or wait."""
    return sum(slot.is_open for group in groups for slot in group.slots)


def refill(
    carried: Sequence[SlotGroup], num_slots: int, draw: Iterator[SlotGroup]
) -> list[SlotGroup]:
    """Return the carried groups, and new ones behind them until every slot is taken."""
    groups = list(carried)
    free = num_slots - num_open(groups)
    while free > 0:
        group = next(draw)
        groups.append(group)
        free -= num_open([group])
    return groups


def place(groups: Sequence[SlotGroup], num_slots: int) -> list[tuple[int, int]]:
    """Return (group, slot) of the responses that generate now: those with tokens come first.

    Example:
        >>> from planish.stages.rollout.slots import Slot
        >>> group = SlotGroup(0, 1, "0" * 16, (7,), "5", "exact", (Slot(0), Slot(1), Slot(2)))
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


def settle(
    groups: Sequence[SlotGroup], unfinished: Unfinished
) -> tuple[list[SlotGroup], list[SlotGroup]]:
    """Divide groups after generation into those for the rollout set and those for the carry set.

    Args:
        groups: all groups of the shard.
        unfinished: `train` gives every response with tokens to the rollout set, with its current
            window; `hold` gives a response when it is finished, `hold_group` when its whole group
            is, each once and with all tokens.

    Returns:
        (rollout, carry). Every open response is in the carry; a finished one is in exactly one.
    """
    given: list[SlotGroup] = []
    kept: list[SlotGroup] = []
    for group in groups:
        is_done = not num_open([group])
        for slots, target in zip(_divide(group, unfinished, is_done), (given, kept), strict=True):
            if slots:
                target.append(replace(group, slots=tuple(slots)))
    return given, kept


def _divide(
    group: SlotGroup, unfinished: Unfinished, is_done: bool
) -> tuple[list[Slot], list[Slot]]:
    open_slots = [slot for slot in group.slots if slot.is_open]
    if unfinished == "train":
        return [slot for slot in group.slots if slot.num_tokens], open_slots
    whole = [replace(slot, start=0) for slot in group.slots if not slot.is_open]
    if unfinished == "hold":
        return whole, open_slots
    return (whole, []) if is_done else ([], list(group.slots))


def group_facts(groups: Sequence[SlotGroup]) -> dict[str, list[int]]:
    """Return what the manifest of a carry set says of each group."""
    return {
        "ordinals": [group.ordinal for group in groups],
        "drawn": [group.drawn for group in groups],
    }


def read_carry(pins: Sequence[str], cursor: Cursor) -> list[list[SlotGroup]]:
    """Read the groups of each carry set.

    Args:
        pins: carry sets in the order of their shards.
        cursor: of the same train state: the ordinals of carried groups are consumed.

    Raises:
        ObjectMissing: a set is gone.
        RecordError: a set is damaged, or belongs to another train state.
    """
    sets = [_read(pin) for pin in pins]
    counts = Counter(group.ordinal for part in sets for group in part)
    free = set(cursor["pending"])
    wrong = [k for k, n in counts.items() if n > 1 or k >= cursor["next"] or k in free]
    if wrong:
        raise RecordError(
            f"carried groups must be of prompts that were drawn once, got ordinals {wrong[:8]} "
            f"({len(wrong)} in all) twice, or free by the cursor whose next is {cursor['next']}; "
            "carry sets and cursor come from different train states: resume from an earlier one"
        )
    return sets


def _read(pin: str) -> list[SlotGroup]:
    rollouts, facts = read_side_set(pin, ("ordinals", "drawn"), kind="carry")
    aborted = np.flatnonzero(rollouts.finish == FinishReason.ABORT)
    if len(aborted):
        raise RecordError(
            f"a carried response must go on or wait for its group, got ABORT in "
            f"{rollouts.rollout_id[aborted[0]]} of `{pin}`; resume from an earlier state"
        )
    return from_set(rollouts, facts["ordinals"], facts["drawn"])
