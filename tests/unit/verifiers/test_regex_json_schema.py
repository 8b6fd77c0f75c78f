import json

import pytest

from planish.verifiers import VerifierOptions, answer_fault, own, verify
from planish.verifiers.json_schema import last_json

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("response", "pattern", "accuracy"),
    [
        ("the sum is 42.", r"\b42\b", 1.0),
        ("the sum is 421", r"\b42\b", 0.0),
        ("a\nAnswer: 7\n", r"(?m)^Answer: 7$", 1.0),
        ("", "", 1.0),
        ("x" * 300_000 + "end", "end$", 1.0),
        ("start" + "x" * 300_000, "start", 0.0),
    ],
)
def test_a_pattern_is_searched_in_the_whole_response(response, pattern, accuracy):
    verdict = verify("regex", response, pattern)
    assert (verdict.accuracy, verdict.error) == (accuracy, False)


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


@pytest.mark.parametrize(
    ("response", "accuracy"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        ('Here:\n```json\n{"name": "Ada", "age": 36}\n```\nDone {not json}.', 1.0),
        ('```\n{"name": "Ada", "age": 36}\n```', 1.0),
        ('{"name": 1} no: {"name": "Ada", "age": 36}.', 1.0),
        ('{"name": "Ada", "age": 36} no: {"name": 1}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "age": 36, "more": 1}', 0.0),
        ("Ada, 36", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ('{"a":' * 50_000, 0.0),
    ],
)
def test_the_last_json_of_a_response_is_held_to_the_schema(response, accuracy):
    verdict = verify("json_schema", response, PERSON)
    assert (verdict.accuracy, verdict.error) == (accuracy, False)


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
