"""What is done about a faulty machine, and what is not.

`Actor.handle` is called after every call of a job for each of its alerts; it does one step at
most, never waits, and may be called again at any time, also by a process that knows nothing of the
steps before: annotations of the node tell them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from planish.minder.result import Result

Action = Literal["none", "cordon", "evict", "uncordon"]
Done = Literal["none", "done", "dry_run", "refused", "waiting", "blocked", "failed", "forbidden"]


@dataclass(frozen=True)
class Outcome:
    """What came of one alert.

    Example:
        >>> Outcome("cordon", "refused", "breaker is open").is_suppressed
        True
    """

    action: Action
    """What was wanted."""
    result: Done
    """done: all of it. waiting: a second call, or pods that a budget holds back; call again.
    blocked: those pods were given up. refused: a guard. forbidden: the API server said 403."""
    detail: str = ""
    """Why, in words."""
    has_changed: bool = True
    """It differs from what `handle` last said of this alert: count and log it only then."""

    @property
    def is_suppressed(self) -> bool:
        """Whether the alert stays without an action for now."""
        return self.result in ("refused", "dry_run", "forbidden", "failed")


class ActedAlert(Protocol):
    """What must be known of an alert."""

    @property
    def id(self) -> str:
        """Stable while the alert lives."""

    @property
    def job(self) -> str:
        """`JobInfo.key` of its job."""

    @property
    def machine(self) -> str:
        """Node name; empty for an event of the whole job."""

    @property
    def kind(self) -> str:
        """dissimilar, silent or job_wide."""

    @property
    def metric(self) -> str:
        """What confirmed it."""

    @property
    def state(self) -> str:
        """candidate, firing, acted, suppressed or resolved."""

    @property
    def since(self) -> float:
        """Unix seconds at which it began."""


class Handles(Protocol):
    """What a service needs of an actor; `Actor` meets it."""

    def handle(self, alert: ActedAlert, result: Result, now: int) -> Outcome:
        """Do the next step for an alert, given the newest result of its job."""
