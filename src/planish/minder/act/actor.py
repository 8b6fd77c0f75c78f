"""What is done about a faulty machine, and what is not.

`Actor.handle` is called after every call of a job for each of its alerts, from the first candidate
to the end. It takes at most one step and never waits. It may be called again at any time, also by
a process that knows nothing of the steps before: annotations of the node record them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from planish.base.errors import ClusterError
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig, Mode
from planish.minder.act.drain import (
    Attempt,
    Evictions,
    change_node,
    cordon_change,
    evict_round,
    is_ours,
    release_change,
    was_uncordoned,
)
from planish.minder.act.guards import (
    Breaker,
    Ledger,
    Situation,
    Taken,
    cap_is_used_up,
    refusals,
    standing_refusals,
)
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.events import EventBook
from planish.minder.act.kube.objects import JobInfo, NodeInfo, PodInfo, group_jobs, pods_on
from planish.minder.act.notify import Notifier, RunTable
from planish.minder.detect.result import Result

logger = logging.getLogger(__name__)

Action = Literal["none", "cordon", "evict", "uncordon"]
ActionResult = Literal[
    "none", "done", "dry_run", "refused", "waiting", "blocked", "failed", "forbidden"
]
ACTIONS: dict[Mode, Action] = {"observe": "none", "cordon": "cordon", "evict": "evict"}
"""The strongest action of each mode, the weakest mode first."""
FORBIDDEN = 403
KEEP_SECONDS = 86_400
"""How long nodes that were taken, and Events, are remembered."""
LOST_SECONDS = 3600
"""Seconds after which an alert that no call repeats is dropped."""
MAX_SAVED = 500
"""Alerts that outlive a restart; for others, annotations of the node record the steps."""


@dataclass(frozen=True)
class ActionOutcome:
    """What was done about one alert.

    Example:
        >>> ActionOutcome("cordon", "refused", "breaker is open").is_suppressed
        True
    """

    action: Action
    """What was wanted."""
    result: ActionResult
    """done: all of it. waiting: for a second call, or for pods that a budget holds back; call
    again. blocked: those pods were given up. refused: by a guard. forbidden: the API server
    answered 403."""
    detail: str = ""
    """Why, in words."""
    has_changed: bool = True
    """It differs from the last outcome of this alert: count and log it only then."""

    @property
    def is_suppressed(self) -> bool:
        """Whether nothing is done about the alert for now."""
        return self.result in ("refused", "dry_run", "forbidden", "failed")


@dataclass
class Memory:
    """What this actor knows of one alert."""

    first_end: int
    """Last second of the first result that came with it."""
    handled: float = 0.0
    """Unix seconds of the last `handle`."""
    state: str = ""
    """State of the alert then."""
    last: ActionOutcome | None = None
    """The last outcome."""
    is_finished: bool = False
    """Nothing is left to do."""
    has_opened: bool = False
    """It has opened the breaker, which it does only once."""
    evictions: Evictions = field(default_factory=Evictions)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Memory:
        """Return what `asdict` was given."""
        evictions = Evictions(**raw["evictions"])
        attempts = raw["evictions"]["attempts"].items()
        evictions.attempts = {uid: Attempt(**attempt) for uid, attempt in attempts}
        last = ActionOutcome(**raw["last"]) if raw["last"] else None
        return cls(**{**raw, "evictions": evictions, "last": last})


@dataclass(frozen=True)
class _Target:
    """The machine of an alert as the API server has it, and the strongest action allowed."""

    job: JobInfo
    pods: tuple[PodInfo, ...]
    """Pods of the job on the machine that have not ended, of all its roles."""
    node: NodeInfo
    action: Action
    """The strongest action that is allowed."""

    @property
    def plan(self) -> str:
        """What is done to the node, in words."""
        if self.action == "cordon":
            return f"cordon {self.node.name}"
        pods = sorted(pod.name for pod in self.pods if pod.is_evictable)
        return f"cordon {self.node.name} and evict {', '.join(pods) or 'no pod'}"


class Actor:
    """Acts on faulty machines as far as configuration, namespaces and guards allow."""

    def __init__(
        self,
        cluster: Cluster,
        config: ActConfig,
        *,
        is_leader: Callable[[], bool] = lambda: True,
        is_silenced: Callable[[Alert], bool] = lambda alert: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with nothing done.

        Args:
            cluster: the API server; this actor counts its failed requests.
            config: modes, guards, breaker.
            is_leader: whether this replica may act now.
            is_silenced: whether people have silenced an alert; when it raises, nothing is done.
            clock: unix seconds, for the times of requests.
        """
        self.cluster, self.config = cluster, config
        self.breaker = Breaker(config)
        self.ledger = Ledger()
        self.events = EventBook(cluster, config.event_seconds)
        self.table = RunTable(cluster.config)
        self.forbidden = ""
        """Answer of the API server when it refused a right; from then on nothing is done."""
        self._notifier = Notifier(cluster, self.events, self.table)
        self._is_leader, self._is_silenced = is_leader, is_silenced
        self._memory: dict[str, Memory] = {}
        self._jobs: dict[str, JobInfo | None] = {}
        self._lock = threading.Lock()

        def count_request(succeeded: bool) -> None:
            self.breaker.record(succeeded, clock())

        cluster.listener = count_request

    @property
    def mode(self) -> Mode:
        """The strongest action that is allowed anywhere now."""
        return "observe" if self.forbidden else self.config.mode

    def jobs(self, now: int) -> list[JobInfo]:
        """Return the jobs that run now, and remember which pod of which run is where.

        Raises:
            ClusterError: the API server refused or does not answer.
        """
        jobs = self.cluster.jobs()
        with self._lock:
            self.table.update(jobs, now)
        return jobs

    def handle(self, alert: Alert, result: Result, now: int) -> ActionOutcome:
        """Take the next step for an alert, given the newest result of its job."""
        with self._lock:
            memory = self._memory.setdefault(alert.id, Memory(result.end))
            memory.handled = now
            if memory.last is not None and memory.is_finished and alert.state != "resolved":
                return replace(memory.last, has_changed=False)
            job: JobInfo | None = None
            pods: list[PodInfo] = []
            try:
                # Candidates are many and nothing is done about them.
                if alert.state != "candidate":
                    namespace = alert.job.partition("/")[0]
                    pods = self.cluster.pods(namespace)
                    jobs = group_jobs(pods)
                    self.table.update(jobs, now, namespace)
                    job = next((job for job in jobs if job.key == alert.job), None)
                outcome = self._step(alert, result, now, memory, job, pods)
            except ClusterError as error:
                outcome = self._failed(error)
            outcome = replace(outcome, has_changed=outcome != memory.last)
            # The last known job is kept: a job that has ended still gets the end of its alerts.
            job = self._jobs[alert.id] = job or self._jobs.get(alert.id)
            if outcome.has_changed or alert.state != memory.state:
                action = f"{outcome.action} {outcome.result}: {outcome.detail}"
                self._notifier.report(
                    alert,
                    job,
                    action="" if outcome.action == "none" else action,
                    dry_run=outcome.detail if outcome.result == "dry_run" else "",
                    breaker=self.breaker.reason,
                    now=now,
                )
            memory.last, memory.state = replace(outcome, has_changed=True), alert.state
            if alert.state == "resolved":
                self._drop(alert.id)
            return outcome

    def reconcile(self, now: int) -> list[tuple[str, ActionOutcome]]:
        """Follow what humans did to cordoned nodes; call it once a minute.

        Returns:
            Machine and outcome for each node that changed.
        """
        with self._lock:
            self.ledger.forget(now - KEEP_SECONDS)
            self.events.forget(now - KEEP_SECONDS)
            for alert_id, memory in list(self._memory.items()):
                if memory.handled < now - LOST_SECONDS:
                    self._drop(alert_id)
            done: list[tuple[str, ActionOutcome]] = []
            if self.mode == "observe" or not self._is_leader():
                return done
            try:
                for node in self.cluster.nodes():
                    if was_uncordoned(node, self.config):
                        done.append((node.name, self._give_up(node)))
            except ClusterError as error:
                done.append(("", self._failed(error)))
            return done

    def close_breaker(self, now: float) -> None:
        """Close the breaker at the request of a human."""
        logger.info("breaker closed time=%.0f reason=%r", now, self.breaker.reason)
        self.breaker.close(now)

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive a restart, in well under the size of a ConfigMap."""
        newest = sorted(self._memory.items(), key=lambda item: (item[1].handled, item[0]))
        return {
            "breaker": self.breaker.to_json(),
            "taken": [asdict(entry) for entry in self.ledger.entries],
            "events": self.events.to_json(),
            "alerts": {key: asdict(memory) for key, memory in newest[-MAX_SAVED:]},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved; a right that was refused is tried again."""
        self.breaker = Breaker.from_json(self.config, state.get("breaker", {}))
        self.ledger = Ledger([Taken(**entry) for entry in state.get("taken", ())])
        self.events.load(state.get("events", {}))
        for key, raw in state.get("alerts", {}).items():
            self._memory[key] = Memory.from_json(raw)

    def _step(
        self,
        alert: Alert,
        result: Result,
        now: int,
        memory: Memory,
        job: JobInfo | None,
        pods: list[PodInfo],
    ) -> ActionOutcome:
        """Decide whether anything may be done now; if so, do it."""
        if alert.state in ("candidate", "resolved") or alert.kind in ("outage", "broken"):
            return ActionOutcome("none", "none", f"{alert.kind} {alert.state}")
        if alert.kind == "job_wide":
            if not memory.has_opened:
                memory.has_opened = True
                self.breaker.open(f"the whole job {alert.job} is unlike itself", now)
            return ActionOutcome("none", "refused", "an event of the whole job")
        if self.mode == "observe":
            return ActionOutcome("none", "none", self.forbidden or "observed only")
        if job is None or alert.machine not in job.machines:
            return ActionOutcome("none", "refused", "the machine does not work for the job now")
        allowed = "observe" if job.is_observed_only else self.cluster.opted_in(job.namespace)
        action = ACTIONS[min(self.mode, allowed, key=list(ACTIONS).index)]
        if action == "none":
            return ActionOutcome("none", "none", "the namespace or the job allows no action")
        age = now - result.end
        if age > self.config.fresh_seconds:
            return ActionOutcome(action, "refused", f"the last second seen is {age} s old")
        if all(finding.machine != alert.machine for finding in result.findings):
            return ActionOutcome(action, "refused", "the newest call does not confirm the machine")
        if self.config.recheck and result.end <= memory.first_end:
            return ActionOutcome(action, "waiting", "for a second call that confirms the machine")
        node = self.cluster.node(alert.machine)
        target = _Target(job, pods_on(pods, job, alert.machine), node, action)
        return self._act(alert, now, memory, target)

    def _act(self, alert: Alert, now: int, memory: Memory, target: _Target) -> ActionOutcome:
        """Do what is allowed, unless a guard refuses."""
        action, node = target.action, target.node
        if was_uncordoned(node, self.config):
            return self._give_up(node)
        refused = self._refused(alert, now, target)
        if refused:
            return ActionOutcome(action, "refused", "; ".join(refused))
        if self.config.dry_run:
            # Caps count what would have been done: a dry run shows what would really happen.
            self.ledger.add(Taken(float(now), target.job.full_name, node.name))
            memory.is_finished = True
            return ActionOutcome(action, "dry_run", target.plan)
        if not is_ours(node, self.config) and not self._cordon(alert, now, target):
            return ActionOutcome(action, "refused", "somebody else cordoned the node just now")
        return self._evict(alert, now, memory, target)

    def _refused(self, alert: Alert, now: int, target: _Target) -> list[str]:
        """Return the reasons of all guards that refuse; open the breaker when the cap does."""
        try:
            if self._is_silenced(alert):
                return ["a silence matches the alert"]
        except Exception as error:
            # As long as this is not known, the alert counts as silenced.
            return [f"it is not known whether a silence matches the alert: {error}"]
        has_begun = is_ours(target.node, self.config)
        nodes = [] if has_begun else self.cluster.nodes()
        situation = Situation(
            alert_id=alert.id,
            fired=alert.fired,
            job=target.job.full_name,
            node=target.node,
            pods=target.pods,
            nodes=nodes,
            used={} if has_begun else self.cluster.used(),
            is_leader=self._is_leader(),
            now=now,
        )
        if has_begun:
            return standing_refusals(situation, self.breaker)
        self.ledger.learn(nodes, self.config.owner)
        reasons = refusals(situation, self.ledger, self.breaker, self.config)
        if cap_is_used_up(situation, self.ledger, self.config):
            self.breaker.open("the cap of nodes is used up", now)
        return reasons

    def _cordon(self, alert: Alert, now: int, target: _Target) -> bool:
        """Cordon the node; return False when somebody else has."""
        job = target.job.full_name
        reason = f"{alert.kind} {alert.metric}".strip()

        def change(node: NodeInfo) -> dict[str, Any] | None:
            if node.is_unschedulable and not is_ours(node, self.config):
                return None
            return cordon_change(node, alert.id, job, reason, now=now, config=self.config)

        if change_node(self.cluster, target.node, change) is None:
            return False
        name = target.node.name
        self.ledger.add(Taken(float(now), job, name))
        logger.info("cordoned machine=%s alert=%s", name, alert.id)
        message = f"cordoned: {reason}, alert {alert.id} of job {job}"
        self.events.note(target.node, names.CORDONED, message, now)
        return True

    def _evict(self, alert: Alert, now: int, memory: Memory, target: _Target) -> ActionOutcome:
        """Evict the pods of the job, where more than the cordon is allowed."""
        if target.action == "cordon":
            memory.is_finished = True
            return ActionOutcome("cordon", "done", target.plan)
        state = memory.evictions
        done = evict_round(self.cluster, target.pods, state, now=now, config=self.config)
        for pod in done.evicted:
            logger.info("evicted pod=%s machine=%s", pod.name, pod.machine)
            message = f"evicted from {pod.machine}: alert {alert.id}"
            self.events.note(pod, names.FAULTY_MACHINE, message, now)
        for pod in done.blocked:
            message = f"a disruption budget kept the pod on the faulty machine {pod.machine}"
            self.events.note(pod, names.EVICTION_BLOCKED, message, now)
        if done.num_waiting:
            return ActionOutcome("evict", "waiting", f"budgets hold back {done.num_waiting} pods")
        memory.is_finished = True
        if state.given_up:
            return ActionOutcome("evict", "blocked", f"{len(state.given_up)} pods were given up")
        return ActionOutcome("evict", "done", target.plan)

    def _give_up(self, node: NodeInfo) -> ActionOutcome:
        """Take back what the cordon left on a node that a human made schedulable again."""
        detail = "a human made the node schedulable again"
        if self.config.dry_run:
            return ActionOutcome("uncordon", "dry_run", detail)

        def change(current: NodeInfo) -> dict[str, Any] | None:
            return release_change(current) if is_ours(current, self.config) else None

        change_node(self.cluster, node, change)
        logger.info("given up machine=%s", node.name)
        return ActionOutcome("uncordon", "refused", detail)

    def _failed(self, error: ClusterError) -> ActionOutcome:
        if error.status != FORBIDDEN:
            return ActionOutcome("none", "failed", str(error))
        self.forbidden = f"observed only, since a right is missing: {error}"
        logger.error("right missing, everything is only observed from now on error=%s", error)
        return ActionOutcome("none", "forbidden", self.forbidden)

    def _drop(self, alert_id: str) -> None:
        del self._memory[alert_id]
        self._jobs.pop(alert_id, None)
