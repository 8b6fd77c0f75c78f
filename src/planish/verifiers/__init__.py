"""Verifiers: response text and ground truth in, verdict out; total on any text.

A verifier never raises on model text and never runs it. Heavy mathematics happens in a child
process (`planish.verifiers.child`), never here.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Sequence

from planish.verifiers.verdict import Verdict, Verifier, VerifierOptions, clean_text, failed

__all__ = ["VERIFIERS", "Verdict", "VerifierOptions", "answer_fault", "verify", "verify_many"]

logger = logging.getLogger(__name__)

VERIFIERS: dict[str, str] = {
    "countdown": "planish.verifiers.countdown:verify_countdown",
    "exact": "planish.verifiers.exact:verify_exact",
    "integer": "planish.verifiers.math_answer:verify_integer",
    "math": "planish.verifiers.math_answer:verify_math",
    "trace": "planish.verifiers.trace:verify_trace",
}
"""Name in a prompt's `verifier` column to `module:function`."""

_DEFAULTS = VerifierOptions()


def verify(name: str, response: str, answer: str, options: VerifierOptions = _DEFAULTS) -> Verdict:
    """Verify one response.

    Args:
        name: key in `VERIFIERS`; an unknown one gives a verdict with `error`.
        response: sampled text without special tokens and without the prompt; any text at all.
        answer: ground truth in the verifier's form.
        options: what may differ from the default rules.

    Returns:
        A verdict, whatever the text.
    """
    if name not in VERIFIERS:
        logger.error("unknown verifier name=%r known=%r", name, sorted(VERIFIERS))
        return failed()
    module, _, function = VERIFIERS[name].partition(":")
    verifier: Verifier = getattr(importlib.import_module(module), function)
    try:
        return verifier(response, answer, options)
    except Exception:
        # One bad row must not end a batch; the caller fails loudly when errors exceed its limit.
        logger.exception("verifier error name=%s answer=%r", name, clean_text(answer))
        return failed()


def verify_many(
    rows: Iterable[Sequence[str]], options: VerifierOptions = _DEFAULTS
) -> list[Verdict]:
    """Verify rows of (verifier name, response, answer), in order, over one child process."""
    return [verify(name, response, answer, options) for name, response, answer in rows]


def answer_fault(name: str, answer: str) -> str | None:
    """Return why a ground truth cannot be verified, or None.

    Returns:
        A reason code: `unknown_verifier`, `answer_empty`, `answer_too_long`,
        `answer_not_an_integer`, `answer_not_a_task` or `answer_not_comparable`.
    """
    from planish.verifiers import math_answer
    from planish.verifiers.countdown import parse_countdown

    if name not in VERIFIERS:
        return "unknown_verifier"
    if not answer.strip():
        return "answer_empty"
    if len(answer) > math_answer.MAX_ANSWER_CHARS:
        return "answer_too_long"
    if name in ("integer", "trace"):
        text = math_answer.normalise_answer(answer) if name == "integer" else answer.strip()
        if math_answer.as_integer(text, _DEFAULTS) is not None:
            return None
        digits = text.lstrip("+-")
        too_long = digits.isdecimal() and len(digits) > math_answer.MAX_DIGITS
        return "answer_too_long" if too_long else "answer_not_an_integer"
    if name == "countdown":
        return None if parse_countdown(answer) else "answer_not_a_task"
    if name == "math" and verify("math", f"Answer: {answer}", answer).accuracy != 1.0:
        return "answer_not_comparable"
    return None
