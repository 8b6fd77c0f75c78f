from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import RecordError
from planish.records import Ragged, ValueSet, read_set, write_set

ROWS = {
    (7, 0): np.array([0.5, -0.25], np.float32),
    (2, 3): np.array([1.0], np.float32),
    (2, 1): np.array([], np.float32),
    (2**40, 0): np.array([3.0, 4.0, 5.0], np.float32),
}


def test_rows_are_sorted_by_ordinal_and_sample_and_come_back_by_key():
    values = ValueSet.from_rows(ROWS)
    assert values.ordinal.tolist() == [2, 2, 7, 2**40]
    assert values.sample_index.tolist() == [1, 3, 0, 0]
    assert values.values.to_lists() == [[], [1.0], [0.5, -0.25], [3.0, 4.0, 5.0]]
    back = values.to_rows()
    assert {key: row.tolist() for key, row in back.items()} == {
        key: row.tolist() for key, row in ROWS.items()
    }


@pytest.mark.slow
@given(
    st.dictionaries(
        st.tuples(st.integers(0, 2**50), st.integers(0, 15)),
        st.lists(st.floats(-10, 10, width=32), max_size=6),
        max_size=12,
    )
)
def test_any_rows_survive_the_store(tmp_path_factory, rows):
    values = ValueSet.from_rows({k: np.array(v, np.float32) for k, v in rows.items()})
    uri = f"file://{tmp_path_factory.mktemp('values')}/set"
    ref = write_set(uri, values, parents={}, attributes={"iteration": 1})
    assert ref.schema == "values/1"
    assert read_set(ValueSet, uri, sha256=ref.manifest_sha256) == values


def test_a_set_of_no_rows_is_a_set():
    empty = ValueSet.from_rows({})
    empty.validate()
    assert (empty.num_rows, empty.to_rows()) == (0, {})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ordinal": np.array([2, 2, 1, 9])}, r"must rise by.*\(1, 0\) after \(2, 3\)"),
        ({"sample_index": np.array([1, 1, 0, 0], np.int32)}, r"got \(2, 1\) after \(2, 1\)"),
        ({"ordinal": np.array([-1, 2, 7, 9])}, "`ordinal` must be 0 or more, got -1"),
        ({"ordinal": np.array([2, 2, 7, 9], np.int32)}, "int64"),
        (
            {"values": Ragged.from_lists([[], [np.nan], [0.5, 1], [1.0]], np.float32)},
            "`values` must be finite, got nan",
        ),
        ({"values": Ragged.from_lists([[], [1]], np.float32)}, "`values` must have 4 rows, got 2"),
    ],
)
def test_faults_are_told(change, message):
    with pytest.raises(RecordError, match=message):
        replace(ValueSet.from_rows(ROWS), **change).validate()
