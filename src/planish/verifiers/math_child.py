"""The child process of `planish.verifiers.child`: one JSON request a line, one reply a line.

It limits its own memory and file writes, and an alarm ends it should its parent have died in the
middle of a request.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

MEMORY_BYTES = 4 << 30
"""Address space that the child may use."""


DECIMAL_ERROR, EXACT_ERROR = 1e-4, 1e-50
"""Largest difference of two equal numbers over the larger one: where one is a decimal, or none."""


def equal(gold: str, target: str) -> bool:
    """Tell whether two mathematical texts are equal, as math-verify sees them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str) -> list[Any]:
        answers: list[Any] = parse(
            f"\\boxed{{{text}}}",
            extraction_config=[
                LatexExtractionConfig(boxed_match_priority=0),
                ExprExtractionConfig(),
            ],
            parsing_timeout=None,
        )
        return answers

    # The library's own limits use alarms; the limit that counts is the parent's on this process.
    return bool(verify(read(gold), read(target), timeout_seconds=None))


def value_in(text: str) -> str:
    """Return the text of the value that math-verify finds in a response, empty for none."""
    from math_verify import parse

    found = parse(text, parsing_timeout=None)
    return str(found[-1]) if found else ""


def compare_small_numbers() -> None:
    """Make the library's comparison of numbers a relative one too, wherever it makes it.

    It rounds to so many places behind the point, where all small numbers are equal.
    """
    from math_verify import grader
    from sympy import Float

    rounded = grader.sympy_numeric_eq

    def is_far(a: Any, b: Any) -> bool:
        try:
            a, b = (grader.safe_sympy_doit(number) for number in (a, b))
            if a.free_symbols or b.free_symbols:
                return False
            most = DECIMAL_ERROR if a.has(Float) or b.has(Float) else EXACT_ERROR
            return bool(abs(a - b).evalf() > most * max(abs(a).evalf(), abs(b).evalf()))
        except (ArithmeticError, AttributeError, TypeError):
            return False

    def numeric_eq(a: Any, b: Any, *digits: int) -> bool:
        # 9 % is 9 there.
        values = grader.get_pct_val(a, a), grader.get_pct_val(b, b)
        return bool(rounded(a, b, *digits)) and not (is_far(a, b) and is_far(*values))

    grader.sympy_numeric_eq = numeric_eq


def answer(request: str, compare: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the reply to one request line."""
    raw = json.loads(request)
    signal.alarm(int(raw["alarm_seconds"]))
    try:
        if "text" in raw:
            return {"outcome": "found", "value": value_in(str(raw["text"]))}
        same = compare(str(raw["gold"]), str(raw["target"]))
    except Exception as error:
        # Whatever the mathematics library raises on model text, the text is not the answer.
        outcome = "found" if "text" in raw else "different"
        return {"outcome": outcome, "error": type(error).__name__}
    finally:
        signal.alarm(0)
    return {"outcome": "equal" if same else "different"}


def serve(requests: Iterable[str], replies: TextIO, compare: Callable[[str, str], bool]) -> None:
    """Answer requests until the parent closes the pipe."""
    for request in requests:
        replies.write(json.dumps(answer(request, compare)) + "\n")
        replies.flush()


def main() -> int:
    """Limit this process, import, say ready, serve."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Replies go to a private copy of standard output; what libraries print goes nowhere.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as replies:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            compare_small_numbers()
            ready = {"outcome": "ready"} if equal("1", "1") else {"error": "1 is not 1"}
        except ImportError as error:
            ready = {"error": str(error)}
        replies.write(json.dumps(ready) + "\n")
        replies.flush()
        if "error" in ready:
            return 1
        serve(sys.stdin, replies, equal)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
