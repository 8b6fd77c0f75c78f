import contextlib
import dataclasses
import sys
import types
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import ConfigError
from planish.stages.curate.arithmetic import ColumnExpression
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.filters import has_good_trace
from planish.stages.curate.gsm8k import parse_row, problem_row, read_step
from planish.stages.curate.integers import (
    Unreadable,
    load_rewriter,
    read_number,
    rewrite,
    rewrite_problems,
)
from planish.stages.curate.problem import CurationLedger, Problem
from planish.stages.curate.select import curate
from planish.stages.curate.stage import read_tables
from planish.stages.curate.tasks import MIXTURE, task_stream, with_mistake
from planish.verifiers import answer_fault, verify

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


GSM8K = Path(__file__).parents[5] / "shared/data/gsm8k/train.jsonl"
needs_file = pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K file is not here")

ROW = {
    "question": "How many?",
    "answer": "She has 48/2 = <<48/2=24>>24.\nThen 48+24 = <<48+24=72>>72.\n#### 1,072",
}


BAD_STEPS = {
    "division": ["48/2=24"],
    "result_not_an_integer": ["12/60=0.2", "8*18=144.00", "48+24=\u0667\u0662"],
    "operand_not_an_integer": ["0.2*50=10", ".5*4=2"],
    "more_than_two_operands": ["100-50-30-15=5", "2*(3+4)=14"],
    "no_operator": ["72=72"],
    "signs_or_parentheses": ["-3+5=2"],
    "not_arithmetic": ["560//10=56", "x*2=4"],
    "negative_result": ["3-5=-2"],
    "no_factor_of_one_digit": ["12*12=144"],
    "operand_over_4_digits": ["10000+1=10001", "9" * 5000 + "+1=1"],
    "result_is_wrong": ["48+24=73"],
    "no_equals_sign": ["48+24", ""],
}


def test_each_rejected_step_has_its_reason():
    found = {reason: {read_step(step, 4) for step in BAD_STEPS[reason]} for reason in BAD_STEPS}
    assert found == {reason: {reason} for reason in BAD_STEPS}
    assert read_step("48 + 24 = 72", 4).prompt == "48+24="


def test_a_row_is_taken_apart():
    question, solution, final = parse_row(ROW)
    assert (question, final) == ("How many?", "1,072")
    assert solution.endswith("<<48+24=72>>72.")
    plain = problem_row(ROW)
    assert plain["answer"] == "1072"
    assert plain["trace"].endswith("Then 48+24 = 72.\nAnswer: 1072")
    for other in ({}, {"question": "q"}, {"question": "q", "answer": "5"}, {"question": 1}):
        assert parse_row(other) is None
        assert problem_row(other) is None


def test_short_sums_are_right_different_and_held_out_in_any_order_of_operands():
    config = CurateConfig(task="short-sums", num_prompts=1024, evaluation_size=64)
    curated = curate(config, 0, [], CurationLedger())
    problems = [*curated.train, *curated.evaluation]
    assert len(curated.evaluation) == 64
    assert len({p.question for p in problems}) == len(problems) > 600
    sides = [{p.family for p in side} for side in (curated.train, curated.evaluation)]
    assert not sides[0] & sides[1]
    assert curated.traced == []
    for problem in problems:
        left, operator, right = problem.question.removeprefix("What is ").rstrip("?").split()
        right_answer = ColumnExpression(int(left), operator, int(right)).result
        assert (problem.answer, right_answer >= 0) == (str(right_answer), True)
        assert verify("integer", f"It is {right_answer}.", problem.answer).accuracy == 1.0
    again = curate(config, 0, [], CurationLedger())
    assert again.train == curated.train


def run(**options):
    config = CurateConfig(dataset=str(GSM8K), **options)
    ledger = CurationLedger()
    curated = curate(config, 0, read_tables(config, ledger), ledger)
    return curated, {f.name: f for f in ledger.filters}


@needs_file
def test_all_problems_and_steps_of_the_real_file_are_accounted_for():
    curated, filters = run(gsm8k_as="steps", evaluation_size=10_000)
    problems, steps = filters["problems with steps"], filters["column arithmetic"]
    different = filters["different expressions"]
    assert (problems.num_in, problems.reasons) == (7473, {"no_steps": 95})
    assert steps.num_in == 23716
    assert steps.num_in - steps.reasons["result_not_an_integer"] == 22818
    assert steps.reasons == {
        "division": 3166,
        "more_than_two_operands": 2862,
        "operand_not_an_integer": 1362,
        "no_factor_of_one_digit": 952,
        "result_not_an_integer": 898,
        "no_operator": 344,
        "operand_over_4_digits": 283,
        "signs_or_parentheses": 11,
        "not_arithmetic": 2,
    }
    assert steps.num_out + sum(steps.reasons.values()) == 23716
    assert (different.num_out, different.reasons) == (4763, {"duplicate": 9073})
    assert (len(curated.train), len(curated.evaluation)) == (4151, 612)
    lengths = [len(p.trace) + 1 for p in [*curated.train, *curated.evaluation]]
    assert np.percentile(lengths, [10, 50, 90, 100]).tolist() == [19, 22, 37, 41]


@needs_file
def test_all_word_problems_of_the_real_file_have_integer_answers():
    curated, filters = run(near_duplicate_threshold=1.0)
    assert filters["readable problems"].num_out == 7473
    assert filters["verifiable answer"].num_out == 7473
    assert {p.verifier for p in curated.train} == {"integer"}
    assert len(curated.traced) == len(curated.train), "every worked solution ends in its answer"
    assert len(curated.evaluation) == 512


@pytest.mark.parametrize(
    ("expression", "trace"),
    [
        ((999, "+", 1), "9+1+0=10;9+0+1=10;9+0+1=10=1000"),
        ((7, "+", 1200), "7+0+0=7;0+0+0=0;0+2+0=2;0+1+0=1=1207"),
        ((1000, "-", 1), "10-1-0=9;10-0-1=9;10-0-1=9;1-0-1=0=999"),
        ((5, "-", 5), "5-5-0=0=0"),
        ((5, "*", 24), "4*5+0=20;2*5+2=12=120"),
        ((0, "*", 7), "0*7+0=0=0"),
    ],
)
def test_column_traces_worked_by_hand(expression, trace):
    assert ColumnExpression(*expression).trace() == trace


@given(st.integers(0, 9999), st.sampled_from("+-*"), st.integers(0, 9999))
def test_every_column_trace_ends_in_the_result_and_fits_48_tokens(left, operator, right):
    expression = ColumnExpression(left, operator, right)
    if expression.fault(4) is None:
        trace = expression.trace()
        assert verify("trace", trace, str(eval(f"{left}{operator}{right}"))).accuracy == 1.0
        assert len(trace) + 1 <= 48


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ((10000, "+", 1), "operand_over_4_digits"),
        ((1, "-", 2), "negative_result"),
        ((12, "*", 12), "no_factor_of_one_digit"),
        ((9999, "*", 9), None),
        ((9, "*", 9999), None),
        ((3, "-", 3), None),
    ],
)
def test_what_is_no_column_arithmetic_is_named(expression, fault):
    assert ColumnExpression(*expression).fault(4) == fault
    left, operator, right = expression
    swapped = ColumnExpression(right, operator, left)
    assert ColumnExpression(*expression).family == swapped.family


def test_the_task_is_verifiable_solved_and_equal_for_equal_seeds():
    config = CurateConfig()
    problems = list(islice(task_stream(config, 3), 300))
    assert problems == list(islice(task_stream(config, 3), 300))
    assert problems != list(islice(task_stream(config, 4), 300))
    for problem in problems:
        assert answer_fault(problem.verifier, problem.answer) is None
        assert has_good_trace(problem), problem


def test_generated_column_arithmetic_has_the_trace_lengths_of_gsm8k():
    problems = islice(task_stream(CurateConfig(), 0), 4000)
    lengths = [len(p.trace) + 1 for p in problems]
    p10, median, p90, longest = np.percentile(lengths, [10, 50, 90, 100])
    assert (p10, median, longest) == (19, 22, 42)
    assert 36 <= p90 <= 38
    assert sum(MIXTURE.values()) == 4763
    short = islice(task_stream(CurateConfig(max_operand_digits=2), 0), 300)
    assert max(len(p.question) for p in short) == len("99+99=")


def test_half_of_the_traces_get_one_wrong_digit_and_nothing_else_changes():
    problems = list(islice(task_stream(CurateConfig(), 0), 2000))
    mistaken = [with_mistake(problem, 0.5, 3) for problem in problems]
    assert mistaken == [with_mistake(problem, 0.5, 3) for problem in problems]
    differing = []
    for problem, other in zip(problems, mistaken, strict=True):
        assert dataclasses.replace(other, trace=problem.trace) == problem
        places = [a for a, b in zip(problem.trace, other.trace, strict=True) if a != b]
        assert all(digit in "0123456789" for digit in places)
        differing.append(len(places))
    assert set(differing) == {0, 1}
    assert 940 <= sum(differing) <= 1060
    assert with_mistake(problems[0], 0.0, 3) is problems[0]
    assert all(with_mistake(p, 1.0, 3) != p for p in problems)
