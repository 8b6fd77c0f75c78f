"""Generated tasks: endless streams of problems with worked traces, from a seed.

Column arithmetic has the operators and operand lengths of GSM8K's worked solutions (arXiv
2110.14168), in the same mixture, so its traces have the same lengths.
"""

from __future__ import annotations

import dataclasses
import random
import string
from collections.abc import Iterator

from planish.stages.curate.arithmetic import ColumnExpression
from planish.stages.curate.config import CurateConfig
from planish.stages.curate.problem import Problem

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


def column_problem(expression: ColumnExpression, *, source: str, origin: str) -> Problem:
    """Return the prompt of one column expression."""
    return Problem(
        expression.prompt,
        [{"role": "user", "content": expression.prompt}],
        str(expression.result),
        "trace",
        source,
        expression.trace(),
        expression.family,
        origin,
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


def short_sums(rng: random.Random, _: CurateConfig) -> Iterator[Problem]:
    """Yield questions for sums and differences up to 20 and products of digits, without traces."""
    while True:
        operator = rng.choice("+-*")
        limit = 9 if operator == "*" else 20
        left, right = rng.randint(1, limit), rng.randint(1, limit)
        if operator == "-" and left < right:
            left, right = right, left
        expression = ColumnExpression(left, operator, right)
        question = f"What is {left} {operator} {right}?"
        yield Problem(
            question,
            [{"role": "user", "content": question}],
            str(expression.result),
            "integer",
            "short-sums",
            family=expression.family,
            origin="generated",
        )


def task_stream(config: CurateConfig, seed: int) -> Iterator[Problem]:
    """Return the endless stream of the configured task; equal seeds give equal streams."""
    stream = short_sums if config.task == "short-sums" else column_arithmetic
    return stream(random.Random(f"planish/{config.task}/{seed}"), config)


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
