"""The child process of `planish.verifiers.child`: one JSON request a line, one reply a line.

It limits its own memory and file writes, and an alarm ends it should its parent have died in the
middle of a request.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Any, TextIO

MEMORY_BYTES = 4 << 30
"""Address space that the child may use."""


def equal(gold: str, target: str) -> bool:
    """Tell whether two mathematical texts are equal, as math-verify sees them."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    def read(text: str) -> list[Any]:
        answers: list[Any] = parse(
            f"\\boxed{{{text}}}",
            extraction_config=[
                LatexExtractionConfig(boxed_match_priority=0),
                ExprExtractionConfig(),
            ],
            parsing_timeout=None,
        )
        return answers

    # The library's own limits use alarms; the limit that counts is the parent's on this process.
    return bool(verify(read(gold), read(target), timeout_seconds=None))


def answer(request: str, compare: Callable[[str, str], bool]) -> dict[str, str]:
    """Return the reply to one request line."""
    raw = json.loads(request)
    signal.alarm(int(raw["alarm_seconds"]))
    try:
        same = compare(str(raw["gold"]), str(raw["target"]))
    except Exception as error:
        # Whatever the mathematics library raises on model text, the text is not the answer.
        return {"outcome": "different", "error": type(error).__name__}
    finally:
        signal.alarm(0)
    return {"outcome": "equal" if same else "different"}


def serve(requests: Iterable[str], replies: TextIO, compare: Callable[[str, str], bool]) -> None:
    """Answer requests until the parent closes the pipe."""
    for request in requests:
        replies.write(json.dumps(answer(request, compare)) + "\n")
        replies.flush()


def main() -> int:
    """Limit this process, import, say ready, serve."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Replies go to a private copy of standard output; what libraries print goes nowhere.
    with os.fdopen(os.dup(1), "w", encoding="ascii") as replies:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            ready = {"outcome": "ready"} if equal("1", "1") else {"error": "1 is not 1"}
        except ImportError as error:
            ready = {"error": str(error)}
        replies.write(json.dumps(ready) + "\n")
        replies.flush()
        if "error" in ready:
            return 1
        serve(sys.stdin, replies, equal)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
