import dataclasses
from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.stages.curate.arithmetic import ColumnExpression, multiplication_trace
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.filters import has_good_trace
from planish.stages.curate.tasks import MIXTURE, TASKS, task_stream, with_mistake
from planish.verifiers import answer_fault, verify


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
    assert multiplication_trace(7, 8) == "7*8+0=56=56"


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


@pytest.mark.parametrize("task", sorted(TASKS))
def test_each_task_is_verifiable_solved_and_equal_for_equal_seeds(task):
    config = CurateConfig(task=task)
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
