from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from planish.base.errors import RecordError
from planish.records import Ragged, WaitingSet, read_set, write_set
from tests.unit.records.samples import random_waiting


def ragged(rows, dtype=np.float32):
    return Ragged.from_lists(rows, dtype)


GOOD = WaitingSet(
    ragged([[3], [4, 5]], np.int32),
    ragged([[7, 1], [1]], np.int32),
    ragged([[0.5, 0.25], [-1.0]]),
    ragged([[1.0, 1.0], [0.0]]),
)


def test_rows_survive_the_store_in_their_order(tmp_path):
    uri = f"file://{tmp_path}/waiting"
    waiting = random_waiting(3)
    ref = write_set(uri, waiting, parents={}, attributes={"iteration": 1})
    assert ref.schema == "waiting/1"
    assert read_set(WaitingSet, uri, sha256=ref.manifest_sha256) == waiting


def test_a_set_of_no_rows_is_a_set():
    WaitingSet.empty().validate()
    assert WaitingSet.empty().num_rows == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_tokens": ragged([[3], []], np.int32)}, "at least one token, got 0 in row 1"),
        ({"response_tokens": ragged([[7, 1], []], np.int32)}, "at least one token, got 0 in row 1"),
        ({"response_tokens": ragged([[7, -1], [1]], np.int32)}, "must be token ids, got -1"),
        ({"values": ragged([[0.5], [1.0]])}, "one number per response token, got 1 for 2 in row 0"),
        ({"returns": ragged([[1.0, np.nan], [0.0]])}, r"`returns` must be finite, got nan \(1 "),
        ({"returns": ragged([[1.0, 1.0]])}, "`returns` must have 2 rows, got 1"),
        ({"values": ragged([[1, 1], [0]], np.int32)}, "`values` values must be"),
    ],
)
def test_faults_are_told(change, message):
    with pytest.raises(RecordError, match=message):
        replace(GOOD, **change).validate()
    GOOD.validate()
