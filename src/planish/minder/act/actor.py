"""Actor: takes the allowed action on a faulty machine.

After every call for a job, the service calls `Actor.handle` for each of the job's alerts, until the
alert has ended. `handle` takes at most one step and never waits. It may be called again at any
time, also by a new process: annotations of the node record the earlier steps.
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
"""Largest age of a result, in seconds, that can lead to an action."""
_KEEP_SECONDS = 86_400
"""Seconds for which cordoned nodes are remembered."""
_LOST_SECONDS = 3600
"""Seconds after which an alert is dropped if no call repeats it."""


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


@dataclass
class Memory:
    """State of one alert in this actor."""

    alert: Alert
    first_end: int
    """Last second of the first result that named the alert."""
    handled: float = 0.0
    """Unix seconds of the last `handle`."""
    last: ActionOutcome | None = None
    is_finished: bool = False
    """True if no step is left."""
    job: JobInfo | None = None
    """The job when it was last seen; the end of an alert is reported also after the job has
    ended."""
    pods: Sequence[PodInfo] = ()
    """Pods of the job's namespace when they were last read."""
    evictions: Evictions = field(default_factory=Evictions)
    history: list[dict[str, Any]] = field(default_factory=list)
    """Reports of the alert: second, state and action."""


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
        """Start without alerts.

        `is_leader` returns whether this replica may act now. `is_silenced` returns whether people
        have silenced an alert; if it raises, the alert counts as silenced.
        """
        self.cluster, self.config = cluster, config
        self.events = EventBook(cluster)
        self.forbidden = ""
        """Message of the API server when it refused a right; the actor only observes from then
        on."""
        self._notifier = Notifier(cluster, self.events)
        self._is_leader, self._is_silenced = is_leader, is_silenced
        self._memory: dict[str, Memory] = {}
        self._taken: list[Taken] = []
        """Nodes that this process has cordoned or marked; in a dry run, nodes that it would
        have."""
        self._lock = threading.Lock()

    @property
    def mode(self) -> Mode:
        """The strongest mode that is allowed now, before namespaces and jobs restrict it."""
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
        """Clean up after humans who uncordoned nodes; return machine and outcome of each change."""
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
        """Find the strongest action that is allowed now, and take it on the machine."""
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
        """Take the action unless a guard refuses."""
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
            # The limits count nodes of a dry run too, so it shows what a real run would do.
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
        """Clear the node's condition if this alert has set it."""
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
            # An alert whose silences can not be read counts as silenced.
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
        """Remove taint and annotations from a node that a human made schedulable again."""
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
    """Return the message for the node's condition."""
    what = f"{alert.kind} {alert.metric}".strip()
    return f"{what} in {alert.job} since {timestamp(alert.since)}, alert {alert.id}"
