"""Generated tasks: endless streams of problems with worked traces, from a seed.

Column arithmetic has the operators and operand lengths of GSM8K's worked solutions (arXiv
2110.14168), in the same mixture, so its traces have the same lengths.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Callable, Iterator

from planish.stages.curate.arithmetic import ColumnExpression, chain_trace, multiplication_trace
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.problem import Problem
from planish.verifiers.countdown import countdown_answer

MIXTURE: dict[tuple[int, str, int], int] = {
    (2, "+", 2): 642, (2, "-", 2): 568, (3, "-", 3): 360, (3, "-", 2): 307, (2, "*", 1): 291,
    (3, "+", 3): 280, (2, "-", 1): 275, (2, "+", 1): 257, (1, "*", 2): 244, (3, "+", 2): 218,
    (3, "*", 1): 204, (4, "-", 4): 127, (1, "*", 3): 117, (4, "-", 3): 103, (4, "+", 4): 100,
    (1, "+", 2): 96, (4, "+", 3): 84, (2, "+", 3): 83, (1, "*", 1): 81, (1, "+", 1): 78,
    (4, "*", 1): 64, (1, "*", 4): 49, (1, "-", 1): 36, (3, "+", 4): 29, (3, "-", 1): 25,
    (3, "+", 1): 20, (4, "-", 2): 10, (4, "+", 2): 8, (1, "+", 3): 2, (2, "+", 4): 2,
    (4, "+", 1): 1, (4, "-", 1): 1, (1, "+", 4): 1,
}  # fmt: skip
"""(digits, operator, digits) to the number of different expressions in GSM8K's training file."""

MODULUS = 10
_CHAIN_LOG_MEAN, _CHAIN_LOG_STD, _CHAIN_MOST = 1.6, 0.6, 23
"""Mean and standard deviation of the log of a chain's operand count, and its maximum."""


def _problem(
    question: str,
    answer: str,
    source: str,
    trace: str,
    *,
    verifier: str = "trace",
    family: str = "",
    origin: str = "generated",
) -> Problem:
    messages = [{"role": "user", "content": question}]
    return Problem(question, messages, answer, verifier, source, trace, family, origin)


def column_problem(expression: ColumnExpression, *, source: str, origin: str) -> Problem:
    """Return the prompt of one column expression."""
    return _problem(
        expression.prompt,
        str(expression.result),
        source,
        expression.trace(),
        family=expression.family,
        origin=origin,
    )


def _number(rng: random.Random, digits: int) -> int:
    low = 0 if digits == 1 else 10 ** (digits - 1)
    return rng.randrange(low, 10**digits)


def column_arithmetic(rng: random.Random, config: CurateConfig) -> Iterator[Problem]:
    """Yield sums, differences and products by one digit, in GSM8K's mixture."""
    limit = config.max_operand_digits
    mixture = {k: v for k, v in MIXTURE.items() if max(k[0], k[2]) <= limit}
    kinds, weights = list(mixture), list(mixture.values())
    while True:
        left_digits, operator, right_digits = rng.choices(kinds, weights)[0]
        expression = ColumnExpression(
            _number(rng, left_digits), operator, _number(rng, right_digits)
        )
        if expression.fault(limit) is None:
            yield column_problem(expression, source="column-arithmetic", origin="generated")


def modular_chain(rng: random.Random, config: CurateConfig) -> Iterator[Problem]:
    """Yield sums of digits modulo 10; the number of operands has a log-normal distribution."""
    while True:
        drawn = round(rng.lognormvariate(_CHAIN_LOG_MEAN, _CHAIN_LOG_STD))
        count = min(max(drawn, 2), _CHAIN_MOST)
        operands = [rng.randrange(MODULUS) for _ in range(count)]
        question = f"({'+'.join(map(str, operands))})%{MODULUS}="
        answer = str(sum(operands) % MODULUS)
        yield _problem(question, answer, "modular-chain", chain_trace(operands, MODULUS))


def scratchpad_multiplication(rng: random.Random, config: CurateConfig) -> Iterator[Problem]:
    """Yield products of numbers; short factors are likelier, so lengths have a heavy tail."""
    digits = range(1, config.max_operand_digits + 1)
    weights = [0.5**count for count in digits]
    while True:
        left, right = (_number(rng, rng.choices(digits, weights)[0]) for _ in range(2))
        yield _problem(
            f"{left}*{right}=",
            str(left * right),
            "scratchpad-multiplication",
            multiplication_trace(left, right),
            family=f"{min(left, right)}*{max(left, right)}",
        )


def countdown(rng: random.Random, config: CurateConfig) -> Iterator[Problem]:
    """Yield numbers and a target between 1 and 999 that they can reach."""
    while True:
        numbers = [rng.randrange(1, 26) for _ in range(config.countdown_numbers)]
        expression, value = _combine(rng, numbers)
        if 1 <= value <= 999:
            given = sorted(numbers)
            question = f"use {','.join(map(str, given))} to make {value}"
            answer, trace = countdown_answer(given, value), f"{expression}={value}"
            yield _problem(question, answer, "countdown", trace, verifier="countdown")


def _combine(rng: random.Random, numbers: list[int]) -> tuple[str, int]:
    """Join numbers two by two in random order; every intermediate value is a whole number."""
    parts = [(str(number), number) for number in numbers]
    while len(parts) > 1:
        (left, a), (right, b) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        choices = [("+", a + b), ("*", a * b)]
        if a >= b:
            choices.append(("-", a - b))
        if b > 0 and a % b == 0:
            choices.append(("/", a // b))
        operator, value = rng.choice(choices)
        parts.append((f"({left}{operator}{right})", value))
    text, value = parts[0]
    return text[1:-1], value


TASKS: dict[str, Callable[[random.Random, CurateConfig], Iterator[Problem]]] = {
    "column-arithmetic": column_arithmetic,
    "countdown": countdown,
    "modular-chain": modular_chain,
    "scratchpad-multiplication": scratchpad_multiplication,
}


def task_stream(config: CurateConfig, seed: int) -> Iterator[Problem]:
    """Return the endless stream of the configured task; equal seeds give equal streams."""
    return TASKS[config.task](random.Random(f"planish/{config.task}/{seed}"), config)


def with_mistake(problem: Problem, share: float, seed: int) -> Problem:
    """Change one digit of the trace with probability `share` (0 to 1).

    Equal seeds change the same digit of a problem, in any order of the problems.
    """
    rng = random.Random(f"planish/mistakes/{seed}/{problem.question}")
    trace = problem.trace or ""
    digits = [place for place, character in enumerate(trace) if character in string.digits]
    if rng.random() >= share or not digits:
        return problem
    place = rng.choice(digits)
    wrong = rng.choice([digit for digit in string.digits if digit != trace[place]])
    return dataclasses.replace(problem, trace=trace[:place] + wrong + trace[place + 1 :])
