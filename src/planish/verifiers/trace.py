"""Worked column traces: the answer follows the last `=` of the response."""

from __future__ import annotations

from planish.verifiers.math_answer import as_integer
from planish.verifiers.verdict import Verdict, VerifierOptions, failed, not_found, right, wrong

_WHOLE_NUMBERS = VerifierOptions(accept_integral_decimals=False)


def verify_trace(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """Compare the integer after the last `=`; a response without `=` has no answer.

    Example:
        >>> verify_trace("8+4+0=12;4+2+1=7=72", "72", VerifierOptions()).accuracy
        1.0
    """
    wanted = as_integer(answer.strip(), _WHOLE_NUMBERS)
    if wanted is None:
        return failed()
    _, equals, given = response.rpartition("=")
    given = given.strip(" \t\r\n")
    if not equals or not given:
        return not_found()
    return right(given) if as_integer(given, _WHOLE_NUMBERS) == wanted else wrong(given)
