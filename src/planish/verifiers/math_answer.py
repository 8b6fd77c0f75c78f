"""Find the final answer of a response and compare it: integers by rule, the rest in a child.

Only the last 300 characters of the response are read, never the prompt.

Source: DAPO, arXiv 2503.14476, section 2.4 (rule-based reward).
"""

from __future__ import annotations

import re

from planish.verifiers.child import MathComparison, compare
from planish.verifiers.verdict import (
    Verdict,
    VerifierOptions,
    failed,
    not_found,
    right,
    wrong,
)

TAIL_CHARS = 300
"""How much of the end of a response is searched for `Answer:`."""
BOXED_CHARS = 100
"""How much of the end of a response is searched for a boxed answer."""
MAX_DIGITS = 64
"""Longest digit string that becomes an integer."""
MAX_ANSWER_CHARS = 1000
"""Longest ground truth that is compared."""
MAX_DEPTH = 16
"""Deepest nesting of brackets that is compared; the time to parse grows quickly with it."""

_ANSWER = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE)
_INTEGER = re.compile(r"[+-]?[0-9]+")
_INTEGRAL_DECIMAL = re.compile(r"([+-]?[0-9]+)\.0+")
_GROUPED = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_WRAPPER = re.compile(r"\\(?:text|textbf|mathrm|mathbf|boxed)\{([^{}]*)\}")
_SPACE = re.compile(r"(?<![0-9A-Za-z.])\s+|\s+(?![0-9A-Za-z.])")
_UNITS = (
    "apples|cents|centimeters|clips|cm|days|degrees|dollars|euros|feet|ft|gallons|grams|hours|hrs|"
    "inches|integers|kg|kilometers|kilograms|km|liters|meters|miles|minutes|mins|months|mph|people|"
    "percent|points|pounds|seconds|sq|square|students|units|ways|weeks|yards|years"
)
_UNIT = re.compile(rf"(?<=[0-9])\s*(?:(?:{_UNITS})\b\s*)+$", re.IGNORECASE)


def extract_answer(response: str) -> str | None:
    r"""Return the text of the final answer, or None.

    The last `Answer: ...` line of the last 300 characters wins; without one, the last balanced
    `\boxed{...}` of the last 100 characters.
    """
    tail = response[-TAIL_CHARS:]
    matches = _ANSWER.findall(tail)
    if matches:
        return str(matches[-1]).strip()
    return last_boxed(tail[-BOXED_CHARS:])


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last balanced `\boxed{...}` of `text`, or None."""
    mark = r"\boxed{"
    start = text.rfind(mark)
    while start >= 0:
        depth = 0
        for position in range(start + len(mark) - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(mark) : position]
        start = text.rfind(mark, 0, start)
    return None


def normalise_answer(text: str) -> str:
    r"""Reduce an answer to the form that is compared.

    What follows the last `=` counts; dollar signs, wrappers such as `\text{}` and `\boxed{}`,
    trailing units and periods, thousands commas of plain numbers, and spaces go. A space between
    two digits or letters stays, so that `5 7` is not 57.

    Example:
        >>> normalise_answer(r"x = $\boxed{1,234}$ dollars.")
        '1234'
    """
    text = text[-MAX_ANSWER_CHARS:].rpartition("=")[2]
    text = text.replace("\\$", "").replace("$", "").replace("\\!", "").replace("\\,", "")
    for _ in range(4):
        text, count = _WRAPPER.subn(r"\1", text)
        if count == 0:
            break
    text = text.strip("* \t").rstrip(".").rstrip("* \t")
    text = _UNIT.sub("", text).removesuffix("\\%").removesuffix("%")
    text = _SPACE.sub("", text).rstrip(".")
    return text.replace(",", "") if _GROUPED.fullmatch(text) else text


def as_integer(text: str, options: VerifierOptions) -> int | None:
    """Return the integer that `text` spells in at most 64 ASCII digits, or None."""
    if options.accept_integral_decimals and (match := _INTEGRAL_DECIMAL.fullmatch(text)):
        text = match[1]
    if not _INTEGER.fullmatch(text) or len(text.lstrip("+-")) > MAX_DIGITS:
        return None
    return int(text)


def verify_integer(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Compare the extracted answer with an integer; other ground truths compare as text."""
    expected = normalise_answer(answer)
    if not expected:
        return failed()
    given = extract_answer(response)
    if given is None:
        return not_found()
    return _by_rule(normalise_answer(given), expected, options)


def _by_rule(seen: str, expected: str, options: VerifierOptions) -> Verdict:
    wanted, given = as_integer(expected, options), as_integer(seen, options)
    if wanted is not None:
        return right(seen) if given == wanted else wrong(seen)
    return right(seen) if seen == expected else wrong(seen)


def verify_math(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Compare mathematically: by rule where it decides, else in a killable child process."""
    expected = normalise_answer(answer)
    if not expected or len(answer) > MAX_ANSWER_CHARS:
        return failed()
    given = extract_answer(response)
    if given is None:
        return not_found()
    seen = normalise_answer(given)
    ruled = _by_rule(seen, expected, options)
    both_integers = None not in (as_integer(seen, options), as_integer(expected, options))
    if ruled.accuracy == 1.0 or both_integers or not _is_comparable(seen):
        return ruled
    outcome = compare(expected, seen, timeout_seconds=options.timeout_seconds)
    if outcome is MathComparison.EQUAL:
        return right(seen)
    if outcome is MathComparison.DIFFERENT:
        return wrong(seen)
    return failed(seen, timeout=outcome is MathComparison.TIMEOUT)


def _is_comparable(text: str) -> bool:
    """Refuse what must equal nothing: open or deep brackets, non-ASCII digits, several answers."""
    braces = brackets = 0
    for character in text:
        braces += {"{": 1, "}": -1}.get(character, 0)
        brackets += {"(": 1, "[": 1, ")": -1, "]": -1}.get(character, 0)
        if braces < 0 or max(braces, brackets) > MAX_DEPTH:
            return False
        if character.isdigit() and not character.isascii():
            return False
    lowered = f" {text.lower()} "
    return braces == 0 and bool(text) and " or " not in lowered and "boxed" not in lowered
