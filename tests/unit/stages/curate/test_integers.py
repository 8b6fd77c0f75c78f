import contextlib
import sys
import types

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.stages.curate.integers import (
    Unreadable,
    load_rewriter,
    read_number,
    rewrite,
    rewrite_problems,
)
from planish.stages.curate.problem import Problem

WORDS = {"n": "How much?", "p/q": "give p + q as", "a+b*sqrt(c)": "a and b may be negative"}


INTEGERS = {
    "n": {"42": 42, "-7": -7, "$1,234$": 1234, "10/2": 5, "\\sqrt{16}": 4},
    "p/q": {
        "3/4": 7, "-3/4": 1, "6/8": 7, "\\frac{3}{4}": 7, "-\\dfrac{14}{6}": -4, "\\frac12": 3,
    },
    "a+b*sqrt(c)": {
        "11-2\\sqrt{6}": 15, "2\\sqrt{3}": 5, "\\sqrt{12}": 5, "1+sqrt(5)": 7,
        "3\\cdot\\sqrt{2}+\\sqrt{8}-1": 6, "\\sqrt{2}\\sqrt{3}": 7, "6/\\sqrt{3}": 5,
        "\\left(1+\\sqrt{2}\\right)": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("form", INTEGERS)
def test_answers_become_integers_by_rule(form):
    for answer, integer in INTEGERS[form].items():
        question, found = rewrite("How much?", answer)
        assert found == str(integer), answer
        assert WORDS[form] in question
        assert (question == "How much?") == (form == "n")


REJECTED = {
    "answer_empty": ["", "$ $"],
    "decimal": ["0.5", ".5", "5.0"],
    "unit": ["50\\%", "30^\\circ", "5\\text{ cm}"],
    "interval": ["[1,2]", "(0,\\infty)"],
    "set": ["\\{1,2\\}"],
    "several_values": ["1, 2", "1 or 2", "\\pm 2"],
    "mixed_number": ["1\\frac{1}{2}", "1 2"],
    "symbol": ["x+1", "\\pi", "2^3", "__import__('os')", "\u0667"],
    "fraction_of_root": ["\\frac{1+\\sqrt{5}}{2}"],
    "several_roots": ["\\sqrt{2}+\\sqrt{3}"],
    "division_by_zero": ["1/0"],
    "division_by_a_sum": ["1/(1+\\sqrt{2})"],
    "root_of_no_positive_number": ["\\sqrt{-4}", "\\sqrt{\\sqrt{2}}"],
    "too_many_digits": ["\\sqrt{2000000014}", "9" * 19, "*".join(["999999999"] * 9)],
    "answer_too_long": ["9" * 300],
    "nested_too_deep": ["(" * 20 + "1" + ")" * 20],
    "not_a_number": ["(1", "1)", "1+", "\\sqrt", "\\frac{1}", "\\frac{1}{23"],
}


@pytest.mark.parametrize("reason", REJECTED)
def test_answers_without_a_unique_integer_form_are_rejected_with_a_reason(reason):
    for answer in REJECTED[reason]:
        with pytest.raises(Unreadable) as caught:
            rewrite("How much?", answer)
        assert str(caught.value) == reason, answer


@given(st.integers(-40, 40), st.integers(-40, 40), st.integers(1, 400), st.integers(1, 12))
def test_the_value_of_an_answer_is_exact(a, b, c, d):
    expected = a + sympy.Rational(b, d) * sympy.sqrt(c)
    assert read_number(f"{a} + ({b})\\sqrt{{{c}}}/{d}") == expected


@given(st.text(max_size=300))
def test_reading_hostile_answers_gives_a_number_or_a_reason(text):
    with contextlib.suppress(Unreadable):
        int(rewrite("", text)[1])


def problem(answer, verifier="math"):
    return Problem("How much?", [{"role": "user", "content": "How much?"}], answer, verifier, "s")


def compose(question, verifier):
    return [{"role": "user", "content": f"{verifier}: {question}"}]


def test_problems_keep_their_side_of_the_split_when_they_are_rewritten():
    kept, drops = rewrite_problems(
        [problem("3/4"), problem("7"), problem("x"), problem("abc", "exact")], compose, None
    )
    assert [p.answer for p in kept] == ["7", "7", "abc"]
    assert [p.verifier for p in kept] == ["integer", "integer", "exact"]
    assert kept[0].split_key == problem("3/4").split_key
    assert kept[0].messages[0]["content"].startswith("integer: How much?\n\nThe answer")
    assert [d.reason for d in drops] == ["symbol"]


def test_a_rewriter_gets_what_the_rules_reject_and_must_give_an_integer():
    def rewriter(question, answer):
        return {"x": ("Give x(3).", "9"), "y": ("Give y.", "no"), "z": None}[answer]

    kept, drops = rewrite_problems([problem(a) for a in ("5", "x", "y", "z")], compose, rewriter)
    assert [(p.question, p.answer) for p in kept] == [("How much?", "5"), ("Give x(3).", "9")]
    assert [d.reason for d in drops] == ["rewriter_gave_no_integer", "symbol"]


def test_a_rewriter_is_loaded_by_name(monkeypatch):
    module = types.ModuleType("some_rewriter")
    module.rewrite = lambda question, answer: None
    module.number = 3
    monkeypatch.setitem(sys.modules, "some_rewriter", module)
    assert load_rewriter("") is None
    assert load_rewriter("some_rewriter:rewrite") is module.rewrite
    for reference in ("some_rewriter:absent", "no_such_module_here:x", "some_rewriter:number"):
        with pytest.raises(ConfigError, match=r"curate\.rewriter"):
            load_rewriter(reference)
