import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.records import Ragged

ROWS = st.lists(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6), max_size=8)


def test_rows_lie_one_after_another():
    ragged = Ragged.from_lists([[1, 2, 3], [], [4]], np.int32)
    assert ragged.values.tolist() == [1, 2, 3, 4]
    assert ragged.offsets.tolist() == [0, 3, 3, 4]
    assert (len(ragged), ragged.values.dtype, ragged.offsets.dtype) == (3, np.int32, np.int64)
    assert ragged.row(1).tolist() == []


@given(ROWS)
def test_lists_come_back_as_they_went_in(rows):
    ragged = Ragged.from_lists(rows, np.int32)
    assert ragged.to_lists() == rows
    assert [ragged.row(r).tolist() for r in range(len(ragged))] == rows
    assert ragged.faults("x", rows=len(rows), dtype="int32") == []


@given(ROWS, st.data())
def test_take_equals_choosing_from_the_lists(rows, data):
    ragged = Ragged.from_lists(rows, np.int32)
    index = st.integers(0, max(0, len(rows) - 1))
    chosen = data.draw(st.lists(index, max_size=10 if rows else 0))
    assert ragged.take(chosen).to_lists() == [rows[c] for c in chosen]
    mask = np.zeros(len(rows), bool)
    mask[chosen] = True
    assert ragged.take(mask).to_lists() == [rows[c] for c in sorted({*chosen})]


@given(st.lists(ROWS, min_size=1, max_size=4))
def test_concat_equals_adding_the_lists(parts):
    joined = Ragged.concat([Ragged.from_lists(rows, np.int32) for rows in parts])
    assert joined.to_lists() == [row for rows in parts for row in rows]


@given(ROWS, st.data())
def test_a_slice_and_the_rest_make_the_whole(rows, data):
    cut = data.draw(st.integers(0, len(rows)))
    ragged = Ragged.from_lists(rows, np.int32)
    head, tail = ragged.slice(0, cut), ragged.slice(cut, len(rows))
    assert head.to_lists() == rows[:cut]
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
    assert (len(empty), empty.values.dtype, empty.to_lists()) == (0, np.float32, [])
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
