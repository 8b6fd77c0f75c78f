"""What must hold before a machine is taken out of service; every guard can refuse alone.

The breaker stops all actions when more than one machine is wrong. It opens by itself, and only a
human closes it. It never holds an alert back.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import NodeInfo, PodInfo, is_set, unix_seconds

logger = logging.getLogger(__name__)


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
        self._lock = threading.Lock()
        """Every thread that asks the API server counts its requests here."""

    @property
    def is_open(self) -> bool:
        """Whether all actions are blocked."""
        return bool(self.reason)

    def open(self, reason: str, now: float) -> bool:
        """Block all actions; return whether it was closed before."""
        if self.is_open:
            return False
        self.reason, self.opened = reason, now
        logger.error("breaker opened reason=%s", reason)
        return True

    def close(self, now: float) -> None:
        """Allow actions again, for alerts that are young enough; only a human may ask for it."""
        with self._lock:
            self.reason, self.closed = "", now
            self._requests.clear()

    def discards(self, fired: float) -> bool:
        """Tell whether an alert is too old to be acted upon after the last closing."""
        return bool(self.closed) and fired < self.closed - self.config.discard_seconds

    def record(self, succeeded: bool, now: float) -> bool:
        """Count a request to the API server; return whether that opened the breaker."""
        with self._lock:
            self._requests.append((now, succeeded))
            while self._requests[0][0] <= now - self.config.breaker_seconds:
                self._requests.popleft()
            count = len(self._requests)
            failed = sum(not each for _, each in self._requests)
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
        """Return the breaker that `to_json` described."""
        breaker = cls(config)
        breaker.reason = str(state.get("reason", ""))
        breaker.opened = float(state.get("opened", 0.0))
        breaker.closed = float(state.get("closed", 0.0))
        return breaker


@dataclass(frozen=True)
class Taken:
    """A node that was taken out of service."""

    time: float
    """Unix seconds."""
    job: str
    """Key of the job that lost it."""
    node: str


class Ledger:
    """Which nodes were taken when. Limits count over a sliding window, not over clock hours.

    Example:
        >>> ledger = Ledger([Taken(0.0, "team/job", "n1")])
        >>> [t.node for t in ledger.recent(3599.0, 3600)], ledger.recent(3600.0, 3600)
        (['n1'], [])
    """

    def __init__(self, taken: Sequence[Taken] = ()) -> None:
        """Begin with what is known."""
        self._taken = {(entry.node, entry.time): entry for entry in taken}

    @property
    def entries(self) -> list[Taken]:
        """All, by time."""
        return sorted(self._taken.values(), key=lambda entry: (entry.time, entry.node))

    def add(self, entry: Taken) -> None:
        """Add an entry."""
        self._taken[entry.node, entry.time] = entry

    def learn(self, nodes: Sequence[NodeInfo], owner: str) -> None:
        """Add the nodes whose annotations name a cordon; annotations outlive a lost state."""
        for node in nodes:
            since = float(unix_seconds(node.annotations.get(names.SINCE)))
            if not since or node.annotations.get(names.CORDONED_BY) != owner:
                continue
            if not any(e.node == node.name and abs(e.time - since) < 2 for e in self.entries):
                self.add(Taken(since, node.annotations.get(names.JOB, ""), node.name))

    def recent(self, now: float, window_seconds: float, job: str | None = None) -> list[Taken]:
        """Return what was taken in the seconds before `now`, from one job or from all."""
        return [
            entry
            for entry in self.entries
            if entry.time > now - window_seconds and job in (None, entry.job)
        ]

    def forget(self, before: float) -> None:
        """Drop older entries."""
        self._taken = {key: entry for key, entry in self._taken.items() if entry.time >= before}


@dataclass(frozen=True)
class Situation:
    """All that the guards look at, read from the API server for this one decision."""

    alert_id: str
    fired: float
    """Unix seconds of the call that confirmed the alert."""
    job: str
    """Namespace and name of the job."""
    node: NodeInfo
    """The machine."""
    pods: Sequence[PodInfo]
    """Pods of the job on it that have not ended."""
    nodes: Sequence[NodeInfo]
    """All nodes."""
    used: Mapping[str, Mapping[str, float]]
    """Node to resource to what its pods request."""
    is_leader: bool
    now: float


def cap(nodes: Sequence[NodeInfo], config: ActConfig) -> int:
    """Return how many nodes may be taken in the window of the cap."""
    resource = config.gpu_resource
    count = sum(not resource or node.allocatable.get(resource, 0.0) > 0 for node in nodes)
    # In floating point 0.1 * 30 is a little more than 3.
    return min(config.max_nodes, math.ceil(config.max_node_share * count - 1e-9))


def standing_refusals(situation: Situation, breaker: Breaker) -> list[str]:
    """Return what forbids every action, even to continue one that was begun."""
    reasons = []
    if not situation.is_leader:
        reasons.append("this replica is not the leader")
    if breaker.is_open:
        reasons.append(f"the breaker is open: {breaker.reason}")
    if breaker.discards(situation.fired):
        reasons.append("the alert is older than the closing of the breaker allows")
    if is_set(situation.node.labels, names.EXEMPT):
        reasons.append(f"the node is exempt by its label {names.EXEMPT}")
    exempt = sorted(pod.name for pod in situation.pods if pod.is_exempt)
    if exempt:
        reasons.append(f"pods are exempt by their label {names.EXEMPT}: {', '.join(exempt)}")
    if situation.node.annotations.get(names.MANUAL_UNCORDON) == situation.alert_id:
        reasons.append("a human made the node schedulable again after this alert")
    return reasons


def refusals(
    situation: Situation, ledger: Ledger, breaker: Breaker, config: ActConfig
) -> list[str]:
    """Return what forbids taking the node, in words; empty when nothing does."""
    reasons = standing_refusals(situation, breaker)
    if situation.node.is_unschedulable:
        reasons.append("the node was cordoned by somebody else")
    limits = (
        (config.nodes_per_job, config.job_seconds, situation.job, "of this job"),
        (config.nodes_per_cluster, config.cluster_seconds, None, "of the cluster"),
        (1, config.spacing_seconds, None, "of the cluster"),
        (cap(situation.nodes, config), config.cap_seconds, None, "of the cluster"),
    )
    for limit, window, job, whose in limits:
        taken = {entry.node for entry in ledger.recent(situation.now, window, job)}
        reason = f"{len(taken)} of at most {limit} nodes {whose} were taken in {window} s"
        if len(taken) >= limit and reason not in reasons:
            reasons.append(reason)
    if not config.allow_without_spare and not spares(situation):
        reasons.append("no other schedulable node fits the pods")
    return reasons


def cap_is_used_up(situation: Situation, ledger: Ledger, config: ActConfig) -> bool:
    """Tell whether the node is one more than the cap allows, which opens the breaker."""
    taken = ledger.recent(situation.now, config.cap_seconds)
    return len({entry.node for entry in taken}) >= cap(situation.nodes, config)


def spares(situation: Situation) -> list[str]:
    """Return the names of the other nodes that could take all the pods at once."""
    wanted: dict[str, float] = {}
    for pod in situation.pods:
        for name, amount in pod.requests.items():
            wanted[name] = wanted.get(name, 0.0) + amount
    others = [
        node
        for node in situation.nodes
        if node.name != situation.node.name
        and not node.is_unschedulable
        and node.is_ready
        and all(_admits(node, pod) for pod in situation.pods)
    ]
    found = []
    for node in others:
        used = situation.used.get(node.name, {})
        if all(
            amount <= node.allocatable.get(name, 0.0) - used.get(name, 0.0) + 1e-9
            for name, amount in wanted.items()
            if amount and not (name == "pods" and name not in node.allocatable)
        ):
            found.append(node.name)
    return found


def _admits(node: NodeInfo, pod: PodInfo) -> bool:
    """Tell whether labels and taints of a node allow a pod."""
    if any(node.labels.get(key) != value for key, value in pod.selector.items()):
        return False
    return all(
        any(_tolerates(toleration, taint) for toleration in pod.tolerations)
        for taint in node.taints
        if taint.get("effect") in ("NoSchedule", "NoExecute")
    )


def _tolerates(toleration: Mapping[str, str], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.get("effect"):
        return False
    key = toleration.get("key")
    if toleration.get("operator", "Equal") == "Exists":
        return not key or key == taint.get("key")
    return key == taint.get("key") and toleration.get("value", "") == taint.get("value", "")
