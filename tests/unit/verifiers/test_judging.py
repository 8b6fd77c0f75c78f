"""Verdicts of all verifiers of a run, in columns of rollouts and out of them again."""

from dataclasses import replace

import numpy as np
import pytest

from planish.records.io import read_set, write_set
from planish.records.rollouts import FinishReason, RolloutSet
from planish.verifiers import Verdict, VerifierOptions
from planish.verifiers.judging import Judging, from_columns, to_columns
from tests.unit.records import rules
from tests.unit.records.samples import build_rollouts, take_groups

RIGHT = Verdict(1.0, "7", score=1.0)
PART = Verdict(0.0, "\u00e9", score=0.3)
LATE = Verdict(0.0, timeout=True, score=0.0)
FAILED = Verdict(0.0, error=True, invalid=True, score=0.0)
STYLE = Verdict(0.0, score=1 / 3, reason="why")
GIVEN = [
    [{"exact": RIGHT}, {"exact": PART}, {"exact": LATE}, {"exact": FAILED}],
    [{"exact": RIGHT, "a.b:style": STYLE}, {"exact": PART, "a.b:style": FAILED}, {}, {}],
    [{}, {}, {}, {"exact": RIGHT, "math": PART}],
    [{}, {}, {}, {}],
]


def rollouts(**columns):
    return build_rollouts([[1], [2]], [[3], [4], [5], [6]], **columns)


@pytest.mark.parametrize("given", GIVEN)
def test_verdicts_are_read_as_they_were_written(tmp_path, given):
    made = replace(rollouts(), **to_columns(given))
    write_set(tmp_path.as_uri(), made, parents={}, attributes={})
    found = read_set(RolloutSet, tmp_path.as_uri(), with_optional=False)
    assert found == made
    assert from_columns(found) == given
    assert from_columns(take_groups(found, [1])) == given[2:]
    # Sets of earlier versions have none of the columns.
    joined = RolloutSet.concat([rollouts(), made, RolloutSet.empty()])
    rules.check(joined)
    assert from_columns(joined) == [{}] * 4 + given
    assert from_columns(rollouts()) == [{}] * 4


def test_all_verifiers_are_asked_once_for_each_response(monkeypatch):
    calls = []

    def verify_many(rows, options):
        calls.extend((row, options) for row in rows)
        return [Verdict(float(row[0] == "exact"), error=row[1] == "bad") for row in rows]

    monkeypatch.setattr("planish.verifiers.judging.verify_many", verify_many)
    table = {"functions": [{"name": "exact", "weight": 1.0}, {"name": "m:f", "weight": 0.5}]}
    judging = Judging.of({**table, "verifier_timeout_seconds": 60.0})
    made = rollouts(response=["a", "bad", "c", "d"], verifier=["exact", "exact", "math", "math"])
    verdicts = judging.complete(made, [0, 1, 2])
    assert [list(each) for each in verdicts] == [
        ["exact", "m:f"], ["exact", "m:f"], ["math", "exact", "m:f"], [],
    ]  # fmt: skip
    names = [row[0] for row, _ in calls]
    assert names == ["exact", "m:f", "exact", "m:f", "math", "exact", "m:f"]
    assert {options for _, options in calls} == {VerifierOptions(timeout_seconds=60.0)}
    # A verifier that has failed is asked once more, and nothing else.
    calls.clear()
    made = replace(made, **to_columns(verdicts), finish=np.full(4, FinishReason.STOP, np.int8))
    again = judging.complete(made, [0, 1, 2, 3])
    assert [row[1] for row, _ in calls] == ["bad", "bad", "d", "d", "d"]
    assert [list(each) for each in again[:3]] == [list(each) for each in verdicts[:3]]
