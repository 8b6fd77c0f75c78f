"""Plain text equality."""

from __future__ import annotations

from planish.verifiers.verdict import Verdict, VerifierOptions, failed, not_found, right, wrong


def verify_exact(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Compare the whole response with the answer, apart from white space at both ends."""
    expected = answer.strip()
    if not expected:
        return failed()
    given = response.strip()
    if not given:
        return not_found()
    return right(given) if given == expected else wrong(given)
