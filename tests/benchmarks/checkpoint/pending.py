"""What every system is to a rank: a save that goes on, and the calls that all of them have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Protocol


class Pending:
    """A save that may still be going on, as one rank sees it."""

    def __init__(self) -> None:
        self.details: dict[str, Any] = {}
        self.error: Exception | None = None
        self._end: float | None = None

    def finish(self) -> None:
        """Note that the save is durable."""
        self._end = time.perf_counter()

    def watch(self, wait: Callable[[], Any]) -> Pending:
        """Finish when `wait` returns, in a thread."""

        def run() -> None:
            try:
                wait()
            except Exception as error:
                self.error = error
            self.finish()

        threading.Thread(target=run, daemon=True).start()
        return self

    def progress(self) -> float:
        """1 when durable, -1 when failed, else 0."""
        return 0.0 if self._end is None else -1.0 if self.error else 1.0

    def seconds_since(self, started: float) -> float:
        """Seconds from `started` to the end."""
        assert self._end is not None
        return self._end - started


class System(Protocol):
    """A way to save and load the state of this rank."""

    def save(self, path: str) -> Pending:
        """Save; returns when the state may be modified."""

    def load(self, path: str) -> dict[str, Any]:
        """Load in place and return what there is to tell."""

    def close(self) -> None:
        """Free what is kept between saves."""
