from __future__ import annotations

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


@pytest.mark.parametrize(
    ("answer", "form", "integer"),
    [
        ("42", "n", 42),
        ("-7", "n", -7),
        ("$1,234$", "n", 1234),
        ("10/2", "n", 5),
        ("\\sqrt{16}", "n", 4),
        ("3/4", "p/q", 7),
        ("-3/4", "p/q", 1),
        ("6/8", "p/q", 7),
        ("\\frac{3}{4}", "p/q", 7),
        ("-\\dfrac{14}{6}", "p/q", -4),
        ("\\frac12", "p/q", 3),
        ("11-2\\sqrt{6}", "a+b*sqrt(c)", 15),
        ("2\\sqrt{3}", "a+b*sqrt(c)", 5),
        ("\\sqrt{12}", "a+b*sqrt(c)", 5),
        ("1+sqrt(5)", "a+b*sqrt(c)", 7),
        ("3\\cdot\\sqrt{2}+\\sqrt{8}-1", "a+b*sqrt(c)", 6),
        ("\\sqrt{2}\\sqrt{3}", "a+b*sqrt(c)", 7),
        ("6/\\sqrt{3}", "a+b*sqrt(c)", 5),
        ("\\left(1+\\sqrt{2}\\right)", "a+b*sqrt(c)", 4),
    ],
)
def test_answers_become_integers_by_rule(answer, form, integer):
    question, found = rewrite("How much?", answer)
    assert found == str(integer)
    assert WORDS[form] in question
    assert (question == "How much?") == (form == "n")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "answer_empty"),
        ("$ $", "answer_empty"),
        ("0.5", "decimal"),
        (".5", "decimal"),
        ("5.0", "decimal"),
        ("50\\%", "unit"),
        ("30^\\circ", "unit"),
        ("5\\text{ cm}", "unit"),
        ("[1,2]", "interval"),
        ("(0,\\infty)", "interval"),
        ("\\{1,2\\}", "set"),
        ("1, 2", "several_values"),
        ("1 or 2", "several_values"),
        ("\\pm 2", "several_values"),
        ("1\\frac{1}{2}", "mixed_number"),
        ("1 2", "mixed_number"),
        ("x+1", "symbol"),
        ("\\pi", "symbol"),
        ("2^3", "symbol"),
        ("__import__('os')", "symbol"),
        ("\u0667", "symbol"),
        ("\\frac{1+\\sqrt{5}}{2}", "fraction_of_root"),
        ("\\sqrt{2}+\\sqrt{3}", "several_roots"),
        ("1/0", "division_by_zero"),
        ("1/(1+\\sqrt{2})", "division_by_a_sum"),
        ("\\sqrt{-4}", "root_of_no_positive_number"),
        ("\\sqrt{\\sqrt{2}}", "root_of_no_positive_number"),
        ("\\sqrt{2000000014}", "too_many_digits"),
        ("9" * 19, "too_many_digits"),
        ("*".join(["999999999"] * 9), "too_many_digits"),
        ("9" * 300, "answer_too_long"),
        ("(" * 20 + "1" + ")" * 20, "nested_too_deep"),
        ("(1", "not_a_number"),
        ("1)", "not_a_number"),
        ("1+", "not_a_number"),
        ("\\sqrt", "not_a_number"),
        ("\\frac{1}", "not_a_number"),
        ("\\frac{1}{23", "not_a_number"),
    ],
)
def test_answers_without_a_unique_integer_form_are_rejected_with_a_reason(answer, reason):
    with pytest.raises(Unreadable) as caught:
        rewrite("How much?", answer)
    assert str(caught.value) == reason


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
