"""Rules of records, rows that are taken and joined, columns that a set may lack."""

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
from planish.records import Ragged, RolloutSet, read_set, write_set
from planish.records.parquet import decode_pieces
from planish.records.prompts import prompt_id
from planish.show.command import show
from tests.unit.records import rules
from tests.unit.records.samples import (
    SAMPLES,
    changed,
    file_of,
    random_prompts,
    random_rewards,
    random_rollouts,
    routed,
    rows_of,
    take_groups,
    take_rows,
)


@pytest.mark.parametrize("kind", SAMPLES)
@pytest.mark.parametrize("seed", range(3))
def test_samples_are_valid_and_equal_themselves_only(kind, seed):
    record = SAMPLES[kind](seed)
    rules.check(record)
    assert record == SAMPLES[kind](seed)
    assert record != SAMPLES[kind](seed + 1)
    assert record != "something else"


def test_the_prompt_id_is_the_digest_of_canonical_json():
    messages = [{"content": "1+1=", "role": "user"}]
    text = b'[[{"content":"1+1=","role":"user"}],"2"]'
    assert prompt_id(messages, "2") == hashlib.sha256(text).hexdigest()[:16]
    assert prompt_id([{"role": "user", "content": "1+1="}], "2") == prompt_id(messages, "2")
    assert prompt_id(messages, "3") != prompt_id(messages, "2")


@pytest.mark.parametrize(
    ("record", "column", "bad"),
    [
        (random_rewards(rows=2), "reward", np.array([9, np.nan], np.float32)),
        (random_rollouts(), "rollout_logprobs", -np.inf),
    ],
)
def test_numbers_that_are_not_finite_are_not_written(tmp_path, record, column, bad):
    if column == "rollout_logprobs":
        lengths = record.response_tokens.lengths.tolist()
        bad = Ragged.from_lists([[bad] * n for n in lengths], np.float32)
    faulty = changed(record, **{column: bad})
    with pytest.raises(RecordError, match=f"`{column}` must be finite, got (nan|-inf) "):
        write_set(tmp_path.as_uri(), faulty, parents={}, attributes={})
    assert list(tmp_path.iterdir()) == []


def test_taking_groups_keeps_rows_together_and_renumbers():
    rollouts = random_rollouts(groups=4, group_size=3)
    taken = take_groups(rollouts, [3, 1])
    rules.check(taken)
    assert taken.group_index.tolist() == [0, 0, 0, 1, 1, 1]
    assert taken.answer == [str(r) for r in (9, 10, 11, 3, 4, 5)]
    assert taken.prompt_tokens == rollouts.prompt_tokens.take([3, 1])
    assert taken.response_tokens == rollouts.response_tokens.take([9, 10, 11, 3, 4, 5])
    assert take_groups(rollouts, []) == RolloutSet.empty()


def test_taking_rows_drops_groups_that_become_empty():
    rollouts = random_rollouts(groups=4, group_size=3)
    taken = take_rows(rollouts, [11, 0, 9])
    rules.check(taken)
    assert taken.answer == ["0", "9", "11"]
    assert taken.group_index.tolist() == [0, 1, 1]
    assert taken.sample_index.tolist() == [0, 0, 2]
    assert take_rows(rollouts, np.zeros(12, bool)) == RolloutSet.empty()


def test_concat_undoes_taking_apart():
    rollouts = random_rollouts(groups=5, group_size=2)
    parts = [take_groups(rollouts, [0, 1]), RolloutSet.empty(), take_groups(rollouts, [2, 3, 4])]
    joined = RolloutSet.concat(parts)
    rules.check(joined)
    assert joined == rollouts
    assert (joined.num_rows, joined.num_groups) == (10, 5)
    assert RolloutSet.concat([]) == RolloutSet.empty()


def test_prompts_can_be_taken_in_another_order():
    taken = random_prompts(rows=5).take([4, 0])
    assert taken.answer == ["4", "0"]
    assert np.isnan(taken.pass_rate[1])
    rules.check(taken)


ROWS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=8)


@given(ROWS)
def test_lists_come_back_as_they_went_in(rows):
    ragged = Ragged.from_lists(rows, np.int32)
    assert rows_of(ragged) == rows


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
    groups = take_groups(rollouts, [3, 1])
    rules.check(groups)
    assert (groups.routing_of(0) == rollouts.routing_of(12)).all()
    assert take_groups(rollouts, range(5)) == rollouts


def test_sets_with_and_without_experts_join_with_unknown_ones():
    one, other = routed(0), random_rollouts(1)
    joined = RolloutSet.concat([other, RolloutSet.empty(), one])
    rules.check(joined)
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
