from fractions import Fraction

import pytest

from planish.verifiers import verify
from planish.verifiers.countdown import countdown_answer, parse_countdown
from planish.verifiers.expressions import ExpressionError, evaluate

TASK = countdown_answer([3, 5, 9], 24)


@pytest.mark.parametrize(
    ("response", "answer", "accuracy", "invalid"),
    [
        ("8+4+0=12;4+2+1=7=72", "72", 1.0, False),
        ("8+4+0=12;4+2+1=7=73", "72", 0.0, False),
        ("7+5=2+8=0+7=7+4=1", "1", 1.0, False),
        ("=072", "72", 1.0, False),
        ("=72 \n", "72", 1.0, False),
        ("=72.0", "72", 0.0, False),
        ("=72;", "72", 0.0, False),
        ("=7 2", "72", 0.0, False),
        ("72", "72", 0.0, True),
        ("8+4+0=", "72", 0.0, True),
        ("", "72", 0.0, True),
    ],
)
def test_trace_rule(response, answer, accuracy, invalid):
    verdict = verify("trace", response, answer)
    assert (verdict.accuracy, verdict.invalid, verdict.error) == (accuracy, invalid, False)


@pytest.mark.parametrize(
    ("response", "accuracy"), [("yes", 1.0), (" yes\n", 1.0), ("Yes", 0.0), ("yes.", 0.0)]
)
def test_exact_rule(response, accuracy):
    assert verify("exact", response, "yes").accuracy == accuracy


def test_exact_refuses_an_empty_response_and_an_empty_ground_truth():
    assert verify("exact", " \n", "yes").invalid
    assert verify("exact", "yes", " ").error


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ("(9-5)*3*2", 0.0),
        ("3*5+9", 1.0),
        ("3*5+9=24", 1.0),
        ("3*5+9=25", 0.0),
        ("so\nAnswer: $9+5*3$", 1.0),
        ("first 1+1\n\n9+3\u00d75\n", 1.0),
        ("\\boxed{9+3*5}", 1.0),
        ("3*5+9+0", 0.0),
        ("3*5+4", 0.0),
        ("24", 0.0),
        ("9-(-3*5)", 0.0),
        ("9/0+3*5", 0.0),
        ("3*5+9=", 0.0),
        ("35-9", 0.0),
    ],
)
def test_countdown_rule(response, accuracy):
    verdict = verify("countdown", response, TASK)
    assert (verdict.accuracy, verdict.error) == (accuracy, False)


def test_countdown_divides_exactly():
    task = countdown_answer([8, 3, 8, 3], 24)
    assert verify("countdown", "8/(3-8/3)", task).accuracy == 1.0


@pytest.mark.parametrize(
    "answer",
    [
        "24",
        "[]",
        "{}",
        "[" * 100_000,
        '{"numbers": [1], "target": 1}',
        '{"numbers": [1, 2.5], "target": 1}',
        '{"numbers": [1, true], "target": 1}',
        '{"numbers": [1, -2], "target": 1}',
        '{"numbers": [1, 2], "target": 1000000}',
        '{"numbers": [1, 2], "target": 1, "x": 1}',
        '{"numbers": [1,1,1,1,1,1,1,1,1,1,1], "target": 11}',
    ],
)
def test_a_countdown_ground_truth_of_another_form_is_an_error(answer):
    assert parse_countdown(answer) is None
    assert verify("countdown", "1+1", answer).error


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2+3*4", 14),
        ("(2+3)*4", 20),
        ("10-4-3", 3),
        ("12/4/3", 1),
        ("1/3", Fraction(1, 3)),
        (".5*4", 2),
        ("0.2*50", 10),
        ("-3+5", 2),
        (" 7 \u2212 2 ", 5),
        ("6\u00f73", 2),
    ],
)
def test_expressions_are_evaluated_exactly(text, value):
    assert evaluate(text).value == value


def test_an_expression_tells_its_operands_and_operators_in_reading_order():
    seen = evaluate("10-(4+.5)")
    assert seen.operands == (10, 4, Fraction(1, 2))
    assert seen.operators == ("-", "+")


@pytest.mark.parametrize(
    "text",
    ["", " ", "1+", "*1", "(1", "1)", "()", "1 2", "a", "1e5", "1/0", "1/(2-2)", "2**3", "1..2",
     "1" * 65, "(" * 40 + "1" + ")" * 40, "-" * 40 + "1", "1+" * 250 + "1", "\u0661"],
)  # fmt: skip
def test_what_is_no_bounded_expression_is_refused(text):
    with pytest.raises(ExpressionError):
        evaluate(text)


def test_signs_are_refused_when_not_asked_for():
    with pytest.raises(ExpressionError):
        evaluate("-1+3", signs=False)
