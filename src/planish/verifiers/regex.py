"""Verifier that searches the whole response for a pattern, the row's ground truth.

The search runs in a child process for at most a second. A hostile pattern, or a response that makes
a careless pattern slow, fails the row and not the stage.
"""

from __future__ import annotations

import re
import resource
import signal

from planish.verifiers.own import shared_verifier
from planish.verifiers.verdict import Verdict, VerifierOptions

SEARCH_SECONDS = 1.0
MAX_RESPONSE_CHARS = 200_000
MEMORY_BYTES = 4 << 30


def verify_regex(response: str, answer: str, options: VerifierOptions) -> Verdict:
    """A response is right if `re.search` finds the pattern `answer` anywhere in it."""
    return shared_verifier("planish.verifiers.regex:contains_pattern")(response, answer, options)


def contains_pattern(response: str, pattern: str) -> bool:
    """Search with a time limit; runs in a child process.

    Raises:
        TimeoutError: the search took too long.
        re.error: the pattern is invalid.
    """
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))

    def stop(*_: object) -> None:
        raise TimeoutError(f"the search took longer than {SEARCH_SECONDS:g} s")

    # `re` checks for signals during a search, so the exception ends the search.
    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SEARCH_SECONDS)
    try:
        return re.search(pattern, response[-MAX_RESPONSE_CHARS:]) is not None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
