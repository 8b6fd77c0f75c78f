"""What is done about a faulty machine, and what is not.

`Actor.handle` is called after every call of a job for each of its alerts, from the first candidate
to the end. It does one step at most, never waits, and may be called again at any time, also by a
process that knows nothing of the steps before: annotations of the node tell them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.breaker import Breaker
from planish.minder.act.config import ActConfig, Mode
from planish.minder.act.guards import (
    Ledger,
    Situation,
    Taken,
    cap_is_used_up,
    refusals,
    standing_refusals,
)
from planish.minder.act.kube import names
from planish.minder.act.kube.client import Cluster
from planish.minder.act.kube.events import EventBook, Subject
from planish.minder.act.kube.jobs import group_jobs, pods_on
from planish.minder.act.kube.objects import JobInfo, NodeInfo, PodInfo
from planish.minder.act.news import News
from planish.minder.act.run_links import RunTable
from planish.minder.act.steps import (
    Memory,
    change_node,
    cordon_change,
    evict_round,
    is_ours,
    uncordon_change,
    was_uncordoned,
)
from planish.minder.act.types import ActedAlert, Action, Done, Facts, Outcome
from planish.minder.detect.result import Result

__all__ = ["ActedAlert", "Actor", "Outcome"]

logger = logging.getLogger(__name__)

ACTIONS: dict[Mode, Action] = {"observe": "none", "cordon": "cordon", "evict": "evict"}
"""What each mode does at most, the least first."""
FORBIDDEN = 403
GONE = 404
KEEP_SECONDS = 86_400
"""How long what was done is remembered."""
LOST_SECONDS = 3600
"""Seconds after which an alert that no call repeats is dropped."""
MAX_SAVED = 500
"""Alerts that outlive a restart; of another one, annotations of its node tell what was done."""


class Actor:
    """Acts on faulty machines as far as configuration, namespaces and guards allow."""

    def __init__(
        self,
        cluster: Cluster,
        config: ActConfig,
        *,
        is_leader: Callable[[], bool] = lambda: True,
        is_silenced: Callable[[ActedAlert], bool] = lambda alert: False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Begin with nothing done.

        Args:
            cluster: the API server; this actor counts its failed requests.
            config: modes, guards, breaker.
            is_leader: whether this replica may act now.
            is_silenced: whether people have silenced an alert; raising means that nobody can tell,
                and nothing is done.
            clock: unix seconds, for the times of requests.
        """
        self.cluster, self.config = cluster, config
        self.breaker = Breaker(config)
        self.ledger = Ledger()
        self.events = EventBook(cluster, config.event_seconds)
        self.table = RunTable(cluster.config)
        self.news = News(cluster, self.events, self.table)
        self.forbidden = ""
        """What the API server said when it refused a right; then everything is only observed."""
        self._is_leader, self._is_silenced = is_leader, is_silenced
        self._memory: dict[str, Memory] = {}
        self._jobs: dict[str, JobInfo | None] = {}
        self._lock = threading.Lock()
        cluster.listener = lambda succeeded: self._count(succeeded, clock())

    @property
    def mode(self) -> Mode:
        """The most that is done anywhere now."""
        return "observe" if self.forbidden else self.config.mode

    def jobs(self, now: int) -> list[JobInfo]:
        """Return the jobs that run now, and remember which pod of which run is where.

        Raises:
            ClusterError: the API server refused or does not answer.
        """
        found = self.cluster.jobs()
        with self._lock:
            self.table.update(found, now)
        return found

    def handle(self, alert: ActedAlert, result: Result, now: int) -> Outcome:
        """Do the next step for an alert, given the newest result of its job."""
        with self._lock:
            return self._handle(alert, result, now)

    def _handle(self, alert: ActedAlert, result: Result, now: int) -> Outcome:
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
                jobs = group_jobs(pods := self.cluster.pods(namespace))
                self.table.update(jobs, now, namespace)
                job = next((job for job in jobs if job.key == alert.job), None)
            outcome = self._step(alert, result, now, memory, job, pods)
        except ClusterError as error:
            outcome = self._failed(error)
        outcome = replace(outcome, has_changed=outcome != memory.last)
        # A job that has ended still hears how its alerts ended.
        job = self._jobs[alert.id] = job or self._jobs.get(alert.id)
        if outcome.has_changed or alert.state != memory.state:
            self.news.tell(alert, job, outcome, now, breaker=self.breaker.reason)
        memory.last, memory.state = replace(outcome, has_changed=True), alert.state
        if alert.state == "resolved":
            self._drop(alert.id)
        return outcome

    def reconcile(self, now: int) -> list[tuple[str, Outcome]]:
        """Look what humans and validators did to nodes of ours; call it once a minute.

        Returns:
            Machine and outcome for each node that changed.
        """
        with self._lock:
            return self._reconcile(now)

    def _reconcile(self, now: int) -> list[tuple[str, Outcome]]:
        done: list[tuple[str, Outcome]] = []
        self._forget(now)
        if self.mode == "observe" or not self._is_leader():
            return done
        key, _, value = self.config.auto_uncordon_after_validation.partition("=")
        try:
            for node in self.cluster.nodes():
                if was_uncordoned(node, self.config):
                    detail = "a human made the node schedulable again"
                    done.append((node.name, self._undo(node, detail, by_human=True)))
                elif is_ours(node, self.config) and key and node.labels.get(key) == value:
                    detail = f"validated by the label {key}={value}"
                    done.append((node.name, self._undo(node, detail, by_human=False)))
        except ClusterError as error:
            done.append(("", self._failed(error)))
        return done

    def undo(self, machine: str) -> Outcome:
        """Make a node schedulable again, if it was we who cordoned it."""
        try:
            node = self.cluster.node(machine)
            if not is_ours(node, self.config):
                return Outcome("uncordon", "refused", "we did not cordon the node")
            return self._undo(node, "on request", by_human=was_uncordoned(node, self.config))
        except ClusterError as error:
            return self._failed(error)

    def close_breaker(self, now: float) -> None:
        """Close the breaker because a human says so."""
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
        """Go on from what was saved; a right that was refused is asked for again."""
        self.breaker = Breaker.from_json(self.config, state.get("breaker", {}))
        self.ledger = Ledger([Taken(**entry) for entry in state.get("taken", ())])
        self.events.load(state.get("events", {}))
        for key, raw in state.get("alerts", {}).items():
            self._memory[key] = Memory.from_json(raw)

    def _step(
        self,
        alert: ActedAlert,
        result: Result,
        now: int,
        memory: Memory,
        job: JobInfo | None,
        pods: list[PodInfo],
    ) -> Outcome:
        if alert.state in ("candidate", "resolved") or alert.kind in ("outage", "broken"):
            return Outcome("none", "none", f"{alert.kind} {alert.state}")
        if alert.kind == "job_wide":
            if not memory.has_opened:
                memory.has_opened = True
                self._open(f"the whole job {alert.job} is unlike itself", now)
            return Outcome("none", "refused", "an event of the whole job")
        if self.mode == "observe":
            return Outcome("none", "none", self.forbidden or "observed only")
        if job is None or alert.machine not in job.machines:
            return Outcome("none", "refused", "the machine does not work for the job now")
        action = ACTIONS[min(self.mode, self._allowed(job), key=list(ACTIONS).index)]
        if action == "none":
            return Outcome("none", "none", "the namespace or the job allows no action")
        doubt = self._doubt(alert, result, now, memory)
        if doubt is not None:
            return replace(doubt, action=action)
        node = self.cluster.node(alert.machine)
        facts = Facts(job, pods_on(pods, job, alert.machine), node, action)
        return self._act(alert, now, memory, facts)

    def _allowed(self, job: JobInfo) -> Mode:
        if job.is_observed_only:
            return "observe"
        return self.cluster.opted_in(job.namespace)

    def _doubt(self, alert: ActedAlert, result: Result, now: int, memory: Memory) -> Outcome | None:
        """Return why the newest result is no reason to act; None when it is."""
        if now - result.end > self.config.fresh_seconds:
            return Outcome("none", "refused", f"the last second seen is {now - result.end} s old")
        if all(finding.machine != alert.machine for finding in result.findings):
            return Outcome("none", "refused", "the newest call does not confirm the machine")
        if self.config.recheck and result.end <= memory.first_end:
            return Outcome("none", "waiting", "for a second call that confirms the machine")
        return None

    def _act(self, alert: ActedAlert, now: int, memory: Memory, facts: Facts) -> Outcome:
        if was_uncordoned(facts.node, self.config):
            detail = "a human made the node schedulable again"
            return self._undo(facts.node, detail, by_human=True)
        refused = self._refused(alert, now, facts)
        if refused:
            return Outcome(facts.action, "refused", "; ".join(refused))
        if self.config.dry_run is True:
            # Caps count what would have been done: a dry run shows what would really happen.
            self.ledger.add(Taken(float(now), facts.job.full_name, facts.node.name))
            memory.is_finished = True
            return Outcome(facts.action, "dry_run", facts.plan)
        if not is_ours(facts.node, self.config) and not self._cordon(alert, now, facts):
            return Outcome(facts.action, "refused", "somebody else cordoned the node just now")
        if facts.action == "cordon":
            memory.is_finished = True
            return self._done(facts)
        return self._evict(alert, now, memory, facts)

    def _refused(self, alert: ActedAlert, now: int, facts: Facts) -> list[str]:
        """Return which guards refuse; open the breaker when the cap is one of them."""
        try:
            if self._is_silenced(alert):
                return ["a silence matches the alert"]
        except Exception as error:
            # Whoever can not be asked may have forbidden it.
            return [f"whether a silence matches the alert can not be told: {error}"]
        begun = is_ours(facts.node, self.config)
        nodes = [] if begun else self.cluster.nodes()
        situation = Situation(
            alert_id=alert.id,
            fired=alert.fired,
            job=facts.job.full_name,
            node=facts.node,
            pods=facts.pods,
            nodes=nodes,
            used={} if begun else self.cluster.used(),
            is_leader=self._is_leader(),
            now=now,
        )
        if begun:
            return standing_refusals(situation, self.breaker)
        self.ledger.learn(nodes, self.config.owner)
        found = refusals(situation, self.ledger, self.breaker, self.config)
        if cap_is_used_up(situation, self.ledger, self.config):
            self._open("the cap of nodes is used up", now)
        return found

    def _cordon(self, alert: ActedAlert, now: int, facts: Facts) -> bool:
        """Cordon the node; return False when somebody else has."""
        job = facts.job.full_name
        reason = f"{alert.kind} {alert.metric}".strip()

        def change(node: NodeInfo) -> dict[str, Any] | None:
            if node.is_unschedulable and not is_ours(node, self.config):
                return None
            return cordon_change(node, alert.id, job, reason, now=now, config=self.config)

        dry_run = self.config.dry_run == "server"
        done = change_node(self.cluster, facts.node, change, dry_run=dry_run)
        if done is None:
            return False
        self.ledger.add(Taken(float(now), job, facts.node.name))
        logger.info("cordoned machine=%s alert=%s dry_run=%s", facts.node.name, alert.id, dry_run)
        if not dry_run:
            message = f"cordoned: {reason}, alert {alert.id} of job {job}"
            self.events.note(Subject.of(facts.node), names.CORDONED, message, now)
        return True

    def _evict(self, alert: ActedAlert, now: int, memory: Memory, facts: Facts) -> Outcome:
        state = memory.evictions
        dry_run = self.config.dry_run == "server"
        done = evict_round(
            self.cluster, facts.pods, state, now=now, config=self.config, dry_run=dry_run
        )
        for pod in done.evicted:
            logger.info("evicted pod=%s machine=%s dry_run=%s", pod.name, pod.machine, dry_run)
            if not dry_run:
                message = f"evicted from {pod.machine}: alert {alert.id}"
                self.events.note(Subject.of(pod), names.FAULTY_MACHINE, message, now)
        for pod in done.blocked:
            message = f"a disruption budget kept the pod on the faulty machine {pod.machine}"
            self.events.note(Subject.of(pod), names.EVICTION_BLOCKED, message, now)
        if done.num_waiting:
            return Outcome("evict", "waiting", f"budgets hold back {done.num_waiting} pods")
        memory.is_finished = True
        if state.given_up:
            return Outcome("evict", "blocked", f"{len(state.given_up)} pods were given up")
        return self._done(facts)

    def _done(self, facts: Facts) -> Outcome:
        result: Done = "dry_run" if self.config.dry_run else "done"
        return Outcome(facts.action, result, facts.plan)

    def _undo(self, node: NodeInfo, detail: str, *, by_human: bool) -> Outcome:
        if self.config.dry_run is True:
            return Outcome("uncordon", "dry_run", detail)

        def change(current: NodeInfo) -> dict[str, Any] | None:
            if not is_ours(current, self.config):
                return None
            return uncordon_change(current, by_human=by_human)

        change_node(self.cluster, node, change, dry_run=self.config.dry_run == "server")
        logger.info("uncordoned machine=%s by_human=%s", node.name, by_human)
        return Outcome("uncordon", "refused" if by_human else "done", detail)

    def _failed(self, error: ClusterError) -> Outcome:
        if error.status != FORBIDDEN:
            return Outcome("none", "failed", str(error))
        self.forbidden = f"observed only, since a right is missing: {error}"
        logger.error("right missing, everything is only observed from now on error=%s", error)
        return Outcome("none", "forbidden", self.forbidden)

    def _open(self, reason: str, now: float) -> None:
        if self.breaker.open(reason, now):
            logger.error("breaker opened reason=%s", reason)

    def _count(self, succeeded: bool, now: float) -> None:
        if self.breaker.record(succeeded, now):
            logger.error("breaker opened reason=%s", self.breaker.reason)

    def _forget(self, now: int) -> None:
        self.ledger.forget(now - KEEP_SECONDS)
        self.events.forget(now - KEEP_SECONDS)
        for key, memory in list(self._memory.items()):
            if memory.handled < now - LOST_SECONDS:
                self._drop(key)

    def _drop(self, alert_id: str) -> None:
        del self._memory[alert_id]
        self._jobs.pop(alert_id, None)
