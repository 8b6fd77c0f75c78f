"""What goes into the actor and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from planish.minder.act.kube.objects import JobInfo, NodeInfo, PodInfo

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


@dataclass(frozen=True)
class Facts:
    """What was read from the API server for one step."""

    job: JobInfo
    pods: tuple[PodInfo, ...]
    """Pods of the job on the machine that have not ended, of all its roles."""
    node: NodeInfo
    action: Action
    """The most that is allowed."""

    @property
    def plan(self) -> str:
        """What is done to the node, in words."""
        if self.action == "cordon":
            return f"cordon {self.node.name}"
        pods = sorted(pod.name for pod in self.pods if pod.is_evictable)
        return f"cordon {self.node.name} and evict {', '.join(pods) or 'no pod'}"


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
        """Unix seconds at which the machine began to differ."""

    @property
    def seen(self) -> float:
        """Unix seconds after the last one in which it differed."""

    @property
    def fired(self) -> float:
        """Unix seconds of the call that confirmed it."""

    @property
    def score(self) -> float:
        """Mean normal score."""

    @property
    def machines(self) -> tuple[str, ...]:
        """All that are concerned, where it is an event of the whole job."""
