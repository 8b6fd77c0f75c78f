import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.verifiers import VERIFIERS, VerifierOptions, answer_fault, own, verify
from planish.verifiers.countdown import parse_countdown
from planish.verifiers.expressions import ExpressionError, evaluate
from planish.verifiers.json_schema import last_json
from planish.verifiers.shaping import (
    check_overlong,
    equal_rows,
    overlong_penalty,
    rows_of_groups_with,
)
from tests.thin import examples

TASK = '{"numbers": [3, 5, 9], "target": 24}'


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


PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


RIGHT, WRONG, INVALID = (1.0, False), (0.0, False), (0.0, True)
JUDGED = [
    ("trace", "72", RIGHT, ["8+4+0=12;4+2+1=7=72", "=072", "=72 \n"]),
    ("trace", "72", WRONG, ["8+4+0=12;4+2+1=7=73", "=72.0", "=72;", "=7 2"]),
    ("trace", "72", INVALID, ["72", "8+4+0=", ""]),
    ("trace", "1", RIGHT, ["7+5=2+8=0+7=7+4=1"]),
    ("exact", "yes", RIGHT, ["yes", " yes\n"]),
    ("exact", "yes", WRONG, ["Yes", "yes."]),
    ("exact", "yes", INVALID, [" \n"]),
    (
        *("countdown", TASK, RIGHT),
        ["3*5+9", "3*5+9=24", "so\nAnswer: $9+5*3$", "first 1+1\n\n9+3\u00d75\n", "\\boxed{9+3*5}"],
    ),
    (
        *("countdown", TASK, WRONG),
        [
            "(9-5)*3*2",
            "3*5+9=25",
            "3*5+9+0",
            "3*5+4",
            "24",
            "35-9",
            "9-(-3*5)",
            "9/0+3*5",
            "3*5+9=",
        ],
    ),
    ("countdown", '{"numbers": [8, 3, 8, 3], "target": 24}', RIGHT, ["8/(3-8/3)"]),
    ("regex", r"\b42\b", RIGHT, ["the sum is 42."]),
    ("regex", r"\b42\b", WRONG, ["the sum is 421"]),
    ("regex", r"(?m)^Answer: 7$", RIGHT, ["a\nAnswer: 7\n"]),
    ("regex", "", RIGHT, [""]),
    ("regex", "end$", RIGHT, ["x" * 300_000 + "end"]),
    ("regex", "start", WRONG, ["start" + "x" * 300_000]),
    (
        *("json_schema", PERSON, RIGHT),
        [
            '{"name": "Ada", "age": 36}',
            'Here:\n```json\n{"name": "Ada", "age": 36}\n```\nDone {not json}.',
            '```\n{"name": "Ada", "age": 36}\n```',
            '{"name": 1} no: {"name": "Ada", "age": 36}.',
        ],
    ),
    (
        *("json_schema", PERSON, WRONG),
        [
            '{"name": "Ada", "age": 36} no: {"name": 1}',
            '{"name": "Ada", "age": -1}',
            '{"name": "Ada", "age": NaN}',
            '{"name": "Ada", "age": 36, "more": 1}',
            *("Ada, 36", "", "[" * 100_000, '{"a":' * 50_000),
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "answer", "outcome", "response"),
    [(*case, response) for *case, responses in JUDGED for response in responses],
)
def test_a_response_is_judged_by_the_rule(name, answer, outcome, response):
    verdict = verify(name, response, answer)
    assert (verdict.accuracy, verdict.invalid, verdict.error) == (*outcome, False)


def test_an_empty_ground_truth_is_an_error():
    assert verify("exact", "yes", " ").error


def test_a_pattern_that_runs_away_costs_its_row_a_second_and_the_child_lives(monkeypatch):
    monkeypatch.setattr(own, "MAX_TIMEOUTS", 1)
    for _ in range(2):
        verdict = verify("regex", "a" * 60 + "!", "^(a+)+$", VerifierOptions(timeout_seconds=120.0))
        assert (verdict.accuracy, verdict.timeout, verdict.error) == (0.0, True, False)
        assert "TimeoutError: the search took longer than 1 s" in verdict.reason
    assert verify("regex", "aaa", "^(a+)+$").accuracy == 1.0


@pytest.mark.parametrize(
    ("name", "answer", "fault"),
    [
        ("regex", r"\d+", None),
        ("regex", "(", "answer_not_a_pattern"),
        ("regex", "a{99999999999999999999}", "answer_not_a_pattern"),
        ("regex", "(" * 400 + ")" * 400, None),
        ("regex", " ", "answer_empty"),
        ("regex", "a" * 1001, "answer_too_long"),
        ("json_schema", PERSON, None),
        ("json_schema", "true", None),
        ("json_schema", "{", "answer_not_a_schema"),
        ("json_schema", '{"type": "person"}', "answer_not_a_schema"),
        ("json_schema", "[]", "answer_not_a_schema"),
    ],
)
def test_ground_truths_that_no_response_could_meet_are_named(name, answer, fault):
    assert answer_fault(name, answer) == fault


def test_a_value_inside_another_is_not_taken_for_the_last():
    assert last_json('so {"a": {"b": [1]}} it is') == {"a": {"b": [1]}}
    assert last_json("3") == 3


def test_a_schema_elsewhere_is_not_fetched():
    schema = '{"$ref": "http://127.0.0.1:9/person.json"}'
    verdict = verify("json_schema", "{}", schema)
    assert verdict.error
    assert "Unresolvable" in verdict.reason


@pytest.mark.slow
def test_a_pattern_of_a_schema_that_runs_away_is_killed():
    schema = '{"type": "string", "pattern": "^(a+)+$"}'
    options = VerifierOptions(timeout_seconds=0.5)
    verdict = verify("json_schema", json.dumps("a" * 60 + "!"), schema, options)
    assert (verdict.timeout, verdict.error) == (True, False)
    assert verify("json_schema", '"aa"', schema).accuracy == 1.0


ANSWERS = {
    "countdown": '{"numbers": [3, 5, 9], "target": 24}',
    "exact": "yes",
    "integer": "72",
    "json_schema": '{"type": "object", "required": ["a"]}',
    "math": "72",
    "python_tests": "assert double(2) == 4",
    "regex": "^(a+)+$",
    "trace": "72",
}
HOSTILE = {
    "megabytes of digits": "9" * 5_000_000,
    "a line of digits": "Answer: " + "9" * 5_000_000,
    "equals signs": "=" * 2_000_000,
    "answer lines": "Answer: " * 500_000,
    "answer and spaces": "Answer" + " " * 2_000_000 + ":",
    "nested braces": "\\boxed{" * 300_000 + "}" * 300_000,
    "open braces": "Answer: " + "{" * 280,
    "nested parentheses": "Answer: " + "(" * 140 + "1" + ")" * 140,
    "signs": "Answer: " + "-" * 280 + "1",
    "unicode digits": "Answer: \u0967\u0968\U0001d7d9\u2460",
    "surrogates": "Answer: \ud800\udfff\ud83d",
    "nul": "\x00Answer: \x00\x0072\x00",
    "direction marks": "Answer: \u202e27\u202c",
    "line separators": "Answer: 1\u2028Answer: 2\x85\x0b\x0c\x1c",
    "power tower": "Answer: 9**9**9**9",
    "division by zero": "Answer: 1/0",
    "code": "Answer: __import__('os').abort()",
    "format": "Answer: %s%n{0.__class__}",
}


@pytest.mark.parametrize("name", sorted(VERIFIERS))
@pytest.mark.parametrize("kind", sorted(HOSTILE))
def test_hostile_text_is_wrong(name, kind):
    verdict = verify(name, HOSTILE[kind], ANSWERS[name])
    assert verdict.accuracy == 0.0
    assert not verdict.error
    assert len(verdict.extracted) <= 300
    verdict.extracted.encode("utf-8")


def test_every_verifier_has_a_hostile_case():
    assert set(ANSWERS) == set(VERIFIERS)


@pytest.mark.slow
@settings(max_examples=examples(300), deadline=None)
@given(
    st.sampled_from(["countdown", "exact", "integer", "trace"]),
    st.text(max_size=400),
    st.text(max_size=80),
)
def test_rule_verifiers_are_total(name, response, answer):
    verdict = verify(name, response, answer)
    assert verdict.accuracy in (0.0, 1.0)
    assert not (verdict.accuracy == 1.0 and (verdict.invalid or verdict.error))
    verdict.extracted.encode("utf-8")


@given(st.integers(-(10**63), 10**63))
def test_every_integer_equals_itself(number):
    assert verify("integer", f"Answer: {number}", str(number)).accuracy == 1.0
    assert verify("trace", f"1+1={number}", str(number)).accuracy == 1.0
    assert verify("integer", f"Answer: {number}", str(number + 1)).accuracy == 0.0


def test_penalty_has_the_published_values_at_the_published_limits():
    lengths = [0, 16384, 16385, 18432, 20479, 20480, 20481, 10**9]
    seen = overlong_penalty(lengths, max_tokens=20480, buffer_tokens=4096)
    assert seen.dtype == np.float32
    assert seen.tolist() == [0, 0, -0.000244140625, -0.5, -0.999755859375, -1, -1, -1]


def test_penalty_without_a_buffer_is_only_the_step_beyond_the_limit():
    seen = overlong_penalty([1, 63, 64, 65], max_tokens=64, buffer_tokens=0)
    assert seen.tolist() == [0, 0, 0, -1]


def test_penalty_is_scaled_by_the_factor_and_zero_is_never_negative_zero():
    seen = overlong_penalty([10, 64], max_tokens=64, buffer_tokens=16, factor=0.5)
    assert seen.tolist() == [0, -0.5]
    assert not np.signbit(seen[0])
    assert not np.signbit(overlong_penalty([99], max_tokens=9, buffer_tokens=3, factor=0.0)[0])


@pytest.mark.parametrize(("longest", "buffer"), [(0, 0), (16, 17), (16, -1), (-3, -4)])
def test_limits_that_define_no_penalty_are_refused(longest, buffer):
    with pytest.raises(ConfigError, match="overlong_buffer_tokens"):
        check_overlong(longest, buffer)


@given(st.integers(1, 500), st.data())
def test_penalty_never_rises_with_length_and_is_continuous(longest, data):
    buffer = data.draw(st.integers(1, longest))
    penalty = overlong_penalty(
        np.arange(longest + 3), max_tokens=longest, buffer_tokens=buffer
    ).astype(np.float64)
    steps = np.diff(penalty)
    assert (steps <= 0).all()
    assert ((penalty >= -1) & (penalty <= 0)).all()
    assert (np.abs(steps) <= 1 / buffer + 1e-6).all()


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=40))
def test_a_group_is_informative_iff_its_right_rows_are_some_but_not_all(rows):
    accuracy = [a for a, _ in rows]
    group = [g for _, g in rows]
    seen = ~equal_rows(accuracy, group)
    for index, number in enumerate(group):
        right = sum(a for a, g in rows if g == number)
        assert seen[index] == (0 < right < group.count(number))


def test_a_marked_row_marks_its_whole_group_only():
    rows = [False, True, False, False, False]
    group = [4, 4, 2, 2, 4]
    assert rows_of_groups_with(rows, group).tolist() == [True, True, False, False, True]
