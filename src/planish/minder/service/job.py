"""One job under watch: a call looks, notes what has changed, tells people, and has it acted upon.

What a call found is taken in as a whole or not at all: after `Watch.stop` nothing begins any more.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from planish.base.errors import BackendUnavailable, PlanishError
from planish.minder.act.kube.objects import JobInfo
from planish.minder.act.types import ActedAlert, Outcome
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import Denoiser, Models, restoration_error
from planish.minder.detect.detector import Detector
from planish.minder.detect.distances import Trace
from planish.minder.detect.frame import F32, Frame, Job
from planish.minder.detect.job_monitor import JobMonitor, too_few_machines
from planish.minder.detect.preprocess import Prepared
from planish.minder.detect.result import Result
from planish.minder.service.alertmanager import AlertContext
from planish.minder.service.alerts import Alert, AlertBook, Change
from planish.minder.service.http_client import Deadline
from planish.minder.service.own_metrics import OwnMetrics
from planish.minder.service.prometheus import REFUSED

logger = logging.getLogger(__name__)

_SCORE_WINDOWS = 60
"""Newest windows over which the score that is told is averaged."""


class FrameSource(Protocol):
    """Gives the newest seconds of one job; `Puller` meets it."""

    intervals: dict[str, float]
    """Metric to the median seconds between its samples."""

    def pull(self, machines: Sequence[str], seconds: int, deadline: Deadline) -> Frame:
        """Return the frame of the last `seconds`.

        Raises:
            BackendUnavailable: not to be had now.
        """

    def board(self, machines: Sequence[str], deadline: Deadline) -> str:
        """Return the model of the boards of most machines; empty when not known.

        Raises:
            BackendUnavailable: not to be had now.
        """


class Notifier(Protocol):
    """Tells people directly; `Alertmanager` meets it."""

    def send(
        self, now: float, alerts: Sequence[Alert], context: AlertContext, deadline: Deadline
    ) -> int:
        """Send what is due.

        Raises:
            BackendUnavailable: could not be told; it stays due.
        """


class Acts(Protocol):
    """Does something about alerts; `Actor` meets it."""

    def handle(self, alert: ActedAlert, result: Result, now: int) -> Outcome:
        """Do the next step for an alert."""


@dataclass
class Surroundings:
    """What the watches of all jobs share."""

    config: MinderConfig
    models: Models
    metrics: OwnMetrics
    notifier: Notifier | None = None
    actor: Acts | None = None
    is_dry_run: bool = True
    min_backoff_seconds: float = 1.0
    max_backoff_seconds: float = 60.0
    stop: threading.Event = field(default_factory=threading.Event)
    """Set when the program ends."""
    taking_in: threading.Lock = field(default_factory=threading.Lock)
    """Held while results are taken in and acted upon, by one job at a time."""
    clock: Callable[[], float] = time.monotonic
    has_succeeded: threading.Event = field(default_factory=threading.Event)
    """Set by the first call that was done."""
    lacking: set[str] = field(default_factory=set)
    """Metrics of which some job has given no sample; each is said once, not for every job."""


class WatchedDetector(Detector):
    """A detector that tells how long its stages took and how unlike each machine is now."""

    def __init__(self, models: Models, config: MinderConfig) -> None:
        """Take models and configuration."""
        self._embedding = _Stopwatch()
        timed: dict[str, Denoiser] = {
            name: _Timed(one, self._embedding) for name, one in models.denoisers.items()
        }
        super().__init__(Models(timed, models.limits), config)
        self.scores: dict[str, dict[str, float]] = {}
        """Metric to machine to its mean normal score in the newest windows."""
        self._begun = self._prepared = 0.0

    def call(self, frame: Frame, job: Job | None = None) -> Result:
        """Look at one frame."""
        self._begun = self._prepared = time.perf_counter()
        self._embedding.seconds = 0.0
        self.scores = {}
        return super().call(frame, job)

    def traces(self, prepared: Prepared, job: Job) -> dict[str, Trace]:
        """Return what is known of each metric's windows."""
        self._prepared = time.perf_counter()
        found = super().traces(prepared, job)
        for name, trace in found.items():
            if len(trace.scores):
                newest = trace.scores[-_SCORE_WINDOWS:].mean(axis=0)
                self.scores[name] = dict(
                    zip(prepared.frame.machines, newest.astype(float).tolist(), strict=True)
                )
        return found

    def model_errors(self) -> dict[str, float]:
        """Return the mean squared error of each LSTM-VAE on windows of the last call."""
        found = {}
        for name, trace in self.last.items():
            denoiser = self.models.denoisers[name]
            if denoiser.name == "vae":
                error = restoration_error(denoiser, self._seen[name].values, trace.present)
                if math.isfinite(error):
                    found[name] = error
        return found

    def stage_seconds(self) -> dict[str, float]:
        """Return how long the stages of the last call took, which must just have ended."""
        rest = time.perf_counter() - self._prepared - self._embedding.seconds
        return {
            "preprocess": self._prepared - self._begun,
            "denoise": self._embedding.seconds,
            "detect": rest,
        }


@dataclass
class _Stopwatch:
    seconds: float = 0.0


class _Timed:
    """A denoiser whose time is taken."""

    def __init__(self, inner: Denoiser, watch: _Stopwatch) -> None:
        self.name, self.metric = inner.name, inner.metric
        self.version, self.quality = inner.version, inner.quality
        self._inner, self._watch = inner, watch

    def embed(self, windows: F32) -> F32:
        begun = time.perf_counter()
        try:
            return self._inner.embed(windows)
        finally:
            self._watch.seconds += time.perf_counter() - begun


class JobWatch:
    """The watch over one job, call after call."""

    def __init__(
        self,
        info: JobInfo,
        source: FrameSource,
        around: Surroundings,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin, or go on from the state of an earlier process; a damaged one is not used."""
        self.info = info
        self.job = info.key
        self._source, self._around = source, around
        self._failures = 0
        self._ahead = time.time() - around.clock()
        self._detector = WatchedDetector(around.models, around.config)
        self.monitor, self.book = self._restored(state)
        self.last: Result | None = None
        """What the last call found."""
        self.is_changed = False
        """Something has happened that must outlive a restart soon."""
        self.is_over = False
        """The job is watched no longer; a call that goes on must leave no trace."""

    def _restored(self, state: Mapping[str, Any] | None) -> tuple[JobMonitor, AlertBook]:
        config, models = self._around.config, self._around.models
        fresh = JobMonitor(self.job, models, config, detector=self._detector)
        if state is not None:
            try:
                learnt = state.get("monitor")
                if learnt is not None:
                    fresh = JobMonitor.from_json(learnt, models, config, detector=self._detector)
                return fresh, AlertBook.from_json(config, state["alerts"])
            except (PlanishError, KeyError, TypeError, ValueError, AttributeError) as error:
                logger.warning("state_of_job_lost job=%s reason=%r", self.job, str(error)[:200])
        return JobMonitor(self.job, models, config, detector=self._detector), AlertBook(config)

    def now(self) -> float:
        """Return the time of the server that was last heard of, carried on by our own clock.

        The wall clock of this machine may jump; nothing here depends on it.
        """
        return self._around.clock() + self._ahead

    def call(self) -> float:
        """Look at the job once, and return the seconds until the next call.

        A failure resolves no alert and leads to no action; it is tried again soon.
        """
        begun = self._around.clock()
        config = self._around.config.service
        deadline = Deadline.after(config.call_timeout_seconds, self._around.stop)
        try:
            self._look(deadline, config.window_seconds)
        except BackendUnavailable as error:
            if error.code == "stopped":
                return float(config.interval_seconds)
            return self._failed(error)
        if self._failures:
            logger.info("call_works_again job=%s failures=%d", self.job, self._failures)
        self._failures = 0
        spent = self._around.clock() - begun
        self._around.metrics.took("total", spent)
        return max(0.0, config.interval_seconds - spent)

    def _look(self, deadline: Deadline, window_seconds: int) -> None:
        around, info = self._around, self.info
        few = too_few_machines(self.job, info.machines, around.config)
        if few is not None:
            self._detector.scores = {}
            with around.taking_in:
                if not self.is_over:
                    around.metrics.count("calls", self.job, "skipped")
                    self._take_in(few, deadline)
            return
        begun = time.perf_counter()
        frame = self._source.pull(info.machines, window_seconds, deadline)
        around.metrics.took("pull", time.perf_counter() - begun)
        if frame.num_seconds:
            self._ahead = float(frame.ts[-1]) + 1 - around.clock()
        # Nobody needs to know it where no limits depend on it.
        board = self._source.board(info.machines, deadline) if around.config.boards else ""
        result = self.monitor.call(frame, started=info.started, stages=info.stages, board=board)
        for stage, seconds in self._detector.stage_seconds().items():
            around.metrics.took(stage, seconds)
        with around.taking_in:
            # Too late is as good as never: the machines may differ by now.
            deadline.left()
            if self.is_over:
                raise BackendUnavailable("the job is watched no longer", code="stopped")
            around.metrics.pulled(frame, self._source.intervals)
            self._say_lacking(frame)
            outcome = {"ok": "ok", "fault": "fault"}.get(result.status, "skipped")
            around.metrics.count("calls", self.job, outcome)
            self._take_in(result, deadline)
        around.has_succeeded.set()

    def _say_lacking(self, frame: Frame) -> None:
        """Log metrics without any sample, each of them once in the life of the program."""
        lacking = {name for name, mask in frame.mask.items() if not mask.any()}
        for name in sorted(lacking - self._around.lacking):
            logger.warning(
                "metric_without_samples metric=%s job=%s remedy=%r",
                *(name, self.job),
                "give the exporter its fields and flags, and its scrape the label `node`, as "
                "monitoring/README.md has them; or leave the metric out of `detect.metrics`",
            )
        self._around.lacking |= lacking

    def _take_in(self, result: Result, deadline: Deadline) -> None:
        now = int(result.end or self.now())
        changes = self.book.update(now, result, self.info.machines)
        self.last = result
        self._around.metrics.called(result, now, self._detector.scores)
        if result.status == "ok" and not result.candidates:
            self._around.metrics.restored(self.job, self._detector.model_errors())
        self._follow(changes, now, deadline, result)

    def _follow(
        self, changes: Sequence[Change], now: int, deadline: Deadline, result: Result | None
    ) -> None:
        """Tell people of changes, then have the alerts acted upon, then tell what was done."""
        for change in changes:
            alert = change.alert
            if alert.is_active and not alert.run:
                self.book.link(alert.id, self._run_of(alert.machine))
            logger.log(
                logging.INFO if alert.state == "candidate" else logging.WARNING,
                "alert state=%s name=%s job=%s machine=%s kind=%s metric=%s since=%d id=%s "
                "reason=%r",
                *(alert.state, alert.name, alert.job, alert.machine, alert.kind, alert.metric),
                *(int(alert.since), alert.id, alert.reason),
            )
        resolved = [change.alert for change in changes if change.alert.state == "resolved"]
        self.is_changed |= any(change.alert.state != "candidate" for change in changes)
        self._tell_levels()
        self.notify(now, resolved, deadline)
        if result is not None and self._around.actor is not None:
            self._act(self._around.actor, [*self.book.alerts(self.job), *resolved], result)
            self._tell_levels()
            self.notify(now, (), deadline)

    def _act(self, actor: Acts, alerts: Sequence[Alert], result: Result) -> None:
        """Let each alert be acted upon, one step, unless the program ends."""
        for alert in alerts:
            if self._around.stop.is_set():
                return
            # The result grows older while other jobs and alerts have their turn.
            outcome = actor.handle(alert, result, int(self.now()))
            if not outcome.has_changed:
                continue
            self.is_changed = True
            if outcome.action != "none":
                dry_run = str(self._around.is_dry_run).lower()
                self._around.metrics.count("actions", outcome.action, outcome.result, dry_run)
            if outcome.result == "blocked":
                self._around.metrics.count("evictions_blocked")
            if not alert.is_active:
                continue
            if outcome.result == "done" and outcome.action in ("cordon", "evict"):
                self.book.acted(alert.id, outcome.action)
            elif outcome.is_suppressed:
                self.book.suppressed(alert.id, outcome.detail or outcome.result)

    def notify(self, now: float, resolved: Sequence[Alert], deadline: Deadline) -> None:
        """Send what is due; what fails stays due and is logged."""
        if self._around.notifier is None:
            return
        alerts = [alert for alert in self.book.alerts(self.job) if alert.is_active]
        context = AlertContext(self.info.namespace, self.job, self._around.is_dry_run)
        try:
            self._around.notifier.send(now, [*alerts, *resolved], context, deadline)
        except BackendUnavailable as error:
            logger.warning("alerts_not_sent job=%s reason=%r", self.job, str(error)[:300])

    def end(self, reason: str = "the job has ended") -> None:
        """Resolve everything, because the job is no more."""
        with self._around.taking_in:
            now = int(self.now())
            changes = self.book.end_job(self.job, now, reason)
            deadline = Deadline.after(10.0, self._around.stop)
            self._follow(changes, now, deadline, self.last)
            self._around.metrics.end_job(self.job)

    def to_json(self) -> dict[str, Any]:
        """Return what a restarted process needs."""
        return {
            "info": {"namespace": self.info.namespace, "machines": list(self.info.machines)},
            "monitor": self.monitor.to_json(),
            "alerts": self.book.to_json(),
        }

    def _failed(self, error: BackendUnavailable) -> float:
        around = self._around
        self._failures += 1
        pause = min(
            around.max_backoff_seconds, around.min_backoff_seconds * 2.0 ** (self._failures - 1)
        )
        if error.code in REFUSED:
            # The next try would be refused as well; people have to change something.
            pause = around.max_backoff_seconds
        logger.log(
            logging.ERROR if error.code in REFUSED else logging.WARNING,
            "call_failed job=%s code=%s failures=%d again_in_seconds=%.0f reason=%r",
            *(self.job, error.code, self._failures, pause, str(error)[:300]),
        )
        with around.taking_in:
            if self.is_over:
                return pause
            around.metrics.count("calls", self.job, "error")
            changes = self.book.expire(self.job, int(self.now()))
            self._follow(changes, int(self.now()), Deadline.after(10.0, around.stop), None)
        return pause

    def _tell_levels(self) -> None:
        active = [alert for alert in self.book.alerts(self.job) if alert.is_active]
        info = self.info
        self._around.metrics.alerts(self.job, info.namespace, info.machines, active)

    def _run_of(self, machine: str) -> dict[str, str]:
        """Return the pipeline run that a machine works for, as far as labels tell it."""
        pods = [pod for pod in self.info.pods if pod.machine == machine and pod.run_id]
        if pods:
            run, stage, iteration = pods[0].run_id, pods[0].stage, pods[0].iteration
        else:
            run, stage, iteration = self.info.run_id, self.info.stage, self.info.iteration
        found = {"run_id": run, "stage": stage, "iteration": str(iteration) if run else ""}
        return {name: value for name, value in found.items() if value}
