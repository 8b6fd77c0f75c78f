"""Decision: what to do about an alert now, with every reason for and against it in one order.

Nothing here changes anything; `Actor` carries a plan out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from planish.minder.act.alerts import TELEMETRY, Alert
from planish.minder.act.config import ActConfig, Mode
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import (
    JobInfo,
    NodeInfo,
    PodInfo,
    group_jobs,
    is_set,
    pods_on,
    timestamp,
    unix_seconds,
)
from planish.minder.detect.result import Result

Action = Literal["none", "mark", "cordon", "evict", "uncordon"]
ActionResult = Literal[
    "none", "done", "dry_run", "refused", "waiting", "blocked", "failed", "forbidden"
]
Step = Literal["clear", "release", "cordon", "count", "mark", "evict"]
ACTIONS: dict[Mode, Action] = {
    "observe": "none",
    "mark": "mark",
    "cordon": "cordon",
    "evict": "evict",
}
"""The strongest action of each mode, the weakest mode first."""
FRESH_SECONDS = 180
"""Largest age of a result, in seconds, that can lead to an action."""


@dataclass(frozen=True)
class ActionOutcome:
    """Outcome of one step for an alert."""

    action: Action
    """The action that the modes allow."""
    result: ActionResult
    """Outcome of the action. done: complete. waiting: for a second call, or for pods that a
    disruption budget holds back; `handle` must be called again. blocked: those pods were given up.
    refused: by a guard. forbidden: the API server answered 403."""
    detail: str = ""
    has_changed: bool = True
    """True if the outcome differs from the last one of this alert; only then it is counted and
    logged."""

    @property
    def is_final(self) -> bool:
        """True if no step is left."""
        return self.action != "uncordon" and self.result in ("done", "dry_run", "blocked")


@dataclass(frozen=True)
class Taken:
    """A node that was taken out of service."""

    time: float
    """Unix seconds."""
    job: str
    """Namespace and name of the job that lost the node."""
    node: str


@dataclass
class Facts:
    """What a decision depends on. The API server and Alertmanager are read when the first reason
    needs them, so an early refusal costs no request of the reasons after it. The guards at the end
    are all asked, so that the refusal names every one that holds.
    """

    alert: Alert
    result: Result
    """The newest result of the job."""
    now: int
    first_end: int
    """Last second of the first result that named the alert."""
    config: ActConfig
    mode: Mode
    """The strongest mode that is allowed anywhere."""
    forbidden: str
    """Message of the API server when it refused a right; empty if it has not."""
    cluster: Cluster
    taken: Sequence[Taken]
    """Nodes that this process has cordoned or marked; in a dry run, nodes that it would have."""
    is_leader: Callable[[], bool]
    is_silenced: Callable[[Alert], bool]

    @cached_property
    def pods(self) -> list[PodInfo]:
        """Live pods of the job's namespace."""
        return self.cluster.pods(self.alert.job.partition("/")[0])

    @cached_property
    def job(self) -> JobInfo | None:
        """The job as it runs now."""
        return next((job for job in group_jobs(self.pods) if job.key == self.alert.job), None)

    def allowed(self, job: JobInfo) -> Action:
        """Return the strongest action that configuration, namespace and labels of pods allow."""
        own = "observe" if job.is_observed_only else self.cluster.opted_in(job.namespace)
        return ACTIONS[min(self.mode, own, key=list(ACTIONS).index)]

    @cached_property
    def node(self) -> NodeInfo:
        """The alert's machine."""
        return self.cluster.node(self.alert.machine)

    @property
    def has_condition(self) -> bool:
        """True if the node's condition is that of this alert."""
        message = self.node.condition(names.FAULTY_MACHINE).get("message")
        return bool(message == condition_message(self.alert))

    def silence(self) -> str:
        """Return the reason if people have silenced the alert, or if that cannot be known."""
        try:
            return "a silence matches the alert" if self.is_silenced(self.alert) else ""
        except Exception as error:
            # An alert whose silences can not be read counts as silenced.
            return f"it is not known whether a silence matches the alert: {error}"

    def used_up(self, job: JobInfo) -> list[str]:
        """Return a reason for each limit that is used up."""
        nodes = self.cluster.nodes()
        taken = [*self.taken, *cordoned(nodes)]
        return limit_refusals(job.full_name, taken, nodes, self.now, self.config)


@dataclass(frozen=True)
class Plan:
    """What to do about an alert: an outcome, and the steps that lead there."""

    action: Action
    result: ActionResult
    detail: str
    steps: tuple[Step, ...] = ()
    """Steps in order. `clear`: the node's condition says that the fault is over. `release`: the
    node loses taint and annotations of a cordon. `count`: the limits count the node as taken."""
    job: str = ""
    """Namespace and name of the job."""
    pods: tuple[PodInfo, ...] = ()
    """Pods of the job on the machine."""

    @property
    def outcome(self) -> ActionOutcome:
        """The outcome if every step succeeds."""
        return ActionOutcome(self.action, self.result, self.detail)


def decide(alert: Alert, facts: Facts) -> Plan:
    """Return what to do about an alert now. The first reason that applies decides; guards of the
    node are all named at once.
    """
    config, mode = facts.config, facts.mode
    if alert.ended or alert.kind in TELEMETRY:
        is_over = alert.ended and alert.machine and mode != "observe" and not config.dry_run
        has_condition = is_over and facts.is_leader() and facts.has_condition
        detail = f"{alert.kind} {alert.state}"
        return Plan("none", "none", detail, ("clear",) if has_condition else ())
    if alert.kind == "job_wide":
        return Plan("none", "refused", "an event of the whole job")
    if mode == "observe":
        return Plan("none", "none", facts.forbidden or "observed only")
    job = facts.job
    if job is None or alert.machine not in job.machines:
        return Plan("none", "refused", "the machine does not work for the job now")
    action = facts.allowed(job)
    if action == "none":
        return Plan("none", "none", "the namespace or the job allows no action")
    age = facts.now - facts.result.end
    if age > FRESH_SECONDS:
        return Plan(action, "refused", f"the last second seen is {age} s old")
    if all(finding.machine != alert.machine for finding in facts.result.findings):
        return Plan(action, "refused", "the newest call does not confirm the machine")
    if facts.result.end <= facts.first_end:
        return Plan(action, "waiting", "for a second call that confirms the machine")
    node = facts.node
    if node.was_uncordoned:
        return handed_back(config)
    there = pods_on(facts.pods, job, node.name)
    exempt = sorted(pod.name for pod in there if pod.is_exempt)
    is_handed_back = node.annotations.get(names.MANUAL_UNCORDON) == alert.id
    is_theirs = node.is_unschedulable and not node.is_ours
    guards = [
        "" if facts.is_leader() else "this replica is not the leader",
        facts.silence(),
        f"the node is exempt by its label {names.EXEMPT}"
        if is_set(node.labels, names.EXEMPT)
        else "",
        f"pods are exempt by their label {names.EXEMPT}: {', '.join(exempt)}" if exempt else "",
        "a human made the node schedulable again after this alert" if is_handed_back else "",
        "the node was cordoned by somebody else" if is_theirs else "",
        # A node that is taken already takes nothing more from the limits.
        *([] if node.is_ours else facts.used_up(job)),
    ]
    if any(guards):
        return Plan(action, "refused", "; ".join(filter(None, guards)))
    leaving = ", ".join(sorted(pod.name for pod in there if pod.is_evictable))
    detail = f"{'mark' if action == 'mark' else 'cordon'} {node.name}"
    detail += f" and evict {leaving or 'no pod'}" if action == "evict" else ""
    if config.dry_run:
        # The limits count nodes of a dry run too, so it shows what a real run would do.
        return Plan(action, "dry_run", detail, ("count",), job.full_name)
    take: tuple[Step, ...] = ("count",) if action == "mark" else ("cordon", "count")
    act: tuple[Step, ...] = ("mark", "evict") if action == "evict" else ("mark",)
    steps = act if node.is_ours else take + act
    return Plan(action, "done", detail, steps, job.full_name, there)


def handed_back(config: ActConfig) -> Plan:
    """Return the plan for a node that a human made schedulable again."""
    detail = "a human made the node schedulable again"
    if config.dry_run:
        return Plan("uncordon", "dry_run", detail)
    return Plan("uncordon", "refused", detail, ("release",))


def condition_message(alert: Alert) -> str:
    """Return the message of the node's condition while an alert is open."""
    return f"{alert.cause} in {alert.job} since {timestamp(alert.since)}, alert {alert.id}"


def limit_refusals(
    job: str, taken: Collection[Taken], nodes: Sequence[NodeInfo], now: float, config: ActConfig
) -> list[str]:
    """Return a reason for each limit, of the job and of the cluster, that is used up.

    `taken` are all nodes that were taken out of service at any time; `nodes` are all nodes of the
    cluster.
    """
    resource = config.gpu_resource
    count = sum(not resource or node.allocatable.get(resource, "0") != "0" for node in nodes)
    # In floating point 0.1 * 30 is a little more than 3.
    share = math.ceil(config.max_node_share * count - 1e-9)
    limits = (
        (config.nodes_per_job, config.job_seconds, job, "of this job"),
        (min(config.nodes_per_cluster, share), config.cluster_seconds, "", "of the cluster"),
    )
    reasons = []
    for limit, window, of, whose in limits:
        lost = {t.node for t in taken if t.time > now - window and of in ("", t.job)}
        if len(lost) >= limit:
            reasons.append(f"{len(lost)} of at most {limit} nodes {whose} were taken in {window} s")
    return reasons


def cordoned(nodes: Sequence[NodeInfo]) -> list[Taken]:
    """Return the nodes that a monitor has cordoned, as their annotations say."""
    return [
        Taken(unix_seconds(notes.get(names.SINCE)), notes.get(names.JOB, ""), node.name)
        for node in nodes
        if (notes := node.annotations) and node.is_ours
    ]
