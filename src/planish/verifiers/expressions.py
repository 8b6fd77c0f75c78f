"""Exact arithmetic on hostile text: numbers, `+ - * /` and parentheses, nothing else.

No names, no powers, no calls; text length, nesting and digits are bounded, so that evaluation ends
at once whatever the text. Values are fractions, never floats.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 400
"""Longest expression that is read."""
MAX_DEPTH = 32
"""Deepest nesting of parentheses and signs."""
MAX_DIGITS = 64
"""Most digits of one number."""

_TOKEN = re.compile(r"[ \t]*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<mark>[-+*/()]))")
_SYNONYMS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})


class ExpressionError(ValueError):
    """The text is no arithmetic expression within the bounds."""


@dataclass(frozen=True)
class Expression:
    """A parsed and evaluated expression.

    Example:
        >>> evaluate("2*(3+4)/4").value, evaluate("2*(3+4)/4").operands
        (Fraction(7, 2), (Fraction(2, 1), Fraction(3, 1), Fraction(4, 1), Fraction(4, 1)))
    """

    value: Fraction
    """Exact value."""
    operands: tuple[Fraction, ...]
    """Number literals in reading order."""
    operators: tuple[str, ...]
    """Binary operators in reading order."""


def evaluate(text: str, *, signs: bool = True) -> Expression:
    """Evaluate `text` exactly.

    Args:
        text: the expression; spaces and tabs are ignored.
        signs: accept unary plus and minus.

    Returns:
        Value, literals and operators.

    Raises:
        ExpressionError: syntax, division by zero, or a bound was exceeded.
    """
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    return _Parser(_tokens(text.translate(_SYNONYMS)), signs=signs).parse()


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected character {text[position]!r}")
        number = match["number"]
        if number is not None and len(number) > MAX_DIGITS:
            raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
        tokens.append(number or match["mark"])
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, tokens: list[str], *, signs: bool) -> None:
        self._tokens = tokens
        self._position = 0
        self._signs = signs
        self._operands: list[Fraction] = []
        self._operators: list[str] = []

    def parse(self) -> Expression:
        value = self._sum(0)
        if self._position < len(self._tokens):
            raise ExpressionError(f"unexpected {self._tokens[self._position]!r}")
        return Expression(value, tuple(self._operands), tuple(self._operators))

    def _take(self, *wanted: str) -> str | None:
        if self._position < len(self._tokens) and self._tokens[self._position] in wanted:
            self._position += 1
            return self._tokens[self._position - 1]
        return None

    def _sum(self, depth: int) -> Fraction:
        value = self._product(depth)
        while (mark := self._take("+", "-")) is not None:
            self._operators.append(mark)
            other = self._product(depth)
            value = value + other if mark == "+" else value - other
        return value

    def _product(self, depth: int) -> Fraction:
        value = self._factor(depth)
        while (mark := self._take("*", "/")) is not None:
            self._operators.append(mark)
            other = self._factor(depth)
            if mark == "/" and other == 0:
                raise ExpressionError("division by zero")
            value = value * other if mark == "*" else value / other
        return value

    def _factor(self, depth: int) -> Fraction:
        if depth >= MAX_DEPTH:
            raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        if self._signs and (mark := self._take("+", "-")) is not None:
            value = self._factor(depth + 1)
            return value if mark == "+" else -value
        if self._take("("):
            value = self._sum(depth + 1)
            if self._take(")") is None:
                raise ExpressionError("a parenthesis is not closed")
            return value
        if self._position >= len(self._tokens):
            raise ExpressionError("ends too early")
        token = self._tokens[self._position]
        if token in "+-*/()":
            raise ExpressionError(f"unexpected {token!r}")
        self._position += 1
        self._operands.append(Fraction(token))
        return self._operands[-1]
