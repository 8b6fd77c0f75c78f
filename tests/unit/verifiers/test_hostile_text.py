import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planish.verifiers import VERIFIERS, verify
from tests.thin import examples

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
