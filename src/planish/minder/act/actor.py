"""What is done about a faulty machine, and what is not.

`Actor.handle` is called after every call of a job for each of its alerts, from the first to the
last. It takes at most one step and never waits. It may be called again at any time, also by a
process that knows nothing of the steps before: annotations of the node record them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planish.base.errors import ClusterError
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig, Mode
from planish.minder.act.drain import Evictions, cordon, evict_round, mark, release
from planish.minder.act.guards import Taken, cordoned, limit_refusals, standing_refusals
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.events import EventBook
from planish.minder.act.kube.objects import (
    JobInfo,
    NodeInfo,
    PodInfo,
    group_jobs,
    pods_on,
    timestamp,
)
from planish.minder.act.notify import MAX_HISTORY, Notifier
from planish.minder.detect.result import Result

logger = logging.getLogger(__name__)

Action = Literal["none", "mark", "cordon", "evict", "uncordon"]
ActionResult = Literal[
    "none", "done", "dry_run", "refused", "waiting", "blocked", "failed", "forbidden"
]
ACTIONS: dict[Mode, Action] = {
    "observe": "none",
    "mark": "mark",
    "cordon": "cordon",
    "evict": "evict",
}
"""The strongest action of each mode, the weakest mode first."""
FORBIDDEN = 403
FRESH_SECONDS = 180
"""A result whose last second is older leads to no action."""
_KEEP_SECONDS = 86_400
"""How long nodes that were taken are remembered."""
_LOST_SECONDS = 3600
"""Seconds after which an alert that no call repeats is dropped."""


@dataclass(frozen=True)
class ActionOutcome:
    """What was done about one alert."""

    action: Action
    """What was wanted."""
    result: ActionResult
    """done: all of it. waiting: for a second call, or for pods that a budget holds back; call
    again. blocked: those pods were given up. refused: by a guard. forbidden: the API server
    answered 403."""
    detail: str = ""
    has_changed: bool = True
    """It differs from the last outcome of this alert: count and log it only then."""


@dataclass
class Memory:
    """What this actor knows of one alert."""

    alert: Alert
    first_end: int
    """Last second of the first result that came with it."""
    handled: float = 0.0
    """Unix seconds of the last `handle`."""
    last: ActionOutcome | None = None
    is_finished: bool = False
    """Nothing is left to do."""
    job: JobInfo | None = None
    """As last seen: a job that has ended still gets the end of its alerts."""
    pods: Sequence[PodInfo] = ()
    """Of the namespace, as last seen."""
    evictions: Evictions = field(default_factory=Evictions)
    history: list[dict[str, Any]] = field(default_factory=list)
    """What was reported: second, state and action."""


class Actor:
    """Acts on faulty machines as far as configuration, namespaces and guards allow."""

    def __init__(
        self,
        cluster: Cluster,
        config: ActConfig,
        *,
        is_leader: Callable[[], bool] = lambda: True,
        is_silenced: Callable[[Alert], bool] = lambda alert: False,
    ) -> None:
        """Begin with nothing done.

        `is_leader` says whether this replica may act now, `is_silenced` whether people have
        silenced an alert; when it raises, nothing is done.
        """
        self.cluster, self.config = cluster, config
        self.events = EventBook(cluster)
        self.forbidden = ""
        """Answer of the API server when it refused a right; from then on nothing is done."""
        self._notifier = Notifier(cluster, self.events)
        self._is_leader, self._is_silenced = is_leader, is_silenced
        self._memory: dict[str, Memory] = {}
        self._taken: list[Taken] = []
        """Nodes that this process has taken, or would have taken but for the dry run."""
        self._lock = threading.Lock()

    @property
    def mode(self) -> Mode:
        """The strongest action that is allowed anywhere now."""
        return "observe" if self.forbidden else self.config.mode

    def handle(self, alert: Alert, result: Result, now: int) -> ActionOutcome:
        """Take the next step for an alert, given the newest result of its job."""
        with self._lock:
            memory = self._memory.setdefault(alert.id, Memory(alert, result.end))
            memory.alert, memory.handled = alert, now
            if memory.last is not None and memory.is_finished and not alert.ended:
                return replace(memory.last, has_changed=False)
            try:
                memory.pods = self.cluster.pods(alert.job.partition("/")[0])
                job = next((job for job in group_jobs(memory.pods) if job.key == alert.job), None)
                memory.job = job or memory.job
                if alert.ended and alert.machine:
                    self._unmark(alert, now)
                outcome = self._step(memory, job, result, now)
            except ClusterError as error:
                outcome = self._failed(error)
            has_changed = outcome != memory.last
            if has_changed or alert.ended:
                action = f"{outcome.action} {outcome.result}: {outcome.detail}"
                action = "" if outcome.action == "none" else action
                report = {"second": now, "state": alert.state, "action": action}
                memory.history = [*memory.history, report][-MAX_HISTORY:]
                planned = outcome.detail if outcome.result == "dry_run" else ""
                self._notifier.report(alert, memory.job, memory.history, planned, now)
            memory.last = outcome
            if alert.ended:
                del self._memory[alert.id]
            return replace(outcome, has_changed=has_changed)

    def reconcile(self, now: int) -> list[tuple[str, ActionOutcome]]:
        """Follow what humans did to cordoned nodes; return machine and outcome of each change."""
        with self._lock:
            self._taken = [taken for taken in self._taken if taken.time >= now - _KEEP_SECONDS]
            self._memory = {
                key: memory
                for key, memory in self._memory.items()
                if memory.handled >= now - _LOST_SECONDS
            }
            if self.mode == "observe" or not self._is_leader():
                return []
            done: list[tuple[str, ActionOutcome]] = []
            try:
                for node in self.cluster.nodes():
                    if node.was_uncordoned:
                        done.append((node.name, self._give_up(node, now)))
            except ClusterError as error:
                done.append(("", self._failed(error)))
            return done

    def _step(self, memory: Memory, job: JobInfo | None, result: Result, now: int) -> ActionOutcome:
        """Find the strongest action that is allowed now, and do it on the machine."""
        alert, age = memory.alert, now - result.end
        if alert.ended or alert.kind in ("outage", "broken"):
            return ActionOutcome("none", "none", f"{alert.kind} {alert.state}")
        if alert.kind == "job_wide":
            return ActionOutcome("none", "refused", "an event of the whole job")
        if self.mode == "observe":
            return ActionOutcome("none", "none", self.forbidden or "observed only")
        if job is None or alert.machine not in job.machines:
            return ActionOutcome("none", "refused", "the machine does not work for the job now")
        allowed = "observe" if job.is_observed_only else self.cluster.opted_in(job.namespace)
        action = ACTIONS[min(self.mode, allowed, key=list(ACTIONS).index)]
        if action == "none":
            return ActionOutcome("none", "none", "the namespace or the job allows no action")
        if age > FRESH_SECONDS:
            return ActionOutcome(action, "refused", f"the last second seen is {age} s old")
        if all(finding.machine != alert.machine for finding in result.findings):
            return ActionOutcome(action, "refused", "the newest call does not confirm the machine")
        if result.end <= memory.first_end:
            return ActionOutcome(action, "waiting", "for a second call that confirms the machine")
        return self._act(memory, job, action, now)

    def _act(self, memory: Memory, job: JobInfo, action: Action, now: int) -> ActionOutcome:
        """Do what is allowed, unless a guard refuses."""
        alert, node = memory.alert, self.cluster.node(memory.alert.machine)
        there = pods_on(memory.pods, job, node.name)
        if node.was_uncordoned:
            return self._give_up(node, now)
        refused = self._refusals(alert, job, node, there, now)
        if refused:
            return ActionOutcome(action, "refused", "; ".join(refused))
        plan = f"{'mark' if action == 'mark' else 'cordon'} {node.name}"
        if action == "evict":
            leaving = sorted(pod.name for pod in there if pod.is_evictable)
            plan += f" and evict {', '.join(leaving) or 'no pod'}"
        if self.config.dry_run or not node.is_ours:
            is_done = self.config.dry_run or action == "mark" or self._cordon(alert, job, node, now)
            if not is_done:
                return ActionOutcome(action, "refused", "somebody else cordoned the node just now")
            # Limits count what a dry run would have done: it shows what would really happen.
            self._taken.append(Taken(float(now), job.full_name, node.name))
        if not self.config.dry_run:
            kind = "".join(word.capitalize() for word in alert.kind.split("_"))
            mark(self.cluster, self.cluster.node(node.name), kind, _told(alert), now)
        if self.config.dry_run or action in ("mark", "cordon"):
            memory.is_finished = True
            return ActionOutcome(action, "dry_run" if self.config.dry_run else "done", plan)
        return self._evict(memory, there, plan, now)

    def _cordon(self, alert: Alert, job: JobInfo, node: NodeInfo, now: int) -> bool:
        reason = f"{alert.kind} {alert.metric}".strip()
        if not cordon(self.cluster, node, alert.id, job.full_name, reason, now):
            return False
        logger.info("cordoned machine=%s alert=%s", node.name, alert.id)
        message = f"cordoned: {reason}, alert {alert.id} of job {job.full_name}"
        self.events.note(node, names.CORDONED, message, now)
        return True

    def _unmark(self, alert: Alert, now: int) -> None:
        """Say that a machine is no longer faulty where this very alert has said that it is."""
        if self.mode == "observe" or self.config.dry_run or not self._is_leader():
            return
        node = self.cluster.node(alert.machine)
        if node.condition(names.FAULTY_MACHINE).get("message") == _told(alert):
            mark(self.cluster, node, "", alert.ended, now)

    def _refusals(
        self, alert: Alert, job: JobInfo, node: NodeInfo, pods: Sequence[PodInfo], now: int
    ) -> list[str]:
        """Return the reasons of all guards that refuse."""
        reasons = [] if self._is_leader() else ["this replica is not the leader"]
        try:
            if self._is_silenced(alert):
                reasons.append("a silence matches the alert")
        except Exception as error:
            # As long as this is not known, the alert counts as silenced.
            reasons.append(f"it is not known whether a silence matches the alert: {error}")
        reasons += standing_refusals(alert.id, node, pods)
        if not node.is_ours:
            if node.is_unschedulable:
                reasons.append("the node was cordoned by somebody else")
            nodes = self.cluster.nodes()
            taken = [*self._taken, *cordoned(nodes)]
            reasons += limit_refusals(job.full_name, taken, nodes, now, self.config)
        return reasons

    def _evict(self, memory: Memory, pods: Sequence[PodInfo], plan: str, now: int) -> ActionOutcome:
        done = evict_round(self.cluster, pods, memory.evictions, now)
        for pod in done.evicted:
            logger.info("evicted pod=%s machine=%s", pod.name, pod.machine)
            message = f"evicted from {pod.machine}: alert {memory.alert.id}"
            self.events.note(pod, names.FAULTY_MACHINE, message, now)
        for pod in done.given_up:
            message = f"a disruption budget kept the pod on the faulty machine {pod.machine}"
            self.events.note(pod, names.EVICTION_BLOCKED, message, now)
        if done.num_waiting:
            return ActionOutcome("evict", "waiting", f"budgets hold back {done.num_waiting} pods")
        memory.is_finished = True
        given_up = len(memory.evictions.given_up)
        if given_up:
            return ActionOutcome("evict", "blocked", f"{given_up} pods were given up")
        return ActionOutcome("evict", "done", plan)

    def _give_up(self, node: NodeInfo, now: int) -> ActionOutcome:
        """Take back what the cordon left on a node that a human made schedulable again."""
        detail = "a human made the node schedulable again"
        if self.config.dry_run:
            return ActionOutcome("uncordon", "dry_run", detail)
        release(self.cluster, node)
        mark(self.cluster, self.cluster.node(node.name), "", detail, now)
        logger.info("given up machine=%s", node.name)
        return ActionOutcome("uncordon", "refused", detail)

    def _failed(self, error: ClusterError) -> ActionOutcome:
        if error.status != FORBIDDEN:
            return ActionOutcome("none", "failed", str(error))
        self.forbidden = f"observed only, since a right is missing: {error}"
        logger.error("right missing, everything is only observed from now on error=%s", error)
        return ActionOutcome("none", "forbidden", self.forbidden)


def _told(alert: Alert) -> str:
    """Return what the condition of a node says of an alert."""
    what = f"{alert.kind} {alert.metric}".strip()
    return f"{what} in {alert.job} since {timestamp(alert.since)}, alert {alert.id}"
