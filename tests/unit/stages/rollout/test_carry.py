"""Slots that generate or wait, and carry sets."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import RecordError
from planish.records.io import write_set
from planish.records.rollouts import FinishReason, RolloutSet
from planish.stages.rollout.carry import deal, place, read_carry, refill, settle
from planish.stages.rollout.groups import Group, Slot, as_set, from_set, group_facts
from tests.unit.records import rules


def slot(sample, num_tokens=0, finish=FinishReason.WINDOW, start=0):
    grown = Slot(sample).extended(
        list(range(3, 3 + num_tokens)), [-0.5] * num_tokens, [1] * num_tokens, finish
    )
    return replace(grown, start=start, text="x")


def group(ordinal, *slots, drawn=1):
    return Group(ordinal, drawn, f"{ordinal:016x}", (7, 8), "5", "exact", slots)


def names(groups):
    return [(g.ordinal, s.sample) for g in groups for s in g.slots]


def test_responses_with_tokens_come_first_then_those_that_wait_in_their_order():
    groups = [group(4, slot(0), slot(1, 3)), group(5, slot(0, 2), slot(1), slot(2))]
    assert place(groups, 2) == [(0, 1), (1, 0)]
    assert place(groups, 3) == [(0, 0), (0, 1), (1, 0)]
    assert place(groups, 4) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert place(groups, 9) == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]


def test_finished_responses_take_no_slot():
    groups = [group(4, slot(0, 3, FinishReason.STOP), slot(1, 3, FinishReason.LENGTH), slot(2))]
    assert groups[0].num_open == 1
    assert place(groups, 5) == [(0, 2)]


def test_a_new_prompt_enters_with_all_its_samples_though_one_slot_is_free():
    carried = [group(1, slot(0, 2), slot(1, 2))]
    new = (group(k, slot(0), slot(1), slot(2)) for k in range(10, 20))
    groups = refill(carried, 3, new)
    assert names(groups) == [(1, 0), (1, 1), (10, 0), (10, 1), (10, 2)]
    assert place(groups, 3) == [(0, 0), (0, 1), (1, 0)]
    # nothing enters while those that wait fill the slots
    assert names(refill(groups, 4, new)) == names(groups)


def test_groups_stay_with_their_shard_while_the_number_of_shards_does():
    sets = [[group(3, slot(0)), group(1, slot(0))], [group(2, slot(0))]]
    assert [names(deal(sets, s, 2)) for s in range(2)] == [[(1, 0), (3, 0)], [(2, 0)]]


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=4), num_shards=st.integers(1, 5))
def test_every_group_is_dealt_to_one_shard_whole(counts, num_shards):
    ordinals = iter(range(100))
    sets = [[group(next(ordinals), slot(0, 1), slot(1)) for _ in range(n)] for n in counts]
    dealt = [deal(sets, s, num_shards) for s in range(num_shards)]
    assert sorted(names([g for part in dealt for g in part])) == sorted(
        names([g for part in sets for g in part])
    )
    if len(counts) != num_shards:
        sizes = [len(part) for part in dealt]
        assert max(sizes) - min(sizes) <= 1


MIXED = group(7, slot(0, 4, FinishReason.STOP, start=2), slot(1, 4, start=2), slot(2))
DONE = group(8, slot(0, 3, FinishReason.LENGTH, start=1), slot(1, 1, FinishReason.STOP))


@pytest.mark.parametrize(
    ("unfinished", "given_rows", "kept_rows", "starts"),
    [
        ("train", [(7, 0), (7, 1), (8, 0), (8, 1)], [(7, 1), (7, 2)], [2, 2, 1, 0]),
        ("hold", [(7, 0), (8, 0), (8, 1)], [(7, 1), (7, 2)], [0, 0, 0]),
        ("hold_group", [(8, 0), (8, 1)], [(7, 0), (7, 1), (7, 2)], [0, 0]),
    ],
)
def test_rollouts_and_carry_share_out_the_responses(unfinished, given_rows, kept_rows, starts):
    given_groups, kept = settle([MIXED, DONE], unfinished)
    assert names(given_groups) == given_rows
    assert names(kept) == kept_rows
    assert as_set(given_groups).window_start.tolist() == starts


def test_groups_become_a_set_and_come_back():
    groups = [MIXED, group(9, slot(1, 5, start=3), drawn=4)]
    record = as_set(groups)
    rules.check(record)
    facts = group_facts(groups)
    assert facts == {"ordinals": [7, 9], "drawn": [1, 4]}
    again = from_set(record, facts["ordinals"], facts["drawn"])
    assert names(again) == names(groups)
    for before, after in zip(groups, again, strict=True):
        assert (before.prompt_id, before.drawn) == (after.prompt_id, after.drawn)
        for a, b in zip(before.slots, after.slots, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.logprobs.tolist() == b.logprobs.tolist()
            assert (b.start, b.finish) == (a.start, a.finish)
    assert from_set(RolloutSet.empty(), [], []) == []


def written(tmp_path, groups):
    uri = (tmp_path / f"carry-{len(list(tmp_path.iterdir()))}").as_uri()
    return write_set(uri, as_set(groups), parents={}, attributes=group_facts(groups)).pin()


def test_sets_are_read_in_the_order_of_their_shards(tmp_path):
    pins = [
        written(tmp_path, [MIXED]),
        written(tmp_path, []),
        written(tmp_path, [group(2, slot(0))]),
    ]
    sets = read_carry(pins, "c")
    # what is carried is all from before the next window
    slots = [slot for part in sets for group in part for slot in group.slots]
    assert all(slot.start == slot.num_tokens for slot in slots)
    assert [names(part) for part in sets] == [[(7, 0), (7, 1), (7, 2)], [], [(2, 0)]]


@pytest.mark.parametrize(
    "columns",
    [
        {"ordinals": [3, 4]},
        {"ordinals": [3], "drawn": [1]},
        {"ordinals": [3, 4], "drawn": ["1", "1"]},
        {"ordinals": [3, True], "drawn": [1, 1]},
        {"ordinals": {"0": 3}, "drawn": [1, 1]},
    ],
)
def test_groups_that_another_release_names_otherwise_are_told(tmp_path, columns):
    uri, rollouts = (
        (tmp_path / "carry").as_uri(),
        as_set([group(3, slot(0, 2)), group(4, slot(0, 1))]),
    )
    pin = write_set(uri, rollouts, parents={}, attributes=columns).pin()
    with pytest.raises(RecordError, match=r"must be a number for each of its 2 groups, got"):
        read_carry([pin], "c")
