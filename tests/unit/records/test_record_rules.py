"""What each record refuses, and that it tells every fault at once."""

import hashlib
import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from planish.base.errors import RecordError
from planish.records import Ragged, RolloutSet, ValueSet, WaitingSet, read_set, write_set
from planish.records.parquet import decode_pieces
from planish.records.prompts import prompt_id
from planish.show.command import show
from tests.unit.records.samples import (
    SAMPLES,
    changed,
    file_of,
    random_prompts,
    random_rewards,
    random_rollouts,
    random_traces,
    routed,
    rows_of,
    take_rows,
)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_samples_are_valid_and_equal_themselves_only(kind, seed):
    record = SAMPLES[kind](seed)
    record.validate()
    assert record == SAMPLES[kind](seed)
    assert record != SAMPLES[kind](seed + 1)
    assert record != "something else"


def test_the_prompt_id_is_the_digest_of_canonical_json():
    messages = [{"content": "1+1=", "role": "user"}]
    text = b'[[{"content":"1+1=","role":"user"}],"2"]'
    assert prompt_id(messages, "2") == hashlib.sha256(text).hexdigest()[:16]
    assert prompt_id([{"role": "user", "content": "1+1="}], "2") == prompt_id(messages, "2")
    assert prompt_id(messages, "3") != prompt_id(messages, "2")


def floats(*values):
    return np.array(values, np.float32)


def ints(*values):
    return np.array(values, np.int32)


def ragged(rows, dtype=np.float32):
    return Ragged.from_lists(rows, dtype)


PROMPTS = random_prompts(rows=2)
REWARDS = random_rewards(rows=2)
TRACES = random_traces(rows=2)
ROLLOUTS = random_rollouts(groups=2, group_size=2)
ROUTED = routed()
WAITING = WaitingSet(
    ragged([[3], [4, 5]], np.int32),
    ragged([[7, 1], [1]], np.int32),
    ragged([[0.5, 0.25], [-1.0]]),
    ragged([[1.0, 1.0], [0.0]]),
)
VALUES = ValueSet.from_rows(
    {(7, 0): [0.5, -0.25], (2, 3): [1.0], (2, 1): [], (2**40, 0): [3.0, 4.0, 5.0]}
)


def logprobs(bad):
    values = ROLLOUTS.rollout_logprobs.values.copy()
    values[1] = bad
    return Ragged(values, ROLLOUTS.rollout_logprobs.offsets)


BROKEN = [
    (PROMPTS, "prompt_id", ["A" * 16, "b" * 16], "16 hex digits, got 'AAAAAAAAAAAAAAAA' in row 0"),
    (PROMPTS, "prompt_id", ["b" * 16] * 2, "must not repeat, got 'bbbbbbbbbbbbbbbb' in row 0"),
    (PROMPTS, "answer", ["1"], "`answer` must be a list of 2 texts, got 1"),
    (PROMPTS, "answer", [1, "2"], "`answer` must be text that UTF-8 can hold, got 1 in row 0"),
    (PROMPTS, "answer", ["1", "\ud800"], "UTF-8 can hold, got '\\ud800' in row 1"),
    (PROMPTS, "source", "ab", "`source` must be a list of 2 texts, got str"),
    (PROMPTS, "messages", [[]], "list of 2 lists of messages, got 1"),
    (PROMPTS, "messages", [[], [{"role": "user"}]], "in row 0"),
    (PROMPTS, "messages", [[{"role": "user", "content": 1}]] * 2, "got [{'role': 'user', 'content"),
    (PROMPTS, "pass_rate", floats(0, 1.5), "`pass_rate` must be in 0..1 or NaN, got 1.5 in row 1"),
    (PROMPTS, "pass_rate", np.zeros(2), "`pass_rate` must be [2] float32, got [2] float64"),
    (PROMPTS, "pass_rate", [0.0, 1.0], "`pass_rate` must be an array [R] float32, got list"),
    (TRACES, "prompt_id", ["x", "b" * 16], "16 hex digits, got 'x' in row 0"),
    (TRACES, "response", ["a"], "`response` must be a list of 2 texts, got 1"),
    (REWARDS, "accuracy", floats(0, 0.5), "`accuracy` must be 0 or 1, got 0.5 in row 1"),
    (REWARDS, "length_penalty", floats(0, 0.5), "must be 0 or less, got 0.5 in row 1"),
    (REWARDS, "reward", floats(9, np.nan), "`reward` must be finite, got nan in row 1"),
    (REWARDS, "reward", floats(9, 9), "`reward` must be outcome + length_penalty, got 9.0 for "),
    (REWARDS, "keep", np.zeros(3, bool), "`keep` must be [2] bool, got [3] bool"),
    (ROLLOUTS, "group_index", ints(0, 0, 2, 2), "each of 0..1 and no other, got 2 values in 0..2"),
    (ROLLOUTS, "group_index", ints(1, 1, 0, 0), "not decrease to the next row, got 1 in row 1"),
    (ROLLOUTS, "group_index", ints(0, 0, 0, 0), "must hold each of 0..1"),
    (ROLLOUTS, "sample_index", ints(0, 0, 0, 1), "increase within a group, got 0 for 0 in row 0"),
    (ROLLOUTS, "sample_index", ints(-1, 1, 0, 1), "must be 0 or more, got -1"),
    (ROLLOUTS, "window_start", ints(0, 0, 0, 13), "in 0..response length, got 13 for"),
    (ROLLOUTS, "window_start", ints(-1, 0, 0, 0), "in 0..response length, got -1 for"),
    (ROLLOUTS, "finish", np.array([0, 1, 2, 4], np.int8), "must be in 0..3, got 4 in row 3"),
    (ROLLOUTS, "prompt_id", ["a" * 16] * 3 + ["b" * 16], "must be equal in all rows of a group"),
    (ROLLOUTS, "prompt_id", ["x"] * 4, "16 hex digits, got 'x' in row 0"),
    (ROLLOUTS, "rollout_id", ["x"] * 4, "got 'x' for "),
    (ROLLOUTS, "prompt_tokens", ragged([[1]], np.int32), "must hold each of 0..0 and no other"),
    (ROLLOUTS, "prompt_tokens", ragged([[1], [-2]], np.int32), "must be 0 or more, got -2"),
    (ROLLOUTS, "response_tokens", [[1]] * 4, "must be a Ragged of int32, got list"),
    *(
        (ROLLOUTS, "rollout_logprobs", logprobs(bad), f"finite and 0 or less, got {bad} (1 values)")
        for bad in (np.nan, np.inf, -np.inf, 0.5)
    ),
    (ROLLOUTS, "rollout_logprobs", ragged([[-1.0]] * 4), "one value per response token, got 1 for"),
    (ROUTED, "experts_per_token", None, "must be there together, got one of them"),
    (ROUTED, "experts_per_token", np.full(20, 4, np.int32), "for 4 for"),
    (ROUTED, "experts_per_token", np.full(20, 0, np.int32), "for 0 for"),
    (ROUTED, "experts_per_token", np.full(20, 2), "`experts_per_token` must be [20] int32"),
    (ROUTED, "routing", ragged([[1]] * 20, np.int8), "choices for each prompt and"),
    (ROUTED, "routing", ragged([[-2]] * 20, np.int8), "or -1 where unknown, got -2"),
    (ROUTED, "routing", ragged([[1]] * 20, np.int32), "values must be [N] int8"),
    (ROUTED, "routing", ragged([[1]] * 19, np.int8), "`routing` must have 20 rows"),
    (WAITING, "prompt_tokens", ragged([[3], []], np.int32), "at least one token, got 0 in row 1"),
    (WAITING, "response_tokens", ragged([[7, -1], [1]], np.int32), "must be token ids, got -1"),
    (WAITING, "values", ragged([[0.5], [1.0]]), "one number per response token, got 1 for 2 in"),
    (WAITING, "returns", ragged([[1.0, np.nan], [0.0]]), "`returns` must be finite, got nan (1 "),
    (WAITING, "returns", ragged([[1.0, 1.0]]), "`returns` must have 2 rows, got 1"),
    (WAITING, "values", ragged([[1, 1], [0]], np.int32), "`values` values must be"),
    (VALUES, "ordinal", np.array([2, 2, 1, 9]), "must rise to the next row, got ((2, 3), (1, 0))"),
    (VALUES, "sample_index", ints(1, 1, 0, 0), "got ((2, 1), (2, 1))"),
    (VALUES, "ordinal", np.array([-1, 2, 7, 9]), "`ordinal` must be 0 or more, got -1"),
    (VALUES, "ordinal", ints(2, 2, 7, 9), "int64"),
    (VALUES, "values", ragged([[], [np.nan], [0.5, 1], [1.0]]), "`values` must be finite, got nan"),
    (VALUES, "values", ragged([[], [1]]), "`values` must have 4 rows, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("record", "column", "value", "fault"), BROKEN)
def test_a_broken_rule_is_told_with_the_value_seen(record, column, value, fault):
    with pytest.raises(RecordError) as raised:
        changed(record, **{column: value}).validate()
    assert fault in str(raised.value)


def test_all_faults_are_told_in_one_message():
    faulty = changed(
        ROLLOUTS,
        finish=np.array([0, 0, 0, 9], np.int8),
        window_start=ints(99, 0, 0, 0),
        rollout_id=["x"] * 4,
        prompt_id=["y"] * 4,
    )
    with pytest.raises(RecordError) as raised:
        faulty.validate()
    for part in ("`finish`", "`window_start`", "`prompt_id`", "(4 rows)", "rollout stage"):
        assert part in str(raised.value)


def test_taking_groups_keeps_rows_together_and_renumbers():
    rollouts = random_rollouts(groups=4, group_size=3)
    taken = rollouts.take_groups([3, 1])
    taken.validate()
    assert taken.group_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert taken.answer == [str(r) for r in (9, 10, 11, 3, 4, 5)]
    assert taken.prompt_tokens == rollouts.prompt_tokens.take([3, 1])
    assert taken.response_tokens == rollouts.response_tokens.take([9, 10, 11, 3, 4, 5])
    assert rollouts.take_groups(np.array([False, True, False, True])).answer[:3] == ["3", "4", "5"]
    assert rollouts.take_groups([]) == RolloutSet.empty()


def test_taking_rows_drops_groups_that_become_empty():
    rollouts = random_rollouts(groups=4, group_size=3)
    taken = take_rows(rollouts, [11, 0, 9])
    taken.validate()
    assert taken.answer == ["0", "9", "11"]
    assert taken.group_index.tolist() == [0, 1, 1]
    assert taken.sample_index.tolist() == [0, 0, 2]
    assert take_rows(rollouts, np.zeros(12, bool)) == RolloutSet.empty()


def test_concat_undoes_taking_apart():
    rollouts = random_rollouts(groups=5, group_size=2)
    parts = [rollouts.take_groups([0, 1]), RolloutSet.empty(), rollouts.take_groups([2, 3, 4])]
    joined = RolloutSet.concat(parts)
    joined.validate()
    assert joined == rollouts
    assert (joined.num_rows, joined.num_groups) == (10, 5)
    assert RolloutSet.concat([]) == RolloutSet.empty()


def test_prompts_can_be_taken_in_another_order():
    taken = random_prompts(rows=5).take([4, 0])
    assert taken.answer == ["4", "0"]
    assert np.isnan(taken.pass_rate[1])
    taken.validate()


ROWS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=8)


@given(ROWS)
def test_lists_come_back_as_they_went_in(rows):
    ragged = Ragged.from_lists(rows, np.int32)
    assert rows_of(ragged) == rows
    assert ragged.faults("x", rows=len(rows), dtype="int32") == []


@given(ROWS, st.data())
def test_take_equals_choosing_from_the_lists(rows, data):
    ragged = Ragged.from_lists(rows, np.int32)
    index = st.integers(0, max(0, len(rows) - 1))
    chosen = data.draw(st.lists(index, max_size=10 if rows else 0))
    assert rows_of(ragged.take(chosen)) == [rows[c] for c in chosen]
    mask = np.zeros(len(rows), bool)
    mask[chosen] = True
    assert rows_of(ragged.take(mask)) == [rows[c] for c in sorted({*chosen})]


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_concat_equals_adding_the_lists(parts):
    joined = Ragged.concat([Ragged.from_lists(rows, np.int32) for rows in parts])
    assert rows_of(joined) == [row for rows in parts for row in rows]


@given(ROWS, st.data())
def test_a_slice_and_the_rest_make_the_whole(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    ragged = Ragged.from_lists(rows, np.int32)
    head, tail = ragged.slice(0, cut), ragged.slice(cut, len(rows))
    assert rows_of(head) == rows[:cut]
    assert Ragged.concat([head, tail]) == ragged


def test_equality_compares_values_offsets_and_dtype():
    one = Ragged.from_lists([[1.0, float("nan")], []], np.float32)
    assert one == Ragged.from_lists([[1.0, float("nan")], []], np.float32)
    assert one != Ragged.from_lists([[1.0], [float("nan")]], np.float32)
    assert one != Ragged.from_lists([[1.0, float("nan")], []], np.float64)
    assert one != Ragged.from_lists([[1.0, 2.0], []], np.float32)
    assert one != [[1.0], []]


def test_an_empty_array_has_no_rows_and_its_dtype():
    empty = Ragged.empty(np.float32)
    assert (len(empty), empty.values.dtype, rows_of(empty)) == (0, np.float32, [])
    assert Ragged.from_lists([], np.float32) == empty
    assert empty.take([]) == empty


@pytest.mark.parametrize(
    ("values", "offsets", "fault"),
    [
        ([1, 2, 3], [0, 2], "rise from 0 to 3, got 0 to 2"),
        ([1, 2, 3], [1, 3], "rise from 0 to 3, got 1 to 3"),
        ([1, 2, 3], [0, 4, 3], "rise from 0 to 3"),
        ([1, 2, 3], [0, 1, 3, 3], "must have 2 rows, got 3"),
        ([1, 2, 3], [], "must be [R + 1] int64, got [0]"),
        ([[1], [2]], [0, 1, 2], "must be [N] int32, got [2, 1]"),
    ],
)
def test_wrong_offsets_are_told(values, offsets, fault):
    ragged = Ragged(np.array(values, np.int32), np.array(offsets, np.int64))
    assert any(fault in text for text in ragged.faults("x", rows=2, dtype="int32"))
    wrong = Ragged(np.zeros(1, np.int64), np.array([0, 1]))
    assert wrong.faults("x", rows=1, dtype="int32") == [
        "`x` values must be [N] int32, got [1] int64"
    ]


LAYERS, CHOICES = 3, 2
PYARROW = "26.0.1"
FILE_SHA256 = "4ac6abe598ca31a9dca510fc96332b70802fcebb28a39362e5f9f812a5ebbd71"
"""Of the file of `random_rollouts()` when rollout sets had no optional column, and what wrote it.
"""


def written(folder, rollouts):
    uri = f"file://{folder}"
    write_set(uri, rollouts, parents={}, attributes={})
    return uri


@pytest.mark.parametrize(("dtype", "high"), [(np.int8, 120), (np.int16, 500)])
def test_experts_are_read_as_they_were_written(tmp_path, dtype, high):
    rollouts = routed(dtype=dtype, high=high)
    found = read_set(RolloutSet, written(tmp_path, rollouts))
    assert found == rollouts
    assert found.routing.values.dtype == dtype
    assert found.routing_of(3).shape == (int(rollouts.num_tokens()[3]), LAYERS, CHOICES)
    assert (found.routing_of(3)[-1] == -1).all()


def test_a_set_without_experts_has_the_bytes_that_it_had_before_the_column():
    plain = random_rollouts()
    schema = pq.ParquetFile(pa.BufferReader(file_of(plain))).schema_arrow
    assert schema.names == [c.name for c in RolloutSet.COLUMNS if not c.optional]
    if pa.__version__ == PYARROW:
        assert hashlib.sha256(file_of(plain)).hexdigest() == FILE_SHA256


def test_a_set_without_experts_opens_and_one_with_them_opens_without(tmp_path):
    plain = random_rollouts()
    found = read_set(RolloutSet, written(tmp_path / "plain", plain))
    assert found == plain
    assert (found.routing, found.routing_of(0)) == (None, None)
    uri = written(tmp_path / "routed", routed())
    assert read_set(RolloutSet, uri, with_optional=False) == plain
    assert routed() != plain


def test_rows_and_groups_take_their_experts_along():
    rollouts = routed()
    rows = take_rows(rollouts, [2, 5, 11])
    for place, row in enumerate([2, 5, 11]):
        assert (rows.routing_of(place) == rollouts.routing_of(row)).all()
    groups = rollouts.take_groups([3, 1])
    groups.validate()
    assert (groups.routing_of(0) == rollouts.routing_of(12)).all()
    assert rollouts.take_groups(range(5)) == rollouts


def test_sets_with_and_without_experts_join_with_unknown_ones():
    one, other = routed(0), random_rollouts(1)
    joined = RolloutSet.concat([other, RolloutSet.empty(), one])
    joined.validate()
    assert joined.num_rows == 40
    assert (joined.routing_of(7) == -1).all()
    assert joined.routing_of(7).shape[1:] == (LAYERS, CHOICES)
    assert (joined.routing_of(25) == one.routing_of(5)).all()
    assert RolloutSet.concat([other, RolloutSet.empty()]).routing is None
    assert RolloutSet.concat([RolloutSet.empty(), one]) == one


def test_show_names_the_column_only_where_it_is(tmp_path):
    for name, rollouts in (("plain", random_rollouts()), ("routed", routed())):
        out = io.StringIO()
        show(written(tmp_path / name, rollouts), Console(file=out, width=200), rows=1)
        assert ("list<int8|int16>" in out.getvalue()) == (name == "routed")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.drop_columns(["accuracy"]), "accuracy"),
        (lambda t: t.rename_columns({"reward": "rewards"}), "reward"),
        (lambda t: t.set_column(0, "accuracy", t["accuracy"].cast("float64")), "accuracy.*double"),
        (lambda t: t.set_column(0, "accuracy", t["extracted"]), "accuracy.*string"),
        (lambda t: t.set_column(0, "accuracy", t["accuracy"]), "accuracy.*without nulls"),
        (lambda t: t.drop_columns(["reward", "keep"]), "reward"),
    ],
)
def test_columns_of_another_release_are_told(change, words):
    record = random_rewards()
    table = pq.read_table(io.BytesIO(file_of(record)))
    sink = io.BytesIO()
    pq.write_table(change(table), sink)
    with pytest.raises(RecordError, match=rf"must have the column `.*{words}"):
        list(decode_pieces(sink.getvalue(), record.COLUMNS, name="set"))


def test_columns_that_a_set_has_besides_are_passed_over():
    record = random_rewards()
    table = pq.read_table(io.BytesIO(file_of(record)))
    sink = io.BytesIO()
    pq.write_table(table.append_column("later", table["reward"]), sink, store_schema=False)
    pieces = list(decode_pieces(sink.getvalue(), record.COLUMNS, name="set"))
    assert type(record).from_columns(pieces[0]) == record
