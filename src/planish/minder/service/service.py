"""The service: finds the jobs, watches each of them, saves the state, and ends in time.

One schedule runs the calls; a second one runs the tasks that must not wait for calls (lease,
discovery, saving).
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.base.errors import ConfigError, PlanishError
from planish.base.pages import PageServer, StatusPage
from planish.minder.act.kube.lease import LEASE_SECONDS, Lease
from planish.minder.act.kube.objects import JobInfo
from planish.minder.service.http import Deadline
from planish.minder.service.job import JobWatch, Shared
from planish.minder.service.pull import Puller
from planish.minder.service.state import StateStore, load_jobs, save_jobs

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 60.0
"""Seconds until a task that raised an exception is repeated."""
_TICK_SECONDS = 5.0
_SAVE_SECONDS = 600.0
"""Seconds from one save of the baselines to the next. A crash loses at most that much, and the
first call afterwards pulls a longer time. A change of alerts is saved with the next tick."""
_RECONCILE_SECONDS = 60.0
_CONTROL_THREADS = 3
_GONE_AFTER = 2
"""Number of consecutive searches without a job after which the job has ended."""
_HUNG_SECONDS = 120.0


@dataclass
class _Task:
    action: Callable[[], float]
    due: float
    is_running: bool = False


class TaskSchedule:
    """Tasks that a few daemon threads repeat; no task runs twice at the same time."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tasks: dict[str, _Task] = {}
        self._changed = threading.Condition()
        self._is_stopped = False
        self._threads: list[threading.Thread] = []

    def add(self, name: str, action: Callable[[], float], *, after: float = 0.0) -> None:
        """Add a task that runs in `after` seconds; it returns the seconds until its next run."""
        with self._changed:
            self._tasks[name] = _Task(action, self._clock() + after)
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        """Remove a task; if it is running, it ends by itself."""
        with self._changed:
            self._tasks.pop(name, None)

    def next_due(self) -> float:
        """Return the time at which the next task is due; infinity if there is none."""
        with self._changed:
            return min((t.due for t in self._tasks.values() if not t.is_running), default=math.inf)

    def run_next(self, *, by: float = math.inf) -> bool:
        """Run the next task if it is due by `by`; return whether one has run."""
        with self._changed:
            waiting = [(t.due, n) for n, t in self._tasks.items() if not t.is_running]
            due, name = min(waiting, default=(math.inf, ""))
            if not name or due > by:
                return False
            task = self._tasks[name]
            task.is_running = True
        try:
            pause = task.action()
        except Exception:
            # A failure in one job, or a bug, must not end the watches of all others.
            logger.exception("task_failed name=%s", name)
            pause = _RETRY_SECONDS
        with self._changed:
            task.due, task.is_running = self._clock() + max(0.0, pause), False
            self._changed.notify_all()
        return True

    def start(self, threads: int, name: str) -> None:
        """Start threads that run the tasks."""
        for number in range(threads):
            thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, seconds: float) -> None:
        """Start no more tasks, and wait up to `seconds` for running tasks."""
        end = time.monotonic() + seconds
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _work(self) -> None:
        while not self._is_stopped:
            if not self.run_next(by=self._clock()):
                with self._changed:
                    left = self.next_due() - self._clock()
                    if left > 0 and not self._is_stopped:
                        self._changed.wait(min(left, threading.TIMEOUT_MAX))


class Service:
    """All watches of this process."""

    def __init__(
        self,
        shared: Shared,
        *,
        jobs: Callable[[], Sequence[JobInfo]],
        source_of: Callable[[JobInfo], Puller],
        probe: Callable[[Deadline], object] = lambda deadline: None,
        state: StateStore | None = None,
        lease: Lease | None = None,
    ) -> None:
        """Start without watches.

        Args:
            shared: settings, models and state that all watches share.
            jobs: returns the present jobs; may raise `PlanishError`.
            source_of: returns the source of a job's frames.
            probe: raises `PlanishError` as long as the service is not ready.
            state: keeps the state of the jobs; None: no state is kept.
            lease: elects one of several replicas; None: this is the only replica.
        """
        self.shared = shared
        self._jobs, self._source_of, self._probe = jobs, source_of, probe
        self._state, self._lease = state, lease
        self.calls = TaskSchedule(shared.clock)
        self.control = TaskSchedule(shared.clock)
        self.watches: dict[str, JobWatch] = {}
        self._missed: dict[str, int] = {}
        self._earlier: dict[str, Any] | None = None
        """State of an earlier process, for jobs that have not been found again; None: not read
        yet."""
        self._is_leading = False
        self._last_save = self._last_tick = shared.clock()
        self._why_not_ready = "no query has been answered yet"
        self._faults: dict[str, str] = {}
        """Present failure of `lease` and `discovery`: name to reason."""
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Add all tasks without starting a thread; `start` calls this."""
        self.shared.metrics.set("leading", float(self._lease is None))
        self.shared.metrics.set("jobs", 0.0)
        self.shared.metrics.set("last_discovery_timestamp_seconds", time.time())
        if self._lease is not None:
            self.control.add("lease", self._renew)
        self.control.add("discover", self._discover)
        self.control.add("keep", self._keep, after=_TICK_SECONDS)
        self.control.add("probe", self._probe_once)
        if self.shared.actor is not None:
            self.control.add("reconcile", self._reconcile, after=_RECONCILE_SECONDS)

    def start(self) -> None:
        """Start to watch."""
        self.prepare()
        self.control.start(_CONTROL_THREADS, "control")
        self.calls.start(self.shared.settings.server.concurrency, "call")

    def stop(self) -> None:
        """Stop within about `server.stop_seconds` and save the state; running calls are dropped.

        A result takes effect under one lock, together with its actions. No result takes effect
        after this.
        """
        seconds = self.shared.settings.server.stop_seconds
        end = time.monotonic() + seconds
        self.shared.stop.set()
        has_lock = self.shared.lock.acquire(timeout=seconds)
        try:
            self._save()
        finally:
            if has_lock:
                self.shared.lock.release()
        for schedule in (self.calls, self.control):
            schedule.stop(max(0.0, end - time.monotonic()))
        if self._lease is not None:
            self._lease.release()

    def serve_pages(self) -> PageServer:
        """Start the pages /healthz, /readyz and /metrics; port 0 picks a free one."""

        def probe(fault: str) -> StatusPage:
            text = f"not ok: {fault}\n" if fault else "ok\n"
            return StatusPage(503 if fault else 200, text.encode())

        kind = "text/plain; version=0.0.4; charset=utf-8"
        host, port = self.shared.settings.server.host, self.shared.settings.server.port
        pages = {
            "/healthz": lambda _: probe("" if self.is_healthy() else "control tasks hang"),
            "/readyz": lambda _: probe(self.why_not_ready()),
            "/metrics": lambda _: StatusPage(200, self.shared.metrics.text(), kind),
        }
        try:
            return PageServer(host, port, pages)
        except OSError as error:
            raise ConfigError(
                "`server.host` and `server.port` must be free to listen on, got "
                f"{host}:{port}: {error}"
            ) from None

    def is_healthy(self) -> bool:
        """Return whether the control tasks still run."""
        return self.shared.clock() - self._last_tick < _HUNG_SECONDS

    def why_not_ready(self) -> str:
        """Return the reason why no job can be watched; empty if the service is ready."""
        if not self.shared.has_succeeded.is_set():
            return self._why_not_ready
        return "; ".join(f"{what}: {reason}" for what, reason in sorted(self._faults.items()))

    def _note(self, what: str, reason: str) -> None:
        """Record why `what` fails, or that it works if `reason` is empty; log changes."""
        before = self._faults.pop(what, "")
        if reason:
            self._faults[what] = reason
        if bool(before) != bool(reason):
            logger.warning("%s works=%s reason=%r", what, str(not reason).lower(), reason)

    def _leads(self) -> bool:
        return self._lease is None or self._lease.is_leader()

    def _probe_once(self) -> float:
        """Probe until one probe succeeds."""
        if not self.shared.has_succeeded.is_set():
            try:
                self._probe(Deadline.after(10.0, self.shared.stop))
            except PlanishError as error:
                self._why_not_ready = str(error)[:300]
                logger.warning("not_ready reason=%r", self._why_not_ready)
                return 10.0
            self.shared.has_succeeded.set()
        return 3600.0

    def _renew(self) -> float:
        """Renew the lease; start or stop watching when the leader changes."""
        assert self._lease is not None
        leads = self._lease.renew()
        self._note("lease", self._lease.fault)
        self.shared.metrics.set("leading", float(leads))
        if leads != self._is_leading:
            self._is_leading = leads
            logger.warning("leading=%s", str(leads).lower())
            if not leads:
                with self._lock:
                    for key in list(self.watches):
                        self._drop(key)
                    # The other replica goes on; its state is read when this replica leads again.
                    self._earlier = None
                    self.shared.metrics.set("jobs", 0.0)
            self.control.add("discover", self._discover)
        return LEASE_SECONDS / 3

    def _discover(self) -> float:
        """Find the jobs; watch new jobs, and end missing jobs."""
        pause = float(self.shared.settings.server.discovery_seconds)
        self._last_tick = self.shared.clock()
        if not self._leads():
            return pause
        try:
            jobs = {info.key: info for info in self._jobs()}
        except PlanishError as error:
            # A failed search ends no job.
            self._note("discovery", str(error)[:300])
            return min(pause, 10.0)
        self._note("discovery", "")
        with self._lock:
            if self._earlier is None:
                self._earlier = load_jobs(self._state)
            for key, info in jobs.items():
                self._missed.pop(key, None)
                if key in self.watches:
                    self.watches[key].info = info
                else:
                    self._watch(info, self._earlier.pop(key, None))
            for key in (self.watches.keys() | self._earlier.keys()) - jobs.keys():
                self._missed[key] = self._missed.get(key, 0) + 1
                if self._missed[key] >= _GONE_AFTER:
                    logger.info("job_ended job=%s", key)
                    self._earlier.pop(key, None)
                    if key in self.watches:
                        self._drop(key).end()
            self.shared.metrics.set("jobs", float(len(self.watches)))
        self.shared.metrics.set("last_discovery_timestamp_seconds", time.time())
        return pause

    def _watch(self, info: JobInfo, state: Mapping[str, Any] | None) -> None:
        logger.info("job_found job=%s machines=%d", info.key, len(info.machines))
        watch = JobWatch(info, self._source_of(info), self.shared, state)
        self.watches[info.key] = watch
        # The first calls of jobs are spread over an interval.
        digest = hashlib.sha256(info.key.encode()).digest()
        spread = min(60.0, float(self.shared.settings.service.interval_seconds))
        after = spread * int.from_bytes(digest[:4], "big") / 2**32
        self.calls.add(info.key, watch.call, after=after)

    def _drop(self, key: str) -> JobWatch:
        """Stop watching a job; the result of a running call is not used."""
        self.calls.remove(key)
        self._missed.pop(key, None)
        watch = self.watches.pop(key)
        with self.shared.lock:
            watch.is_over = True
            self.shared.metrics.end_job(key)
        return watch

    def _reconcile(self) -> float:
        """Let the actor clean up after humans who uncordoned nodes."""
        assert self.shared.actor is not None
        if self._leads():
            with self.shared.lock:
                for machine, outcome in self.shared.actor.reconcile(int(time.time())):
                    self.shared.count_action(outcome)
                    logger.info("reconciled machine=%s outcome=%r", machine, outcome)
        return _RECONCILE_SECONDS

    def _keep(self) -> float:
        """Save the state if an alert has changed or the last save is old."""
        self._last_tick = self.shared.clock()
        if self._leads():
            is_changed = any(watch.is_changed for watch in list(self.watches.values()))
            if is_changed or self.shared.clock() - self._last_save >= _SAVE_SECONDS:
                with self.shared.lock:
                    self._save()
        return _TICK_SECONDS

    def _save(self) -> None:
        """Write the state; a failed write is repeated with the next save."""
        self._last_save = self.shared.clock()
        if self._earlier is None:
            return
        watches = dict(self.watches)
        # A job that has not been found again yet keeps its state.
        jobs = {**self._earlier, **{key: watch.to_json() for key, watch in watches.items()}}
        if save_jobs(self._state, jobs):
            for watch in watches.values():
                watch.is_changed = False
