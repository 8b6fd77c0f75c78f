from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import RecordError
from planish.records import layout
from planish.records.stream import (
    StreamState,
    advance,
    assign,
    fresh_cursor,
    parse_cursor,
    parse_data,
    position,
    state_root,
)


def test_pending_ordinals_come_first():
    cursor = {"next": 9, "pending": [2, 5, 7]}
    assert list(islice(assign(cursor, 0, 2), 4)) == [2, 7, 10, 12]
    assert list(islice(assign(cursor, 1, 2), 4)) == [5, 9, 11, 13]


def test_advance_worked_by_hand():
    # drawn 0..7 by two shards; 3 and 6 were surplus
    cursor = advance(fresh_cursor(), [0, 2, 4, 1, 5, 7])
    assert cursor == {"next": 8, "pending": [3, 6]}
    assert advance(cursor, []) == cursor
    assert advance(cursor, [3, 10]) == {"next": 11, "pending": [6, 8, 9]}


@pytest.mark.parametrize(("again", "named"), [([4, 4], [4]), ([5], [5]), ([0, 3], [0])])
def test_advance_refuses_an_ordinal_that_is_consumed(again, named):
    with pytest.raises(RecordError, match=f"consumed once, got ordinals \\[{named[0]}\\] again"):
        advance({"next": 6, "pending": [3, 4]}, again)


@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 2**30)), min_size=1, max_size=8),
)
def test_no_ordinal_is_lost_or_consumed_twice(num_shards, iterations):
    cursor, consumed = fresh_cursor(), []
    for drawn, mask in iterations:
        taken = []
        for shard in range(num_shards):
            ordinals = list(islice(assign(cursor, shard, num_shards), drawn))
            taken += [k for bit, k in enumerate(ordinals) if mask >> (bit * 3 + shard) & 1]
        cursor = advance(cursor, taken)
        consumed += taken
        assert parse_cursor(cursor) == cursor
    assert len(set(consumed)) == len(consumed)
    assert sorted([*consumed, *cursor["pending"]]) == list(range(cursor["next"]))


@given(st.integers(1, 40), st.integers(0, 2**53 - 1), st.integers(0, 1000))
def test_each_epoch_visits_each_prompt_once(num_prompts, seed, epoch):
    ordinals = range(epoch * num_prompts, (epoch + 1) * num_prompts)
    assert sorted(position(k, num_prompts, seed) for k in ordinals) == list(range(num_prompts))


def test_the_order_of_an_epoch_stays_as_it_is():
    assert [position(k, 8, 0) for k in range(8)] == [2, 4, 3, 6, 5, 0, 1, 7]


def test_an_empty_prompt_set_is_refused():
    with pytest.raises(RecordError, match="at least one prompt, got 0; the filters"):
        position(0, 0, 0)


@pytest.mark.parametrize(
    "raw",
    [None, [], {}, {"next": 3}, {"next": "3", "pending": []}, {"next": True, "pending": []},
     {"next": 3, "pending": 1}, {"next": 3, "pending": [3]}, {"next": 3, "pending": [1, 0]},
     {"next": 3, "pending": [1, 1]}, {"next": 3, "pending": [-1]}, {"next": -1, "pending": []},
     {"next": 3, "pending": [], "more": 1}],
)  # fmt: skip
def test_a_damaged_cursor_is_refused(raw):
    with pytest.raises(RecordError, match=r"must be \{next, pending\}"):
        parse_cursor(raw)


def test_data_of_a_state_is_the_cursor_and_pins_below_the_root():
    cursor = {"next": 4, "pending": [2]}
    pin = f"iterations/00003/surplus/00#sha256={'0' * 64}"
    assert parse_data(cursor) == StreamState(cursor)
    assert parse_data({**cursor, "surplus": [pin]}) == StreamState(cursor, [pin])
    whole = StreamState(cursor, [pin], [pin, pin], pin, pin)
    assert parse_data(whole.to_data()) == whole
    assert StreamState(cursor).to_data() == cursor
    for name in ("surplus", "carry"):
        for bad in ("x", [1], ["iterations/00003/surplus/00"], {}):
            with pytest.raises(RecordError, match=r"must hold pins|pinned URI"):
                parse_data({**cursor, name: bad})
    for name in ("values", "waiting"):
        for bad in ([pin], 3, "iterations/00003/values"):
            with pytest.raises(RecordError, match=r"must hold pins|pinned URI"):
                parse_data({**cursor, name: bad})
    for bad in (None, {"next": 4}, {**cursor, "other": []}):
        with pytest.raises(RecordError, match="prompt cursor"):
            parse_data(bad)


def test_the_pins_of_a_state_are_relative_to_the_root_that_wrote_it():
    for root in ("file:///runs/a", "s3://runs/states/a", "file:///r/states/step-1"):
        pin = f"{layout.state(root, 12)}#sha256={'0' * 64}"
        assert state_root(pin) == root
