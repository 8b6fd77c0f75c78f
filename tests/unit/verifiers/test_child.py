from __future__ import annotations

import io
import json
import os
import sys

import pytest

from planish.verifiers import VerifierOptions, answer_fault, math_child, verify
from planish.verifiers.child import (
    MAX_START_FAILURES,
    MathChild,
    MathComparison,
    shared_child,
)

READY = 'import sys, time\nprint(\'{"outcome": "ready"}\', flush=True)\n'


def fake(body, **options):
    """A child that says ready and then does `body` for each `line`."""
    code = READY + "for line in sys.stdin:\n" + "".join(f"    {row}\n" for row in body)
    return MathChild([sys.executable, "-c", code], **options)


@pytest.fixture
def alone():
    children = []
    yield lambda *a, **k: children.append(fake(*a, **k)) or children[-1]
    for child in children:
        child.close()


@pytest.mark.parametrize(
    ("response", "answer", "accuracy"),
    [
        ("Answer: 1/2", "0.5", 1.0),
        ("Answer: 0.5", "\\frac12", 1.0),
        ("Answer: 2/3", "1/2", 0.0),
        ("Answer: $\\frac{1}{2}$", "1/2", 1.0),
        ("Answer: (1, 2)", "(1,2)", 1.0),
        ("Answer: (2, 1)", "(1,2)", 0.0),
        ("Answer: \\sqrt{8}", "2\\sqrt{2}", 1.0),
        ("Answer: 1+x", "x+1", 1.0),
        ("Answer: 5} or {5", "\\frac{10}{2}", 0.0),
        ("Answer: 5 or 7", "\\frac{10}{2}", 0.0),
        ("Answer: \u0665", "\\frac{10}{2}", 0.0),
        ("Answer: \\frac{1}{0}", "1/2", 0.0),
        ("Answer: 12", "13", 0.0),
    ],
)
def test_mathematical_equality_in_the_child(response, answer, accuracy):
    verdict = verify("math", response, answer)
    assert (verdict.accuracy, verdict.error) == (accuracy, False)


def test_the_child_is_reused_and_the_library_stays_out_of_this_process():
    verify("math", "Answer: 1/3", "2/6")
    pid = shared_child().pid
    verify("math", "Answer: 1/4", "2/8")
    assert shared_child().pid == pid != os.getpid()
    assert "math_verify" not in sys.modules


@pytest.mark.slow
def test_a_comparison_without_end_is_killed_and_the_next_one_works():
    hostile = verify("math", "Answer: 99999999!", "1/2", VerifierOptions(timeout_seconds=1.0))
    assert (hostile.accuracy, hostile.timeout, hostile.error) == (0.0, True, False)
    assert verify("math", "Answer: 3/6", "1/2").accuracy == 1.0


@pytest.mark.slow
def test_a_ground_truth_that_takes_too_long_itself_is_an_error():
    verdict = verify("math", "Answer: 1/2", "99999999!", VerifierOptions(timeout_seconds=1.0))
    assert (verdict.accuracy, verdict.timeout, verdict.error) == (0.0, True, True)
    assert "takes too long" in verdict.reason


def test_a_ground_truth_that_does_not_equal_itself_is_named():
    assert answer_fault("math", "\\frac{1}{2}") is None
    assert answer_fault("math", "x or y") is None
    assert answer_fault("math", "Answer: }{") is None


def test_a_child_that_never_answers_is_a_timeout_and_is_replaced(alone):
    child = alone(["time.sleep(600)"])
    assert child.compare("1", "2", timeout_seconds=0.3) is MathComparison.TIMEOUT
    assert child.pid is None
    assert child.compare("1", "2", timeout_seconds=600) is MathComparison.TIMEOUT, "remembered"


@pytest.mark.parametrize(
    "body",
    [["sys.exit(3)"], ["print('not json', flush=True)"], ["print('[]', flush=True)"],
     ["print('{}', flush=True)"], ["print('x' * 200000, flush=True)"]],
)  # fmt: skip
def test_a_child_that_dies_or_talks_nonsense_is_a_crash(alone, body):
    child = alone(body)
    assert child.compare("1", "2", timeout_seconds=120) is MathComparison.CRASH
    assert child.compare("1", "3", timeout_seconds=120) is MathComparison.CRASH


def test_a_child_that_cannot_start_is_tried_a_few_times_only(caplog):
    child = MathChild([sys.executable, "-c", 'print(\'{"error": "no module"}\')'])
    for _ in range(MAX_START_FAILURES + 2):
        assert child.compare("1", "2", timeout_seconds=1) is MathComparison.CRASH
    assert caplog.text.count("did not start") == MAX_START_FAILURES
    assert "planish[reward]" in caplog.text


def test_a_program_that_does_not_exist_is_a_crash():
    child = MathChild(["/nowhere/python"])
    assert child.compare("1", "2", timeout_seconds=1) is MathComparison.CRASH


def test_equal_questions_are_asked_once(alone):
    rows = ["print('{\"outcome\": \"equal\"}' if line else '', flush=True)", "sys.exit(0)"]
    child = alone(rows)
    assert child.compare("1", "2", timeout_seconds=120) is MathComparison.EQUAL
    assert child.compare("1", "2", timeout_seconds=120) is MathComparison.EQUAL


def test_the_child_gets_no_credentials(monkeypatch, alone):
    monkeypatch.setenv("MINIO_SECRET_KEY", "hidden")
    child = alone(
        ["import os", "seen = 'MINIO_SECRET_KEY' in os.environ",
         "print('{\"outcome\": \"%s\"}' % ('equal' if seen else 'different'), flush=True)"]
    )  # fmt: skip
    assert child.compare("1", "2", timeout_seconds=120) is MathComparison.DIFFERENT


def test_a_closed_child_starts_again(alone):
    child = alone(['print(\'{"outcome": "different"}\', flush=True)'])
    child.close()
    assert child.compare("a", "b", timeout_seconds=120) is MathComparison.DIFFERENT
    child.close()
    assert child.compare("a", "c", timeout_seconds=120) is MathComparison.DIFFERENT


def request(**values):
    return json.dumps({"gold": "1", "target": "1", "alarm_seconds": 60, **values})


def test_the_protocol_answers_each_line_and_survives_what_the_library_raises():
    def compare(gold, target):
        if target == "boom":
            raise RecursionError
        return gold == target

    replies = io.StringIO()
    texts = [request(text="so it is 18."), request(text="who knows")]
    asked = [request(), request(target="2"), request(target="boom"), *texts]
    math_child.serve(asked, replies, compare)
    assert [json.loads(row) for row in replies.getvalue().splitlines()] == [
        {"outcome": "equal"},
        {"outcome": "different"},
        {"outcome": "different", "error": "RecursionError"},
        {"outcome": "found", "value": "18"},
        {"outcome": "found", "value": ""},
    ]
