"""Rewrite problems by rule so that the answer is one integer, or return a reason code.

Integers stay; p/q in lowest terms becomes a question for p + q; a + b*sqrt(c) with whole a and b
and square-free c > 1 becomes a question for a + b + c. Answers without a unique rewrite (decimals,
intervals, sets, symbols) are rejected with a reason code. A small parser reads the text and sympy
computes the number; no text is evaluated as code.

Source: DAPO, arXiv 2503.14476, section 3.5 and appendix A (data set transformation); rules
replace its language model, and the accepted forms are our choice.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy

from planish.base.errors import ConfigError
from planish.stages.curate.problem import Drop, Messages, Problem, drop
from planish.verifiers import READS_FORMS, answer_fault, split_name

MAX_CHARS = 200
MAX_DEPTH = 16
MAX_RADICAND = 10**9
"""Largest number under a root: sympy finds every square factor of a smaller one."""
MAX_DIGITS = 18
MAX_TERMS = 16

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+)|(?P<frac>\\[dt]?frac)|(?P<root>\\sqrt|sqrt|\u221a)"
    r"|(?P<times>\\cdot|\\times|\*)|(?P<mark>[-+/(){}]))"
)
_OTHER_FORMS = (
    (r"^\s*$", "answer_empty"),
    (r"[0-9]\s*\.\s*[0-9]|^\.[0-9]|\\overline", "decimal"),
    (r"%|\\circ|\\text|\\mathrm|\u00b0", "unit"),
    (r"\\cup|\\cap|\\infty|[\[\]]", "interval"),
    (r"\\\{|\\\}", "set"),
    (r"[,;]|\\pm|\bor\b|\band\b", "several_values"),
    (r"[0-9]\s*\\[dt]?frac|[0-9]\s+[0-9]", "mixed_number"),
)
_FRACTION_QUESTION = (
    "The answer to this problem is a fraction. Write it as p/q in lowest terms with q > 0 "
    "(p may be negative), and give p + q as the final answer."
)
_SURD_QUESTION = (
    "The answer to this problem has the form a + b*sqrt(c) with integers a, b and c, where c > 1 "
    "is divisible by no square of a prime; a and b may be negative or, for a, zero. Give a + b + c "
    "as the final answer."
)

Rewriter = Callable[[str, str], tuple[str, str] | None]
"""Function from a rejected (question, answer) to (new question, integer answer), or to None."""


class Unreadable(ValueError):
    """Error for an answer in none of the accepted forms; the message is the reason code."""


def rewrite(question: str, answer: str) -> tuple[str, str]:
    r"""Return a question with an integer answer, and that answer; an integer keeps its question.

    Example:
        >>> rewrite("What is x?", r"11-2\sqrt{6}")[1]
        '15'

    Raises:
        Unreadable: with a reason code.
    """
    rational, surd = read_number(answer).as_coeff_Add()
    if surd == 0:
        if rational.q == 1:
            return question, str(rational)
        return f"{question}\n\n{_FRACTION_QUESTION}", str(rational.p + rational.q)
    if surd.is_Add:
        raise Unreadable("several_roots")
    factor, root = surd.as_coeff_Mul()
    if rational.q != 1 or factor.q != 1:
        raise Unreadable("fraction_of_root")
    return f"{question}\n\n{_SURD_QUESTION}", str(rational + factor + root**2)


def read_number(answer: str) -> Any:
    """Parse an exact number (whole numbers, fractions, roots, `+ - * /`) into a sympy number.

    Raises:
        Unreadable: with a reason code.
    """
    text = answer.strip().strip("$").strip().rstrip(".")
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    for pattern, reason in _OTHER_FORMS:
        if re.search(pattern, text[:MAX_CHARS]):
            raise Unreadable(reason)
    if len(text) > MAX_CHARS:
        raise Unreadable("answer_too_long")
    return _Reader(text.replace("\\left", "").replace("\\right", "")).read()


class _Reader:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []
        self._position = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if match is None:
                raise Unreadable("symbol")
            kind = str(match.lastgroup)
            if kind == "number" and len(match[kind]) > MAX_DIGITS:
                raise Unreadable("too_many_digits")
            self._tokens.append((match[kind] if kind == "mark" else kind, match[kind]))
            position = match.end()
        self._tokens.append(("end", ""))

    def read(self) -> Any:
        value = self._sum(0)
        if self._peek() != "end":
            raise Unreadable("not_a_number")
        return value

    def _peek(self) -> str:
        return self._tokens[self._position][0]

    def _next(self) -> tuple[str, str]:
        self._position += 1
        return self._tokens[self._position - 1]

    def _sum(self, depth: int) -> Any:
        sign = self._next()[0] if self._peek() in ("+", "-") else "+"
        value = sympy.Integer(0)
        while True:
            term = self._product(depth)
            value = _bounded(value + term if sign == "+" else value - term)
            if self._peek() not in ("+", "-"):
                return value
            sign = self._next()[0]

    def _product(self, depth: int) -> Any:
        value = self._factor(depth)
        while (kind := self._peek()) in ("/", "times", "root", "("):
            if kind in ("/", "times"):
                self._next()
            factor = self._factor(depth)
            value = _divided(value, factor) if kind == "/" else _product(value, factor)
        return value

    def _factor(self, depth: int) -> Any:
        if depth >= MAX_DEPTH:
            raise Unreadable("nested_too_deep")
        kind, text = self._next()
        if kind == "number":
            return sympy.Integer(text)
        if kind == "root":
            return _root(self._group(depth))
        if kind == "frac":
            top, bottom = (self._group(depth, is_split=True) for _ in range(2))
            return _divided(top, bottom)
        self._position -= 1
        return self._group(depth)

    def _group(self, depth: int, *, is_split: bool = False) -> Any:
        """Read the argument of a root or a fraction: a bracket or a digit.

        With `is_split` a number gives only its first digit: LaTeX reads 1 and 2 from the digits 12.
        """
        kind, text = self._next()
        if kind in ("(", "{"):
            value = self._sum(depth + 1)
            if self._next()[0] == {"(": ")", "{": "}"}[kind]:
                return value
        elif kind == "number" and (len(text) == 1 or is_split):
            if len(text) > 1:
                self._position -= 1
                self._tokens[self._position] = (kind, text[1:])
            return sympy.Integer(text[0])
        raise Unreadable("not_a_number")


def _bounded(value: Any) -> Any:
    """Return a sum of multiples of roots; refuse one with too many terms or digits."""
    terms = [term.as_coeff_Mul() for term in sympy.Add.make_args(value)]
    if len(terms) > MAX_TERMS or any(
        abs(factor.p * factor.q) > 10**60 or root**2 > MAX_RADICAND for factor, root in terms
    ):
        raise Unreadable("too_many_digits")
    return value


def _product(left: Any, right: Any) -> Any:
    return _bounded(sympy.expand_mul(left * right))


def _divided(left: Any, right: Any) -> Any:
    if right == 0:
        raise Unreadable("division_by_zero")
    if right.is_Add:
        raise Unreadable("division_by_a_sum")
    return _product(left, 1 / right)


def _root(value: Any) -> Any:
    if not value.is_Rational or value < 0:
        raise Unreadable("root_of_no_positive_number")
    if value.p * value.q > MAX_RADICAND:
        raise Unreadable("too_many_digits")
    return sympy.sqrt(value)


def load_rewriter(reference: str) -> Rewriter | None:
    """Return the configured rewriter, or None if `reference` is empty; raises ConfigError."""
    if not reference:
        return None
    module, _, name = reference.partition(":")
    try:
        loaded: Any = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"`curate.rewriter` must name a callable that can be imported, got {reference!r} "
            f"({error})"
        ) from None
    if not callable(loaded):
        raise ConfigError(f"`curate.rewriter` must name a callable, got {reference!r}")
    rewriter: Rewriter = loaded
    return rewriter


def rewrite_problems(
    problems: list[Problem],
    compose: Callable[[str, str], Messages],
    rewriter: Rewriter | None,
) -> tuple[list[Problem], list[Drop]]:
    """Rewrite every problem with the verifier `math` or `integer`; keep others unchanged.

    `compose` makes messages from (question, verifier); `rewriter` gets problems the rules reject.
    """
    kept: list[Problem] = []
    drops: list[Drop] = []
    for problem in problems:
        name, form = split_name(problem.verifier)
        if name not in READS_FORMS:
            kept.append(problem)
            continue
        try:
            question, answer = rewrite(problem.question, problem.answer)
        except Unreadable as error:
            given = rewriter(problem.question, problem.answer) if rewriter else None
            question, answer = given or ("", "")
            if not question.strip() or answer_fault("integer", answer):
                reason = str(error) if given is None else "rewriter_gave_no_integer"
                drops.append(drop(problem, reason))
                continue
        else:
            if question == problem.question:
                verifier = f"integer/{form}".rstrip("/")
                kept.append(replace(problem, answer=answer, verifier=verifier))
                continue
        kept.append(
            replace(
                problem,
                question=question,
                messages=compose(question, "integer"),
                answer=answer,
                verifier="integer",
                trace=None,
                family=problem.split_key,
            )
        )
    return kept, drops
