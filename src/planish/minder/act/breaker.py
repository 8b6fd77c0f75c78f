"""A switch that stops all actions when something larger than one machine is wrong.

It opens by itself and is closed by a human only. Alerts are never held back by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from planish.minder.act.config import ActConfig


class Breaker:
    """Open or closed, and why.

    Example:
        >>> breaker = Breaker(ActConfig())
        >>> breaker.open("cap of 3 nodes", 100.0)
        True
        >>> breaker.close(2000.0)
        >>> breaker.is_open, breaker.discards(1000.0), breaker.discards(1200.0)
        (False, True, False)
    """

    def __init__(self, config: ActConfig) -> None:
        """Begin closed."""
        self.config = config
        self.reason = ""
        """Why it is open; empty when it is closed."""
        self.opened = 0.0
        """Unix seconds of the last opening."""
        self.closed = 0.0
        """Unix seconds of the last closing by a human."""
        self._requests: deque[tuple[float, bool]] = deque()

    @property
    def is_open(self) -> bool:
        """Whether all actions are blocked."""
        return bool(self.reason)

    def open(self, reason: str, now: float) -> bool:
        """Block all actions; return whether it was closed before."""
        if self.is_open:
            return False
        self.reason, self.opened = reason, now
        return True

    def close(self, now: float) -> None:
        """Allow actions again, for alerts that are young enough. Only a human may ask for it."""
        self.reason, self.closed = "", now
        self._requests.clear()

    def discards(self, fired: float) -> bool:
        """Tell whether an alert is too old to be acted upon after the last closing."""
        return bool(self.closed) and fired < self.closed - self.config.discard_seconds

    def record(self, succeeded: bool, now: float) -> bool:
        """Count a request to the API server; return whether that opened the breaker."""
        self._requests.append((now, succeeded))
        while self._requests[0][0] <= now - self.config.breaker_seconds:
            self._requests.popleft()
        count = len(self._requests)
        failed = sum(not good for _, good in self._requests)
        if count < self.config.breaker_min_requests:
            return False
        if failed <= self.config.breaker_error_share * count:
            return False
        return self.open(
            f"{failed} of {count} requests to the API server failed in "
            f"{self.config.breaker_seconds} s",
            now,
        )

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive a restart."""
        return {"reason": self.reason, "opened": self.opened, "closed": self.closed}

    @classmethod
    def from_json(cls, config: ActConfig, state: Mapping[str, Any]) -> Breaker:
        """Return a breaker as it was."""
        breaker = cls(config)
        breaker.reason = str(state.get("reason", ""))
        breaker.opened = float(state.get("opened", 0.0))
        breaker.closed = float(state.get("closed", 0.0))
        return breaker
