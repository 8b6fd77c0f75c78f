"""Verifiers: functions from response text and ground truth to a verdict, defined on any text.

A verifier never raises on model text and never executes it in this process. Heavy mathematics and
functions of the user run in child processes (`own.py`).
"""

from __future__ import annotations

import difflib
import functools
import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from planish.base.errors import ConfigError, VerifierFailure
from planish.verifiers.math_answer import (
    FORMS,
    MAX_ANSWER_CHARS,
    MAX_DIGITS,
    as_integer,
    asked_form,
    normalise_answer,
)
from planish.verifiers.own import (
    ENTRY_POINTS,
    OwnVerifier,
    installed_verifiers,
    is_reference,
    shared_verifier,
)
from planish.verifiers.thoughts import after_thought
from planish.verifiers.verdict import (
    Verdict,
    Verifier,
    VerifierOptions,
    clean_text,
    failed,
    not_found,
)

__all__ = [
    "FORMS",
    "READS_FORMS",
    "VERIFIERS",
    "Verdict",
    "VerifierOptions",
    "answer_fault",
    "asked_form",
    "check_verifier",
    "columns_of",
    "find_verifier",
    "is_own",
    "split_name",
    "verify",
    "verify_many",
]

logger = logging.getLogger(__name__)

VERIFIERS: dict[str, str] = {
    "countdown": "planish.verifiers.countdown:verify_countdown",
    "exact": "planish.verifiers.exact:verify_exact",
    "integer": "planish.verifiers.math_answer:verify_integer",
    "json_schema": "planish.verifiers.json_schema:verify_json_schema",
    "math": "planish.verifiers.math_answer:verify_math",
    "python_tests": "planish.verifiers.isolated.python_tests:verify_python_tests",
    "regex": "planish.verifiers.regex:verify_regex",
    "trace": "planish.verifiers.trace:verify_trace",
}
"""Name in a prompt's `verifier` column to `module:function`, for built-in verifiers."""

CHECKS: dict[str, str] = {
    "python_tests": "planish.verifiers.isolated.python_tests:check_isolation",
}
"""Map from name of a verifier to the `module:function` that checks whether this machine can run
it."""

READS_FORMS = frozenset({"integer", "math"})
"""Verifiers that search for an answer in one of the `FORMS` first: `math/box`."""

PARALLEL = frozenset({"python_tests"})
"""Verifiers that start processes for each row; they judge as many rows at once as there are
processors."""

_DEFAULTS = VerifierOptions()
_MAX_ANSWER_CHARS = {"json_schema": 100_000, "python_tests": 1_000_000}
_UNUSABLE = {
    "json_schema": "answer_not_a_schema",
    "python_tests": "answer_not_tests",
    "regex": "answer_not_a_pattern",
}
"""Reason codes by verifier, for verifiers that fail on the empty response."""


def split_name(name: str) -> tuple[str, str]:
    """Return the built-in verifier and the answer form of a name; the form is "" by default.

    Example:
        >>> split_name("math/box"), split_name("exact/box")
        (('math', 'box'), ('exact/box', ''))
    """
    base, _, form = name.partition("/")
    return (base, form) if base in READS_FORMS and form in FORMS else (name, "")


def is_own(name: str) -> bool:
    """Return whether a name means a function of the user, which may be missing on this machine."""
    return is_reference(name) or name in installed_verifiers().keys() - VERIFIERS.keys()


def find_verifier(name: str) -> Verifier:
    """Return the verifier for a name: built-in, an entry point, or `package.module:function`.

    Built-in names come first. No module of the user is imported into this process.
    """
    base, form = split_name(name)
    if base in VERIFIERS:
        module, _, function = VERIFIERS[base].partition(":")
        shipped = getattr(importlib.import_module(module), function)
        verifier: Verifier = functools.partial(shipped, form=form) if form else shipped
        return verifier
    installed = installed_verifiers()
    own = name if is_reference(name) else installed.get(name)
    if own:
        return shared_verifier(own)
    known = sorted({*VERIFIERS, *installed})
    close = difflib.get_close_matches(name, known, n=1)
    raise ConfigError(
        f"a verifier must be one of {known}, an entry point of the group {ENTRY_POINTS!r} or "
        f"`package.module:function`, got {name!r}"
        + (f"; did you mean {close[0]!r}?" if close else "; is its package installed here?")
    )


def check_verifier(name: str) -> None:
    """Check before a run that a verifier works on this machine; it starts a user's verifier."""
    verifier = find_verifier(name)
    if isinstance(verifier, OwnVerifier):
        verifier.start()
    if name in CHECKS:
        check_machine(name)


def columns_of(name: str) -> tuple[str, ...]:
    """Return the columns of a data row that are parameters of a user's verifier."""
    verifier = find_verifier(name) if is_own(name) else None
    return verifier.columns() if isinstance(verifier, OwnVerifier) else ()


@functools.cache
def check_machine(name: str) -> None:
    """Check, once in this process, that this machine can run a verifier of `CHECKS`."""
    module, _, function = CHECKS[name].partition(":")
    getattr(importlib.import_module(module), function)()


def verify(
    name: str,
    response: str,
    answer: str,
    options: VerifierOptions = _DEFAULTS,
    extra: str = "",
) -> Verdict:
    """Verify one response; any text at all gets a verdict.

    `response` is sampled text without special tokens and without the prompt. If the prompt has
    opened a thought, the text begins with the mark of that thought. A built-in verifier reads the
    text after the thoughts, a user's verifier reads all of it. `extra` has columns of the data row
    for a user's verifier, as a JSON object.

    Raises:
        ConfigError: there is no such verifier.
        VerifierFailure: a user's verifier has hung too often in a row.
    """
    verifier = find_verifier(name)
    try:
        if isinstance(verifier, OwnVerifier):
            return verifier(response, answer, options, extra)
        judged = after_thought(response, answer, options.answer_after)
        return not_found() if judged is None else verifier(judged, answer, options)
    except (ConfigError, VerifierFailure):
        raise
    except Exception:
        # One bad row must not end a batch; the caller raises if errors exceed its limit.
        logger.exception("verifier error name=%s answer=%r", name, clean_text(answer))
        return failed()


def verify_many(
    rows: Iterable[Sequence[str]], options: VerifierOptions = _DEFAULTS
) -> list[Verdict]:
    """Verify rows of (verifier name, response, answer[, extra]), in order; raises as `verify`."""
    listed = list(rows)
    workers = len(os.sched_getaffinity(0))

    def judge(row: Sequence[str]) -> Verdict:
        name, response, answer, *extra = row
        return verify(name, response, answer, options, *extra)

    if sum(row[0] in PARALLEL for row in listed) < 2 or workers < 2:
        verdicts = [judge(row) for row in listed]
    else:
        with ThreadPoolExecutor(workers) as pool:
            verdicts = list(pool.map(judge, listed))
    judged = zip(listed, verdicts, strict=True)
    late = [row[1] for row, verdict in judged if verdict.timeout and not verdict.error]
    if late:
        logger.warning(
            "%d of %d responses counted as wrong: they could not be judged in time, first %r",
            len(late),
            len(listed),
            clean_text(late[0])[-80:],
        )
    return verdicts


def answer_fault(name: str, answer: str) -> str | None:
    """Return the reason code if a ground truth cannot be verified, else None.

    Returns:
        A reason code: `unknown_verifier`, `answer_empty`, `answer_too_long`,
        `answer_not_an_integer`, `answer_not_a_task`, `answer_not_comparable`,
        `answer_not_a_pattern`, `answer_not_a_schema` or `answer_not_tests`.

    Raises:
        ConfigError: the verifier does not work on this machine. Answers for a user's verifier
            are not checked.
    """
    from planish.verifiers.countdown import parse_countdown

    if is_own(name):
        check_verifier(name)
        return None
    name = split_name(name)[0]
    if name not in VERIFIERS:
        return "unknown_verifier"
    if name in CHECKS:
        check_machine(name)
    if not answer.strip():
        return "answer_empty"
    if len(answer) > _MAX_ANSWER_CHARS.get(name, MAX_ANSWER_CHARS):
        return "answer_too_long"
    if name in _UNUSABLE:
        return _UNUSABLE[name] if verify(name, "", answer).error else None
    if name in ("integer", "trace"):
        text = normalise_answer(answer) if name == "integer" else answer.strip()
        if as_integer(text, _DEFAULTS) is not None:
            return None
        digits = text.lstrip("+-")
        too_long = digits.isdecimal() and len(digits) > MAX_DIGITS
        return "answer_too_long" if too_long else "answer_not_an_integer"
    if name == "countdown":
        return None if parse_countdown(answer) else "answer_not_a_task"
    if name == "math" and verify("math", f"Answer: {answer}", answer).accuracy != 1.0:
        return "answer_not_comparable"
    return None
