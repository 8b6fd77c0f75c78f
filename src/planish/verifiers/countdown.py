"""Countdown: reach a target with each given number used exactly once, by `+ - * /`."""

from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

from planish.verifiers.expressions import ExpressionError, evaluate
from planish.verifiers.math_answer import TAIL_CHARS, extract_answer
from planish.verifiers.verdict import Verdict, VerifierOptions, failed, not_found, right, wrong

MAX_NUMBERS = 10


def parse_countdown(answer: str) -> tuple[list[int], int] | None:
    """Return numbers and target of a ground truth; None if it is malformed.

    Example:
        >>> parse_countdown('{"numbers": [3, 5, 9], "target": 24}')
        ([3, 5, 9], 24)
    """
    try:
        raw = json.loads(answer)
    except (ValueError, RecursionError):
        return None
    if not isinstance(raw, dict) or set(raw) != {"numbers", "target"}:
        return None
    numbers, target = raw["numbers"], raw["target"]
    if not isinstance(numbers, list) or not 2 <= len(numbers) <= MAX_NUMBERS:
        return None
    if not all(type(value) is int and 0 <= value < 10**6 for value in [*numbers, target]):
        return None
    return numbers, target


def verify_countdown(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Evaluate the expression of the response exactly.

    The expression follows the last `Answer:` or is in a box; otherwise it is the last line that is
    not empty. `expression=value` is accepted if the value is the target.
    """
    task = parse_countdown(answer)
    if task is None:
        return failed()
    numbers, target = task
    given = extract_answer(response)
    if given is None:
        *_, given = response[-TAIL_CHARS:].strip().split("\n")
    if not given:
        return not_found()
    expression, equals, claimed = given.strip("$ ").partition("=")
    try:
        parsed = evaluate(expression, signs=False)
        agrees = not equals or evaluate(claimed).value == target
    except ExpressionError:
        return wrong(given)
    uses_each_once = Counter(parsed.operands) == Counter(Fraction(n) for n in numbers)
    reached = parsed.value == target and agrees and uses_each_once
    return right(given) if reached else wrong(given)
