"""Mathematical equality by math-verify, in the child process of `planish.verifiers.own`.

The process limits its own memory and file writes, because the texts come from a policy.
"""

from __future__ import annotations

import functools
import re
import resource
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, grader, parse, verify
from sympy import Float

MEMORY_BYTES = 4 << 30
DECIMAL_ERROR, EXACT_ERROR = 1e-4, 1e-50
"""Largest relative difference of equal numbers: if one has a decimal point, and if none has."""


_DECIMAL = re.compile(
    r"([0-9]*)\.([0-9]*)(?:\\overline\{([0-9]+)\}|(?=\s*\\(?:times|cdot)\s*10\s*\^))"
)
"""A decimal with repeating last digits, or one that is multiplied by a power of ten."""


def judge(text: str, gold: str) -> float | str:
    """Return whether a text equals `gold`; with an empty `gold`, return the value found in the
    text.

    Returns:
        1.0 or 0.0; or the value, empty for none. A text on which the library raises has no
        value.
    """
    prepare()
    try:
        return float(equal(gold, text)) if gold else value_in(text)
    except Exception:
        return 0.0 if gold else ""


def equal(gold: str, target: str) -> bool:
    """Return whether two mathematical texts are equal by math-verify."""

    def read(text: str) -> Any:
        text = _DECIMAL.sub(_fraction, text.replace(" or ", ", "))
        return parse(
            f"\\boxed{{{text}}}",
            extraction_config=[
                LatexExtractionConfig(boxed_match_priority=0),
                ExprExtractionConfig(),
            ],
            parsing_timeout=None,
        )

    # The library's own limits use alarms; here the parent limits the time of this process.
    return bool(
        verify(read(gold), read(target), timeout_seconds=None, allow_set_relation_comp=True)
    )


def value_in(text: str) -> str:
    """Return the text of the value that math-verify finds in a response, empty for none."""
    found = parse(text, parsing_timeout=None)
    return str(found[-1]) if found else ""


def _fraction(found: re.Match[str]) -> str:
    """Return a decimal as a fraction."""
    whole, first, again = found.groups("")
    less = again and f"-0{whole}{first}"
    below = ("9" * len(again) or "1") + "0" * len(first)
    return f"\\frac{{{whole}{first}{again}{less}}}{{{below}}}"


@functools.cache
def prepare() -> None:
    """Limit this process, and make the library compare numbers by relative difference too.

    The library rounds to a number of decimal places, which would make all small numbers equal.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
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
        # The library reads 9 % as 9.
        values = grader.get_pct_val(a, a), grader.get_pct_val(b, b)
        return bool(rounded(a, b, *digits)) and not (is_far(a, b) and is_far(*values))

    grader.sympy_numeric_eq = numeric_eq
