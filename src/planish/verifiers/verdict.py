"""The verdict of a verifier on one response, and the options of verifiers.

This module has no rewards: the reward stage turns verdicts into rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from planish.verifiers.thoughts import AUTO

MAX_EXTRACTED_CHARS = 300
"""Length limit of `extracted` texts, which are kept for audits."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of one verification.

    Example:
        >>> Verdict(accuracy=1.0, extracted="72").invalid
        False
    """

    accuracy: float
    """1.0 when the response is equivalent to the answer, else 0.0."""
    extracted: str = ""
    """The answer that the verifier extracted; valid UTF-8, at most 300 characters."""
    invalid: bool = False
    """True if the response has no answer."""
    timeout: bool = False
    """True if the comparison did not end in time. `error` is True too if the verifier, and not the
    response, was too slow."""
    error: bool = False
    """True if the verifier itself failed (timeout, crash, unusable ground truth); accuracy is then
    0."""
    score: float | None = None
    """Score in [0, 1] of a verifier with partial scores; accuracy is 1 only if the score is 1.
    None: the score is `accuracy`."""
    reason: str = ""
    """One line with the reason of `error` or `timeout`, if the verifier gives one."""


@dataclass(frozen=True, slots=True)
class VerifierOptions:
    """Options of verifiers that a run sets."""

    accept_integral_decimals: bool = True
    """Accept `5.0` as 5."""
    timeout_seconds: float = 10.0
    """Longest duration of one comparison in the child process."""
    answer_after: str = AUTO
    """Text that precedes the answer; `auto`: the end of a thought."""

    @classmethod
    def of(cls, reward: Mapping[str, Any]) -> VerifierOptions:
        """Return the options for all stages of a run; `reward` is its section `[reward]`."""
        return cls(
            reward.get("accept_integral_decimals", True),
            reward.get("verifier_timeout_seconds", 10.0),
            reward.get("answer_after", AUTO),
        )


Verifier = Callable[[str, str, VerifierOptions], Verdict]
"""Function (response, answer, options) -> Verdict."""


def clean_text(text: str) -> str:
    """Return `text` as valid UTF-8 of bounded length: lone surrogates become `?`."""
    kept = text[:MAX_EXTRACTED_CHARS]
    return kept.encode("utf-8", "replace").decode("utf-8")


def wrong(extracted: str = "") -> Verdict:
    """Return the verdict on a wrong answer."""
    return Verdict(accuracy=0.0, extracted=clean_text(extracted))


def right(extracted: str) -> Verdict:
    """Return the verdict on a right answer."""
    return Verdict(accuracy=1.0, extracted=clean_text(extracted))


def not_found() -> Verdict:
    """Return the verdict on a response without an answer."""
    return Verdict(accuracy=0.0, invalid=True)


def timed_out(extracted: str = "", *, reason: str = "") -> Verdict:
    """Return the verdict on a response whose comparison timed out."""
    return Verdict(0.0, clean_text(extracted), timeout=True, reason=clean_text(reason))


def failed(extracted: str = "", *, timeout: bool = False, reason: str = "") -> Verdict:
    """Return the verdict if the verifier itself failed."""
    return Verdict(
        accuracy=0.0,
        extracted=clean_text(extracted),
        timeout=timeout,
        error=True,
        reason=clean_text(reason),
    )
