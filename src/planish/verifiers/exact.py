"""Plain text equality."""

from __future__ import annotations

from planish.verifiers.verdict import (
    Verdict,
    VerifierOptions,
    failed,
    not_found,
    right,
    wrong,
)


def verify_exact(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Compare the whole response with the answer, apart from white space at both ends."""
    expected = answer.strip()
    if not expected:
        return failed()
    found = response.strip()
    if not found:
        return not_found()
    return right(found) if found == expected else wrong(found)
