"""One watched job: a call pulls its metrics, detects, updates alerts and lets the actor act.

The result of a call takes effect completely or not at all. No step begins after the program has
received SIGTERM.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import BackendUnavailable, ClusterError, PlanishError
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert, AlertBook
from planish.minder.act.decide import ActionOutcome
from planish.minder.act.kube.objects import JobInfo, PodInfo
from planish.minder.detect.denoise import Models
from planish.minder.detect.detector import Detector
from planish.minder.detect.frame import Frame
from planish.minder.detect.job_monitor import JobMonitor, of_last_day, too_few_machines
from planish.minder.detect.preprocess import MIN_KNOWN_SHARE
from planish.minder.detect.result import Result
from planish.minder.service.config import ServiceSettings
from planish.minder.service.evidence import confirmed, silent_machines, suspects
from planish.minder.service.http import Deadline
from planish.minder.service.own_metrics import OwnMetrics
from planish.minder.service.prometheus import REFUSED
from planish.minder.service.pull import Puller

logger = logging.getLogger(__name__)


@dataclass
class Shared:
    """Settings, models and state that the watches of all jobs share."""

    settings: ServiceSettings
    models: Models
    metrics: OwnMetrics
    actor: Actor | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the program ends."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held by the job whose result takes effect, until the actor has acted on it."""
    clock: Callable[[], float] = time.monotonic
    has_succeeded: threading.Event = field(default_factory=threading.Event)
    """Set by the first successful call."""
    suspects: Mapping[str, int] = field(default_factory=dict)
    """Map from machine to the unix second at which a job named it last."""
    lacking: set[str] = field(default_factory=set)
    """Metrics that had no sample in some job; each is logged once in all."""

    def count_action(self, outcome: ActionOutcome) -> None:
        """Count an action of the actor in the metrics of the monitor."""
        act = self.settings.act
        dry_run = act.dry_run or act.mode == "observe"
        self.metrics.count("actions", outcome.action, outcome.result, str(dry_run).lower())


class JobWatch:
    """Watches one job over many calls."""

    def __init__(
        self,
        info: JobInfo,
        source: Puller,
        shared: Shared,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Start, or continue from the state of an earlier process unless that is damaged."""
        self.info = info
        self.job = info.key
        self._source, self._shared = source, shared
        self._failures = 0
        self._ahead = time.time() - shared.clock()
        self._detector = Detector(shared.models, shared.settings)
        self._said: set[str] = set()
        self.monitor, self.book = self._restored(state or {"alerts": {"open": []}})
        self.last: Result | None = None
        """Result of the last call."""
        self.is_changed = False
        """True if an alert has begun or ended since the last save."""
        self.is_over = False
        """True once the job is no longer watched; a running call must then have no effect."""

    def _restored(self, state: Mapping[str, Any]) -> tuple[JobMonitor, AlertBook]:
        config, models, detector = self._shared.settings, self._shared.models, self._detector
        window = config.service.window_seconds
        monitor = JobMonitor(self.job, models, config, detector=detector)
        try:
            book = AlertBook.from_json(window, state["alerts"])
            if "monitor" in state:
                learnt = state["monitor"]
                monitor = JobMonitor.from_json(learnt, models, config, detector=detector)
            return monitor, book
        except (PlanishError, KeyError, TypeError, ValueError, AttributeError) as error:
            logger.warning("state_of_job_lost job=%s reason=%r", self.job, str(error)[:200])
        return monitor, AlertBook(window)

    def now(self) -> float:
        """Return the estimated time of Prometheus: its last time plus our monotonic clock since."""
        return self._shared.clock() + self._ahead

    def call(self) -> float:
        """Make one call, and return the seconds until the next one. A failed call ends no alert."""
        begun = self._shared.clock()
        config = self._shared.settings.service
        deadline = Deadline.after(config.call_timeout_seconds, self._shared.stop)
        try:
            self._look(deadline, config.window_seconds)
        except BackendUnavailable as error:
            if error.code == "stopped":
                return float(config.interval_seconds)
            return self._failed(error)
        if self._failures:
            logger.info("call_works_again job=%s failures=%d", self.job, self._failures)
        self._failures = 0
        spent = self._shared.clock() - begun
        self._shared.metrics.took("total", spent)
        return max(0.0, config.interval_seconds - spent)

    def _look(self, deadline: Deadline, window_seconds: int) -> None:
        shared, info = self._shared, self.info
        few = too_few_machines(self.job, info.machines, shared.settings)
        if few is not None:
            self._detector.last = {}
            with shared.lock:
                if not self.is_over:
                    self._use(few)
            return
        begun = time.perf_counter()
        frame = self._source.pull(info.machines, window_seconds, deadline)
        shared.metrics.took("pull", time.perf_counter() - begun)
        if frame.num_seconds:
            self._ahead = float(frame.ts[-1]) + 1 - shared.clock()
        # Only the table `boards` needs the board.
        board = self._source.board(info.machines, deadline) if shared.settings.boards else ""
        dead = self._dead(frame)
        # Without the dead, the others are compared with each other.
        alive = frame.select([name for name in frame.machines if name not in dead])
        result = self.monitor.call(
            alive,
            started=info.started,
            stages=info.stages,
            waiting=self._source.waiting(frame, deadline),
            board=board,
            suspects=shared.suspects,
        )
        asked = suspects(result)
        failed = self._source.failed_boards(sorted(asked), deadline) if asked else set()
        result = confirmed(result, dead, failed & asked)
        for stage, seconds in self._detector.seconds.items():
            shared.metrics.took(stage, seconds)
        with shared.lock:
            # A late result is dropped, since the machines may have changed.
            deadline.left()
            if self.is_over:
                raise BackendUnavailable("the job is watched no longer", code="stopped")
            shared.suspects = of_last_day(
                {**shared.suspects, **self.monitor.suspects}, int(self.now())
            )
            shared.metrics.pulled(frame, self._source.intervals)
            metrics = shared.settings.detect.metrics
            lacking = {name for name in metrics if not frame.mask[name].any()}
            for name in sorted(lacking - shared.lacking):
                logger.warning(
                    "metric_without_samples metric=%s job=%s remedy=%r",
                    name,
                    self.job,
                    "give the exporter its fields and flags, and its scrape the label `node`, as "
                    "monitoring/README.md has them; or leave the metric out of `detect.metrics`",
                )
            shared.lacking |= lacking
            self._use(result)
        shared.has_succeeded.set()

    def _dead(self, frame: Frame) -> dict[str, int]:
        """Return the silent machines whose nodes are not ready, with the second of their last
        sample.
        """
        silent, actor = silent_machines(frame), self._shared.actor
        if not silent or actor is None:
            return {}
        try:
            down = actor.cluster.nodes_down()
        except ClusterError as error:
            # Without an answer of Kubernetes, the detector decides by its own rules for silence.
            if "nodes" not in self._said:
                self._said.add("nodes")
                logger.warning("nodes_not_known job=%s reason=%r", self.job, str(error)[:300])
            return {}
        return {name: since for name, since in silent.items() if name in down}

    def _use(self, result: Result) -> None:
        """Update metrics and alerts from the result of a call, and let the actor act on the
        alerts.
        """
        metrics, info = self._shared.metrics, self.info
        metrics.count("calls", self.job, result.status if result.is_judged else "skipped")
        changed = self.book.update(result, info.machines)
        self.last = result
        self._tell_skipped(result)
        metrics.called(result, result.end or self.now(), self._detector.newest_scores())
        alerts = [(alert, self._work_of(alert)) for alert in self.book.alerts()]
        metrics.alerts(self.job, info.namespace, info.machines, alerts)
        self._follow(changed, result)

    def _tell_skipped(self, result: Result) -> None:
        """Log once each metric that has samples, but not enough of them."""
        for name, share in sorted(result.known.items()):
            if share and name not in self._said:
                self._said.add(name)
                told = f"known {share:.0%}, needs {MIN_KNOWN_SHARE:.0%}"
                logger.warning("metric_skipped metric=%s job=%s seconds=%r", name, self.job, told)

    def _work_of(self, alert: Alert) -> PodInfo | JobInfo:
        """Return the pod or job whose labels name the run and stage of an alert's machine."""
        return next(
            (p for p in self.info.pods if p.machine == alert.machine and p.run_id), self.info
        )

    def _follow(self, changed: list[Alert], result: Result) -> None:
        """Log alerts that began or ended, and let the actor take a step for each alert."""
        self.is_changed |= bool(changed)
        for alert in changed:
            of = self._work_of(alert)
            logger.warning(
                f"alert state={alert.state} name={alert.name} job={alert.job} "
                f"machine={alert.machine} kind={alert.kind} metric={alert.metric} "
                f"since={alert.since:.0f} id={alert.id} run={of.run_id} stage={of.stage} "
                f"iteration={of.iteration} reason={alert.ended!r}"
            )
        actor = self._shared.actor
        for alert in [*self.book.alerts(), *(alert for alert in changed if alert.ended)]:
            if actor is None or self._shared.stop.is_set():
                break
            # The age of the result grows while the actor handles other jobs and alerts.
            outcome = actor.handle(alert, result, int(self.now()))
            if not outcome.has_changed:
                continue
            logger.info(
                f"action alert={alert.id} machine={alert.machine} action={outcome.action} "
                f"result={outcome.result} detail={outcome.detail!r}"
            )
            if outcome.action != "none":
                self._shared.count_action(outcome)
            if outcome.result == "blocked":
                self._shared.metrics.count("evictions_blocked")

    def end(self) -> None:
        """End all alerts, because the job has ended."""
        with self._shared.lock:
            if self.last is not None:
                self._follow(self.book.end(), self.last)

    def to_json(self) -> dict[str, Any]:
        """Return the state that a restarted process needs."""
        return {"monitor": self.monitor.to_json(), "alerts": self.book.to_json()}

    def _failed(self, error: BackendUnavailable) -> float:
        """Count a failed call; return the seconds until the next one."""
        shared, server = self._shared, self._shared.settings.server
        self._failures += 1
        # The exponent is bounded, since a long outage would overflow the float.
        pause = server.min_backoff_seconds * 2.0 ** min(self._failures - 1, 60)
        level = logging.WARNING
        if error.code in REFUSED:
            # The next call would be refused as well, until people change the credentials.
            pause, level = server.max_backoff_seconds, logging.ERROR
        pause = min(server.max_backoff_seconds, pause)
        logger.log(
            level,
            f"call_failed job={self.job} code={error.code} failures={self._failures} "
            f"again_in_seconds={pause:.0f} reason={str(error)[:300]!r}",
        )
        with shared.lock:
            if not self.is_over:
                shared.metrics.count("calls", self.job, "error")
        return pause
