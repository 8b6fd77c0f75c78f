"""Waiting for what comes true in its own time on a server."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def wait_for(holds: Callable[[], Any], seconds: float, why: Callable[[], str] = lambda: "") -> Any:
    """Return what is true at last, or fail after `seconds` with the end of what `why` tells."""
    end = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end, f"still not so after {seconds} s; {why()[-3000:]}"
        time.sleep(0.1)
    return found
