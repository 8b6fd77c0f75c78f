"""What must hold before a machine is taken out of service; every guard can refuse alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planish.minder.act.breaker import Breaker
from planish.minder.act.config import ActConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.act.kube.parse import is_exempt, seconds


@dataclass(frozen=True)
class Taken:
    """A node that was taken out of service."""

    time: float
    """Unix seconds."""
    job: str
    """Key of the job that it was taken from."""
    node: str


class Ledger:
    """Which nodes were taken when. A window slides over it, so that no hour holds too many.

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
        """Note one more."""
        self._taken[entry.node, entry.time] = entry

    def learn(self, nodes: Sequence[NodeInfo], owner: str) -> None:
        """Take in what annotations of nodes tell, which outlive any state that was lost."""
        for node in nodes:
            since = float(seconds(node.annotations.get(names.SINCE)))
            if not since or node.annotations.get(names.CORDONED_BY) != owner:
                continue
            known = any(e.node == node.name and abs(e.time - since) < 2 for e in self.entries)
            if not known:
                self.add(Taken(since, node.annotations.get(names.JOB, ""), node.name))

    def recent(self, now: float, window_seconds: float, job: str | None = None) -> list[Taken]:
        """Return what was taken in the seconds before `now`, for one job or all."""
        return [
            entry
            for entry in self.entries
            if entry.time > now - window_seconds and job in (None, entry.job)
        ]

    def forget(self, before: float) -> None:
        """Drop older entries."""
        self._taken = {key: e for key, e in self._taken.items() if e.time >= before}


@dataclass(frozen=True)
class Situation:
    """All that the guards look at, read from the API server for this one decision."""

    alert_id: str
    fired: float
    """Unix seconds of the call that confirmed it."""
    job: str
    """Key of the job."""
    node: NodeInfo
    """The machine."""
    pods: Sequence[PodInfo]
    """Pods of the job on it that have not ended."""
    nodes: Sequence[NodeInfo]
    """All nodes."""
    used: Mapping[str, Mapping[str, float]]
    """Node to resource to what pods ask for there."""
    is_leader: bool
    now: float


def cap(nodes: Sequence[NodeInfo], config: ActConfig) -> int:
    """Return how many nodes may be taken in the window of the cap."""
    resource = config.gpu_resource
    count = sum(not resource or node.allocatable.get(resource, 0.0) > 0 for node in nodes)
    # 0.1 * 30 is a little more than 3.
    return min(config.max_nodes, math.ceil(config.max_node_share * count - 1e-9))


def standing_refusals(situation: Situation, breaker: Breaker) -> list[str]:
    """Return what forbids every action, also going on with one that was begun."""
    found = []
    if not situation.is_leader:
        found.append("this replica is not the leader")
    if breaker.is_open:
        found.append(f"the breaker is open: {breaker.reason}")
    if breaker.discards(situation.fired):
        found.append("the alert is older than the closing of the breaker allows")
    if is_exempt(situation.node):
        found.append(f"the node is exempt by its label {names.EXEMPT}")
    exempt = sorted(pod.name for pod in situation.pods if pod.is_exempt)
    if exempt:
        found.append(f"pods are exempt by their label {names.EXEMPT}: {', '.join(exempt)}")
    if situation.node.annotations.get(names.MANUAL_UNCORDON) == situation.alert_id:
        found.append("a human made the node schedulable again after this alert")
    return found


def refusals(
    situation: Situation, ledger: Ledger, breaker: Breaker, config: ActConfig
) -> list[str]:
    """Return what forbids taking the node, in words; empty when nothing does."""
    found = standing_refusals(situation, breaker)
    if situation.node.is_unschedulable:
        found.append("the node was cordoned by somebody else")
    found += _too_many(situation, ledger, config)
    if not config.allow_without_spare and not spares(situation):
        found.append("no other schedulable node fits the pods")
    return found


def cap_is_used_up(situation: Situation, ledger: Ledger, config: ActConfig) -> bool:
    """Tell whether the node is one more than the cap allows, which opens the breaker."""
    taken = ledger.recent(situation.now, config.cap_seconds)
    return len({entry.node for entry in taken}) >= cap(situation.nodes, config)


def _too_many(situation: Situation, ledger: Ledger, config: ActConfig) -> list[str]:
    now, found = situation.now, []
    limits = (
        (config.nodes_per_job, config.job_seconds, situation.job, "of this job"),
        (config.nodes_per_cluster, config.cluster_seconds, None, "of the cluster"),
        (1, config.spacing_seconds, None, "of the cluster"),
        (cap(situation.nodes, config), config.cap_seconds, None, "of the cluster"),
    )
    for limit, window, job, whose in limits:
        taken = {entry.node for entry in ledger.recent(now, window, job)}
        if len(taken) >= limit:
            found.append(f"{len(taken)} of at most {limit} nodes {whose} were taken in {window} s")
    return list(dict.fromkeys(found))


def spares(situation: Situation) -> list[str]:
    """Return the other nodes that could take all the pods at once."""
    wanted: dict[str, float] = {}
    for pod in situation.pods:
        for name, amount in pod.requests.items():
            wanted[name] = wanted.get(name, 0.0) + amount
    return [
        node.name
        for node in situation.nodes
        if node.name != situation.node.name
        and not node.is_unschedulable
        and node.is_ready
        and all(_admits(node, pod) for pod in situation.pods)
        and _holds(node, situation.used.get(node.name, {}), wanted)
    ]


def _holds(node: NodeInfo, used: Mapping[str, float], wanted: Mapping[str, float]) -> bool:
    return all(
        amount <= node.allocatable.get(name, 0.0) - used.get(name, 0.0) + 1e-9
        for name, amount in wanted.items()
        if amount and not (name == "pods" and name not in node.allocatable)
    )


def _admits(node: NodeInfo, pod: PodInfo) -> bool:
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
