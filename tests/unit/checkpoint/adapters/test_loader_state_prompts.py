"""Slots and surplus groups of a run over changing numbers of rollout shards, as loader state."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.adapters.base import apply, collect
from planish.checkpoint.adapters.loader_state import LoaderShard, LoaderState
from planish.checkpoint.format.small_objects import decode_extra, encode_extra
from planish.records.rollouts import FinishReason
from planish.records.stream import advance, assign, fresh_cursor
from planish.stages.rollout.carry import place, refill, settle
from planish.stages.rollout.groups import Group, Slot
from tests.thin import examples
from tests.unit.checkpoint.adapters.prompt_state import PromptState

GROUP_SIZE, WINDOW = 2, 3


def as_data(group, values):
    """Return a slot group with the values of its tokens as plain data."""
    raw = dataclasses.asdict(group)
    for slot in raw["slots"]:
        slot["finish"] = int(slot["finish"])
        slot["values"] = values[group.ordinal, slot["sample"]]
    return raw


def from_data(raw):
    slots = tuple(
        Slot(**{k: v for k, v in slot.items() if k not in ("values", "finish")},
             finish=FinishReason(slot["finish"]))
        for slot in raw["slots"]
    )  # fmt: skip
    return Group(**{**raw, "slots": slots})


def moved(states, size):
    """Save every shard's state and restore it under another number of shards, through bytes."""
    found = [collect("main", {"dataloader": s}, "plain", for_load=False).loader for s in states]
    common = decode_extra(encode_extra(found[0].common_data()))
    shards = [
        decode_extra(encode_extra(shard.to_data())) for state in found for shard in state.shards
    ]
    saved = LoaderState.from_data(common, shards)
    target = [PromptState(k, size) for k in range(size)]
    for state in target:
        wanted = collect("main", {"dataloader": state}, "plain", for_load=True)
        apply("main", {"dataloader": state}, "plain", wanted, {}, {}, saved)
    return target


def new_groups(ordinals, iteration, drawn):
    for ordinal in ordinals:
        drawn.append(ordinal)
        slots = tuple(Slot(k) for k in range(GROUP_SIZE))
        yield Group(ordinal, iteration, f"{ordinal:016x}", (1,), "", "", slots)


@pytest.mark.slow
@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 5), min_size=3, max_size=6), st.integers(0, 1000))
def test_every_token_is_generated_once_whatever_the_shards(sizes, seed):
    random = np.random.default_rng(seed)
    lengths, values, produced, trained = {}, {}, Counter(), Counter()
    cursor = fresh_cursor()
    states = [PromptState(k, sizes[0]) for k in range(sizes[0])]
    for iteration, size in enumerate(sizes):
        states = moved(states, size)
        assert len({str(state.cursor) for state in states}) == 1
        drawn = []
        for state in states:
            carried = [from_data(raw) for raw in state.slots]
            mine = assign(cursor, state.dp_rank, size)

            groups = refill(carried, 4, new_groups(mine, iteration, drawn))
            for g, s in place(groups, 4):
                group, slot = groups[g], groups[g].slots[s]
                key = (group.ordinal, slot.sample)
                total = lengths.setdefault(key, int(random.integers(1, 9)))
                stop = min(slot.num_tokens + WINDOW, total)
                tokens = list(range(slot.num_tokens, stop))
                produced.update((*key, t) for t in tokens)
                reason = FinishReason.STOP if stop == total else FinishReason.WINDOW
                versions = [iteration] * len(tokens)
                longer = slot.extended(tokens, [0.5] * len(tokens), versions, reason)
                values[key] = np.arange(stop, dtype=np.float32)
                slots = (*group.slots[:s], longer, *group.slots[s + 1 :])
                groups[g] = dataclasses.replace(group, slots=slots)
            for group in groups:
                for slot in group.slots:
                    values.setdefault((group.ordinal, slot.sample), np.zeros(0, np.float32))
            given_out, kept = settle(groups, "hold_group")
            state.slots = [as_data(group, values) for group in kept]
            done = [as_data(group, values) for group in given_out]
            state.surplus += done[1:]
            trained.update(group["ordinal"] for group in done[:1])
        cursor = advance(cursor, drawn)
        for state in states:
            state.cursor = cursor
    assert set(produced.values()) <= {1}
    held = Counter(raw["ordinal"] for s in states for raw in [*s.slots, *s.surplus])
    assert set((held + trained).values()) == {1}
    assert set(held + trained) == set(range(cursor["next"])) - set(cursor["pending"])
    for raw in itertools.chain(*(s.slots for s in states)):
        for slot in raw["slots"]:
            assert slot["tokens"].tolist() == list(range(len(slot["tokens"])))
            assert slot["values"].tolist() == slot["tokens"].tolist()
            assert slot["tokens"].dtype == np.int32


def test_what_is_equal_on_all_shards_comes_back():
    facts = {"kl": 0.125, "reference": "policy-7", "dataset_sha256": "ab" * 32}
    groups = [{"ordinal": k, "drawn": 3 - k, "tokens": np.arange(k)} for k in range(3)]
    cursor = {"next": 5, "pending": [4]}
    state = PromptState(0, 1, cursor, slots=groups[:2], surplus=groups[2:], facts=facts)
    first, second = moved([state], 2)
    assert (first.facts, first.cursor) == (facts, cursor)
    assert [g["ordinal"] for g in first.slots] == [1, 0]
    assert [g["ordinal"] for g in second.surplus] == [2]
    assert second.surplus[0]["tokens"].tolist() == [0, 1]


@pytest.mark.parametrize("group", [{"ordinal": 5}, {"ordinal": 4}, {"ordinal": "1"}, {}])
def test_a_group_of_a_prompt_that_is_free_is_refused(group):
    shard = LoaderShard(0, 0, buffer=[("slot", group)])
    with pytest.raises(CheckpointCorrupt, match="must be of a consumed prompt"):
        PromptState(0, 1).ckpt_restore({"cursor": {"next": 5, "pending": [4]}}, [shard])
