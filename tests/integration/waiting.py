"""Waiting for what comes true in its own time in another process."""

import time
from collections.abc import Callable
from typing import Any

LONGEST_PAUSE = 0.1


def wait_for(
    holds: Callable[[], Any],
    seconds: float = 300.0,
    why: str | Callable[[], str] = "a condition",
    *,
    longest_pause: float = LONGEST_PAUSE,
) -> Any:
    """Return what is true at last, or fail after `seconds` with the end of what `why` tells."""
    end, pause = time.monotonic() + seconds, 0.005
    while not (found := holds()):
        if time.monotonic() > end:
            text = why if isinstance(why, str) else why()
            raise AssertionError(f"still not so after {seconds} s: {text[-3000:]}")
        time.sleep(pause)
        pause = min(longest_pause, 1.2 * pause)
    return found
