"""Rewrite problems so that their answer is one integer, by rule; or say why not.

Integers stay; p/q in lowest terms becomes a question for p + q; a + b*sqrt(c) with whole a and b
and square-free c > 1 becomes a question for a + b + c. Whatever is not determined uniquely after
such a rewrite (decimals, intervals, sets, symbols) is rejected with a reason code. The text is read
by a small parser of its own; nothing of it is ever evaluated as code.

Source: DAPO, arXiv 2503.14476, section 3.5 and appendix A (data set transformation); the rules
stand in for its language model, and the forms they accept are ours.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from math import isqrt
from typing import Protocol

from planish.base.errors import ConfigError
from planish.stages.curate.problem import Drop, Problem, drop
from planish.verifiers import READS_FORMS, answer_fault, split_name

MAX_CHARS = 200
"""Longest answer that is read."""
MAX_DEPTH = 16
"""Deepest nesting."""
MAX_RADICAND = 10**9
"""Largest number under a root."""
MAX_DIGITS = 18
"""Most digits of one number."""

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]+)|(?P<frac>\\[dt]?frac)|(?P<root>\\sqrt|sqrt|\u221a)"
    r"|(?P<times>\\cdot|\\times|\*)|(?P<mark>[-+/(){}]))"
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


class Unreadable(ValueError):
    """The answer has none of the forms; the message is the reason code."""


@dataclass(frozen=True)
class Rewrite:
    r"""What became of one problem.

    Example:
        >>> rewrite("What is x?", r"11-2\sqrt{6}").integer_answer
        '15'
    """

    original_answer: str
    """As it was."""
    form: str
    """`n`, `p/q`, `a+b*sqrt(c)`, `rewriter` or empty when rejected."""
    new_question: str
    """The question with its new last paragraph; empty when rejected."""
    integer_answer: str
    """Digits; empty when rejected."""
    method: str
    """`unchanged`, `rule`, `rewriter` or `rejected`."""
    reason: str = ""
    """Reason code of a rejection."""


class Rewriter(Protocol):
    """Rewrites what the rules reject, for example with a language model."""

    def __call__(self, question: str, answer: str) -> tuple[str, str] | None:
        """Return (new question, integer answer), or None to reject."""
        ...


Surd = dict[int, Fraction]
"""Square-free radicand to its coefficient; radicand 1 is the rational part."""


def rewrite(question: str, answer: str) -> Rewrite:
    """Rewrite one problem by rule."""
    try:
        value = read_surd(answer)
        form, integer = _integer_form(value)
    except Unreadable as error:
        return Rewrite(answer, "", "", "", "rejected", str(error))
    if form == "n":
        return Rewrite(answer, form, question, str(integer), "unchanged")
    extra = _FRACTION_QUESTION if form == "p/q" else _SURD_QUESTION
    return Rewrite(answer, form, f"{question}\n\n{extra}", str(integer), "rule")


def _integer_form(value: Surd) -> tuple[str, int]:
    rational = value.get(1, Fraction(0))
    roots = [(c, b) for c, b in value.items() if c != 1]
    if not roots:
        if rational.denominator == 1:
            return "n", rational.numerator
        return "p/q", rational.numerator + rational.denominator
    if len(roots) > 1:
        raise Unreadable("several_roots")
    c, b = roots[0]
    if rational.denominator != 1 or b.denominator != 1:
        raise Unreadable("fraction_of_root")
    return "a+b*sqrt(c)", int(rational + b) + c


def read_surd(answer: str) -> Surd:
    """Read an exact number: whole numbers, fractions, roots, `+ - * /`.

    Raises:
        Unreadable: with a reason code.
    """
    text = answer.strip().strip("$").strip().rstrip(".")
    text = re.sub(r"(?<=[0-9]),(?=[0-9]{3}(?![0-9]))", "", text)
    for pattern, reason in (
        (r"^\s*$", "answer_empty"),
        (r"[0-9]\s*\.\s*[0-9]|^\.[0-9]|\\overline", "decimal"),
        (r"%|\\circ|\\text|\\mathrm|\u00b0", "unit"),
        (r"\\cup|\\cap|\\infty|[\[\]]", "interval"),
        (r"\\\{|\\\}", "set"),
        (r"[,;]|\\pm|\bor\b|\band\b", "several_values"),
        (r"[0-9]\s*\\[dt]?frac|[0-9]\s+[0-9]", "mixed_number"),
    ):
        if re.search(pattern, text[:MAX_CHARS]):
            raise Unreadable(reason)
    if len(text) > MAX_CHARS:
        raise Unreadable("answer_too_long")
    return _Reader(_tokens(text.replace("\\left", "").replace("\\right", ""))).read()


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens: list[tuple[str, str]] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise Unreadable("symbol")
        kind = str(match.lastgroup)
        if kind == "number" and len(match[kind]) > MAX_DIGITS:
            raise Unreadable("too_many_digits")
        tokens.append((match[kind] if kind == "mark" else kind, match[kind]))
        position = match.end()
    return tokens


class _Reader:
    """Recursive descent over the tokens of one answer."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self._tokens = [*tokens, ("end", "")]
        self._position = 0

    def read(self) -> Surd:
        value = self._sum(0)
        if self._peek() != "end":
            raise Unreadable("not_a_number")
        return value

    def _peek(self) -> str:
        return self._tokens[self._position][0]

    def _next(self) -> tuple[str, str]:
        self._position += 1
        return self._tokens[self._position - 1]

    def _sum(self, depth: int) -> Surd:
        sign = -1 if self._peek() == "-" else 1
        if self._peek() in ("+", "-"):
            self._next()
        value = _scale(self._product(depth), Fraction(sign))
        while self._peek() in ("+", "-"):
            sign = 1 if self._next()[0] == "+" else -1
            value = _add(value, _scale(self._product(depth), Fraction(sign)))
        return value

    def _product(self, depth: int) -> Surd:
        value = self._factor(depth)
        while True:
            if self._peek() == "/":
                self._next()
                value = _divide(value, self._factor(depth))
            elif self._peek() == "times":
                self._next()
                value = _multiply(value, self._factor(depth))
            elif self._peek() in ("root", "("):
                value = _multiply(value, self._factor(depth))
            else:
                return value

    def _factor(self, depth: int) -> Surd:
        if depth >= MAX_DEPTH:
            raise Unreadable("nested_too_deep")
        kind, text = self._next()
        if kind == "number":
            return _clean({1: Fraction(int(text))})
        if kind == "frac":
            self._part_digits()
            top = self._group(depth)
            self._part_digits()
            return _divide(top, self._group(depth))
        if kind == "root":
            return _root(self._group(depth))
        if kind in ("(", "{"):
            return self._closed(")" if kind == "(" else "}", depth)
        raise Unreadable("not_a_number")

    def _group(self, depth: int) -> Surd:
        """Read what follows a root or a fraction: a bracket or one number."""
        kind, text = self._next()
        if kind in ("(", "{"):
            return self._closed(")" if kind == "(" else "}", depth)
        if kind == "number" and len(text) == 1:
            return _clean({1: Fraction(int(text))})
        raise Unreadable("not_a_number")

    def _part_digits(self) -> None:
        """Split a number after its first digit: LaTeX reads 1 and 2 from the digits 12."""
        kind, text = self._tokens[self._position]
        if kind == "number" and len(text) > 1:
            self._tokens[self._position : self._position + 1] = [(kind, text[0]), (kind, text[1:])]

    def _closed(self, mark: str, depth: int) -> Surd:
        value = self._sum(depth + 1)
        if self._next()[0] != mark:
            raise Unreadable("not_a_number")
        return value


def _clean(value: Surd) -> Surd:
    if len(value) > 16 or any(abs(b.numerator * b.denominator) > 10**60 for b in value.values()):
        raise Unreadable("too_many_digits")
    return {c: b for c, b in value.items() if b}


def _scale(value: Surd, by: Fraction) -> Surd:
    return _clean({c: b * by for c, b in value.items()})


def _add(left: Surd, right: Surd) -> Surd:
    total = dict(left)
    for c, b in right.items():
        total[c] = total.get(c, Fraction(0)) + b
    return _clean(total)


def _multiply(left: Surd, right: Surd) -> Surd:
    total: Surd = {}
    for c, b in left.items():
        for d, e in right.items():
            outside, inside = _square_free(c * d)
            total[inside] = total.get(inside, Fraction(0)) + b * e * outside
    return _clean(total)


def _divide(left: Surd, right: Surd) -> Surd:
    if not right:
        raise Unreadable("division_by_zero")
    if len(right) > 1:
        raise Unreadable("division_by_a_sum")
    # 1 / (b * sqrt(c)) = sqrt(c) / (b * c)
    ((c, b),) = right.items()
    return _multiply(left, {c: 1 / (b * c)})


def _root(value: Surd) -> Surd:
    radicand = value.get(1, Fraction(0))
    if set(value) - {1} or radicand < 0:
        raise Unreadable("root_of_no_positive_number")
    if radicand == 0:
        return {}
    # sqrt(p/q) = sqrt(p*q) / q
    outside, inside = _square_free(radicand.numerator * radicand.denominator)
    return {inside: Fraction(outside, radicand.denominator)}


def _square_free(number: int) -> tuple[int, int]:
    """Return (s, c) with number = s*s*c and c square-free."""
    if number > MAX_RADICAND:
        raise Unreadable("too_many_digits")
    outside, inside, prime = 1, number, 2
    while prime * prime <= inside:
        while inside % (prime * prime) == 0:
            inside //= prime * prime
            outside *= prime
        prime += 1 if prime == 2 else 2
    # What is left has no square factor below its root; it may itself be a square.
    whole = isqrt(inside)
    return (outside * whole, 1) if whole * whole == inside else (outside, inside)


def load_rewriter(reference: str) -> Rewriter | None:
    """Return the configured rewriter, or None when it is off.

    Raises:
        ConfigError: no such module or callable.
    """
    if not reference:
        return None
    module, _, name = reference.partition(":")
    try:
        loaded: object = getattr(importlib.import_module(module), name)
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
    compose: Callable[[str, str], list[dict[str, str]]],
    rewriter: Rewriter | None,
) -> tuple[list[Problem], list[Drop]]:
    """Rewrite every problem that is verified as `math` or `integer`; others pass.

    Args:
        problems: in any order, which is kept.
        compose: makes messages from (question, verifier).
        rewriter: gets what the rules reject.

    Returns:
        Problems with integer answers and the rejected ones.
    """
    kept: list[Problem] = []
    drops: list[Drop] = []
    for problem in problems:
        name, form = split_name(problem.verifier)
        if name not in READS_FORMS:
            kept.append(problem)
            continue
        done = rewrite(problem.question, problem.answer)
        if done.method == "rejected" and rewriter is not None:
            result = rewriter(problem.question, problem.answer)
            if result is not None:
                question, answer = result
                is_good = question.strip() and answer_fault("integer", answer) is None
                done = replace(done, reason="rewriter_gave_no_integer")
                if is_good:
                    done = Rewrite(problem.answer, "rewriter", question, answer, "rewriter")
        if done.method == "rejected":
            drops.append(drop(problem, done.reason))
        elif done.method == "unchanged":
            kept.append(
                replace(problem, answer=done.integer_answer, verifier=f"integer/{form}".rstrip("/"))
            )
        else:
            kept.append(
                replace(
                    problem,
                    question=done.new_question,
                    messages=compose(done.new_question, "integer"),
                    answer=done.integer_answer,
                    verifier="integer",
                    trace=None,
                    family=problem.split_key,
                )
            )
    return kept, drops
