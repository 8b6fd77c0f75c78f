"""Exact arithmetic on hostile text: numbers, `+ - * /` and parentheses, nothing else.

Names, powers and calls are refused. Text length, nesting and digits are bounded, so that evaluation
of any text ends at once. Values are fractions, never floats.
"""

from __future__ import annotations

import ast
import operator
import re
from dataclasses import dataclass
from fractions import Fraction

MAX_CHARS = 400
MAX_DEPTH = 32
MAX_DIGITS = 64

_TOKEN = re.compile(r"[ \t]*(?:(?P<number>[0-9]+(?:\.[0-9]+)?|\.[0-9]+)|(?P<mark>[-+*/()]))")
_SYNONYMS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-"})
_OPERATORS = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}


class ExpressionError(ValueError):
    """The text is not an arithmetic expression within the bounds."""


@dataclass(frozen=True)
class Expression:
    """A parsed and evaluated expression.

    Example:
        >>> evaluate("2*(3+4)/4").value, evaluate("2*(3+4)/4").operands
        (Fraction(7, 2), (Fraction(2, 1), Fraction(3, 1), Fraction(4, 1), Fraction(4, 1)))
    """

    value: Fraction
    operands: tuple[Fraction, ...]
    """Number literals in reading order."""
    operators: tuple[str, ...]
    """Binary operators in reading order."""


def evaluate(text: str, *, signs: bool = True) -> Expression:
    """Evaluate `text` exactly.

    Spaces and tabs are ignored; unary plus and minus are accepted only with `signs`.

    Raises:
        ExpressionError: syntax, division by zero, or a bound was exceeded.
    """
    operands: list[Fraction] = []
    operators: list[str] = []

    def value(node: ast.expr, num_signs: int = 0) -> Fraction:
        if isinstance(node, ast.Name):
            return operands[int(node.id[1:])]
        if isinstance(node, ast.UnaryOp) and signs and num_signs < MAX_DEPTH:
            inner = value(node.operand, num_signs + 1)
            return -inner if isinstance(node.op, ast.USub) else inner
        if not isinstance(node, ast.BinOp):
            raise ExpressionError("a sign too many, or a call")
        mark, operate = _OPERATORS[type(node.op)]
        left = value(node.left)
        operators.append(mark)
        result: Fraction = operate(left, value(node.right))
        return result

    try:
        # Python parses the operators, with a name in place of each number.
        tree = ast.parse(_with_names(text, operands), mode="eval")
        return Expression(value(tree.body), tuple(operands), tuple(operators))
    except (SyntaxError, ZeroDivisionError) as error:
        raise ExpressionError(str(error)) from None


def _with_names(text: str, operands: list[Fraction]) -> str:
    """Return the expression with names `n0`, `n1`, ... for its numbers, which go into
    `operands`.
    """
    text = text.translate(_SYNONYMS).rstrip()
    if len(text) > MAX_CHARS:
        raise ExpressionError(f"longer than {MAX_CHARS} characters")
    words: list[str] = []
    position = depth = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"unexpected character {text[position]!r}")
        if (number := match["number"]) is not None:
            if len(number) > MAX_DIGITS:
                raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
            words.append(f"n{len(operands)}")
            operands.append(Fraction(number))
        else:
            words.append(match["mark"])
            depth += {"(": 1, ")": -1}.get(match["mark"], 0)
            if depth > MAX_DEPTH:
                raise ExpressionError(f"nested deeper than {MAX_DEPTH}")
        position = match.end()
    return " ".join(words)
