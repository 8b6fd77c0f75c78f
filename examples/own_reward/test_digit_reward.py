from __future__ import annotations

from pathlib import Path

import pytest
from digit_reward import digits

from planish.verifiers.contract import check_contract, read_cases

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("12+30=42", "42", 1.0),
        ("= 42", "42", 1.0),
        ("41", "42", 0.5),
        ("142", "42", 0.0),
        ("42 apples", "42", 0.0),
        ("", "42", 0.0),
    ],
)
def test_each_right_digit_gives_a_part_of_the_point(response, answer, score):
    assert digits(response, answer) == score


def test_the_contract_of_planish_holds(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    report = check_contract("digit_reward:digits", read_cases(HERE / "cases.jsonl"))
    assert report.faults == ()
    assert report.scores == (1.0, 0.5, 0.0, 1.0)
