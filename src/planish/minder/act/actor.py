"""Actor: takes the allowed action on a faulty machine.

After every call for a job, the service calls `Actor.handle` for each of the job's alerts, until the
alert has ended. `handle` carries out one plan, and never waits for pods. It may be called again at
any time, also by a new process: annotations of the node record the earlier steps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig, Mode
from planish.minder.act.decide import (
    ActionOutcome,
    Facts,
    Plan,
    Taken,
    condition_message,
    decide,
    handed_back,
)
from planish.minder.act.drain import Evictions, cordon, evict_round, mark, release
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.events import EventBook
from planish.minder.act.kube.objects import JobInfo
from planish.minder.act.notify import MAX_HISTORY, Notifier
from planish.minder.detect.result import Result

logger = logging.getLogger(__name__)

FORBIDDEN = 403
_KEEP_SECONDS = 86_400
"""Seconds for which cordoned nodes are remembered."""
_LOST_SECONDS = 3600
"""Seconds after which an alert is dropped if no call repeats it."""


@dataclass
class Memory:
    """State of one alert in this actor."""

    first_end: int
    """Last second of the first result that named the alert."""
    handled: float = 0.0
    """Unix seconds of the last `handle`."""
    last: ActionOutcome | None = None
    job: JobInfo | None = None
    """The job when it was last seen; the end of an alert is reported also after the job has
    ended."""
    evictions: Evictions = field(default_factory=Evictions)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_HISTORY))
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
            memory = self._memory.setdefault(alert.id, Memory(result.end))
            memory.handled = now
            if memory.last is not None and memory.last.is_final and not alert.ended:
                return replace(memory.last, has_changed=False)
            facts = Facts(
                alert=alert,
                result=result,
                now=now,
                first_end=memory.first_end,
                config=self.config,
                mode=self.mode,
                forbidden=self.forbidden,
                cluster=self.cluster,
                taken=self._taken,
                is_leader=self._is_leader,
                is_silenced=self._is_silenced,
            )
            try:
                memory.job = facts.job or memory.job
                outcome = self._carry_out(decide(alert, facts), facts, memory.evictions)
            except ClusterError as error:
                outcome = self._failed(error)
            has_changed = outcome != memory.last
            if has_changed or alert.ended:
                action = f"{outcome.action} {outcome.result}: {outcome.detail}"
                action = "" if outcome.action == "none" else action
                memory.history.append({"second": now, "state": alert.state, "action": action})
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
            plan, done = handed_back(self.config), []
            try:
                for node in self.cluster.nodes():
                    if node.was_uncordoned:
                        if plan.steps:
                            release(self.cluster, node, plan.detail, now)
                        done.append((node.name, plan.outcome))
            except ClusterError as error:
                done.append(("", self._failed(error)))
            return done

    def _carry_out(self, plan: Plan, facts: Facts, evictions: Evictions) -> ActionOutcome:
        """Take the steps of a plan in order, and return the outcome."""
        cluster, alert, now = self.cluster, facts.alert, facts.now
        for step in plan.steps:
            if step == "clear":
                mark(cluster, facts.node, "", alert.ended, now)
            elif step == "release":
                release(cluster, facts.node, plan.detail, now)
            elif step == "cordon":
                if not cordon(cluster, facts.node, alert.id, plan.job, alert.cause, now):
                    detail = "somebody else cordoned the node just now"
                    return ActionOutcome(plan.action, "refused", detail)
                message = f"cordoned: {alert.cause}, alert {alert.id} of job {plan.job}"
                self.events.note(facts.node, names.CORDONED, message, now)
            elif step == "count":
                self._taken.append(Taken(float(now), plan.job, facts.node.name))
            elif step == "mark":
                kind = "".join(word.capitalize() for word in alert.kind.split("_"))
                fresh = cluster.node(alert.machine)
                mark(cluster, fresh, kind, condition_message(alert), now)
            elif step == "evict":
                return self._evict(plan, alert, evictions, now)
        return plan.outcome

    def _evict(self, plan: Plan, alert: Alert, evictions: Evictions, now: int) -> ActionOutcome:
        done = evict_round(self.cluster, plan.pods, evictions, now)
        for pod in done.evicted:
            message = f"evicted from {pod.machine}: alert {alert.id}"
            self.events.note(pod, names.FAULTY_MACHINE, message, now)
        for pod in done.given_up:
            message = f"a disruption budget kept the pod on the faulty machine {pod.machine}"
            self.events.note(pod, names.EVICTION_BLOCKED, message, now)
        if done.num_waiting:
            detail = f"budgets hold back {done.num_waiting} pods"
            return ActionOutcome("evict", "waiting", detail)
        given_up = len(evictions.given_up)
        if given_up:
            return ActionOutcome("evict", "blocked", f"{given_up} pods were given up")
        return plan.outcome

    def _failed(self, error: ClusterError) -> ActionOutcome:
        if error.status != FORBIDDEN:
            return ActionOutcome("none", "failed", str(error))
        self.forbidden = f"observed only, since a right is missing: {error}"
        logger.error("right missing, everything is only observed from now on error=%s", error)
        return ActionOutcome("none", "forbidden", self.forbidden)
