"""The service: finds the jobs, watches each of them, remembers, and ends in time.

Two schedules: one for calls, as many at a time as configured, and one for everything that must not
wait for them (lease, discovery, sending alerts again, saving).
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from planish.base.errors import PlanishError
from planish.minder.act.kube.objects import JobInfo
from planish.minder.service.config import ServiceSettings
from planish.minder.service.http_client import Deadline
from planish.minder.service.job import FrameSource, JobWatch, Surroundings
from planish.minder.service.schedule import Schedule
from planish.minder.service.state import StateStore, fit_jobs, load_state, save_state

logger = logging.getLogger(__name__)

_TICK_SECONDS = 5.0
_SAVE_SECONDS = 60.0
_RECONCILE_SECONDS = 60.0
_CONTROL_THREADS = 3
_GONE_AFTER = 2
"""A job that is missed so many times in a row has ended."""
_HUNG_SECONDS = 120.0


class Leader(Protocol):
    """Chooses one of several replicas; `Lease` meets it."""

    def renew(self) -> bool:
        """Take or keep the place; return whether this replica leads."""

    def is_leader(self) -> bool:
        """Tell whether this replica leads, without asking anybody."""

    def release(self) -> None:
        """Give the place up."""


class Keeper(Protocol):
    """The part of an actor that is not about single alerts; `Actor` meets it."""

    def reconcile(self, now: int) -> Sequence[tuple[str, Any]]:
        """Look what humans did to machines."""

    def close_breaker(self, now: float) -> None:
        """Close the breaker."""

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive a restart."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""

    @property
    def breaker(self) -> Any:
        """Has `is_open`."""


class Service:
    """All watches of this process."""

    def __init__(
        self,
        settings: ServiceSettings,
        around: Surroundings,
        *,
        jobs: Callable[[], Sequence[JobInfo]],
        source_of: Callable[[JobInfo], FrameSource],
        probe: Callable[[Deadline], object] = lambda deadline: None,
        state: StateStore | None = None,
        actor_state: StateStore | None = None,
        leader: Leader | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        """Begin with nothing watched.

        Args:
            settings: of the service.
            around: what all watches share.
            jobs: which jobs there are now; may raise `PlanishError`.
            source_of: where the frames of a job come from.
            probe: one successful query makes the service ready; raises `PlanishError` otherwise.
            state: where the state of the jobs is kept, if anywhere.
            actor_state: the same for the actor.
            leader: chooses one of several replicas; None: this is the only one.
            keeper: the actor, if there is one.
        """
        self.settings, self.around = settings, around
        self._jobs, self._source_of, self._probe = jobs, source_of, probe
        self._state, self._actor_state = state, actor_state
        self._leader, self._keeper = leader, keeper
        self.calls = Schedule(around.clock)
        self.control = Schedule(around.clock)
        self.watches: dict[str, JobWatch] = {}
        self._missed: dict[str, int] = {}
        self._earlier: dict[str, Any] | None = None
        """State of jobs of an earlier process that have not been found again; None: not read."""
        self._is_leading = False
        self._last_save = self._last_tick = around.clock()
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Plan all tasks, without a thread; `start` does this too."""
        if self._leader is not None:
            self.control.add("lease", self._renew)
        self.control.add("discover", self._discover)
        self.control.add("keep", self._keep, after=_TICK_SECONDS)
        self.control.add("probe", self._ask_once)
        if self.around.notifier is not None:
            seconds = float(self.settings.alertmanager.resend_seconds)
            self.control.add("send", self._send, after=seconds)
        if self._keeper is not None:
            self.control.add("reconcile", self._reconcile, after=_RECONCILE_SECONDS)

    def start(self) -> None:
        """Begin to watch."""
        self.prepare()
        self.control.start(_CONTROL_THREADS, "control")
        self.calls.start(self.settings.server.concurrency, "call")

    def stop(self) -> None:
        """End within `server.stop_seconds` and a moment; calls that are not done are dropped.

        What has been taken in is saved; nothing is half done: a result is taken in and acted upon
        under one lock, and after this nothing takes it any more.
        """
        end = time.monotonic() + self.settings.server.stop_seconds
        self.around.stop.set()
        got = self.around.taking_in.acquire(timeout=self.settings.server.stop_seconds)
        try:
            self._save()
        finally:
            if got:
                self.around.taking_in.release()
        self.calls.stop(max(0.0, end - time.monotonic()))
        self.control.stop(max(0.0, end - time.monotonic()))
        if self._leader is not None and self._leader.is_leader():
            self._leader.release()

    def is_healthy(self) -> bool:
        """Tell whether the control tasks go on."""
        return self.around.clock() - self._last_tick < _HUNG_SECONDS

    def is_ready(self) -> bool:
        """Tell whether models are loaded and one query has succeeded."""
        return self.around.has_succeeded.is_set()

    def _ask_once(self) -> float:
        """Ask for anything until that succeeds once."""
        if not self.around.has_succeeded.is_set():
            try:
                self._probe(Deadline.after(10.0, self.around.stop))
            except PlanishError as error:
                logger.warning("not_ready reason=%r", str(error)[:300])
                return 10.0
            self.around.has_succeeded.set()
        return 3600.0

    def _renew(self) -> float:
        assert self._leader is not None
        self._lead(self._leader.renew())
        kubernetes = self.settings.kubernetes
        return max(1.0, (kubernetes.lease_seconds if kubernetes else 15) / 3)

    def _lead(self, leads: bool) -> None:
        """Begin or end to watch, as the election says."""
        if leads == self._is_leading:
            return
        self._is_leading = leads
        logger.warning("leading=%s", str(leads).lower())
        if not leads:
            with self._lock:
                for key in list(self.watches):
                    self._drop(key)
                # The other replica goes on; what it leaves is read when this one leads again.
                self._earlier = None
        self.control.add("discover", self._discover)

    def _discover(self) -> float:
        """Find the jobs; watch new ones, end those that are no more."""
        pause = float(self.settings.server.discovery_seconds)
        self._last_tick = self.around.clock()
        if self._leader is not None and not self._leader.is_leader():
            return pause
        try:
            found = {info.key: info for info in self._jobs()}
        except PlanishError as error:
            # What was known stays; a job never ends because nobody could be asked.
            logger.warning("jobs_not_found reason=%r", str(error)[:300])
            return min(pause, 10.0)
        with self._lock:
            earlier = self._load() if self._earlier is None else self._earlier
            self._earlier = earlier
            for key, info in found.items():
                self._missed.pop(key, None)
                if key in self.watches:
                    self.watches[key].info = info
                else:
                    self._watch(info, earlier.pop(key, None))
            for key in [key for key in (*self.watches, *earlier) if key not in found]:
                self._missed[key] = self._missed.get(key, 0) + 1
                if self._missed[key] >= _GONE_AFTER:
                    logger.info("job_ended job=%s", key)
                    earlier.pop(key, None)
                    if key in self.watches:
                        self._drop(key).end()
        return pause

    def _load(self) -> dict[str, Any]:
        """Return what an earlier process knew of its jobs; the actor goes on from its own state."""
        actor = load_state(self._actor_state)
        if self._keeper is not None and actor:
            try:
                self._keeper.load(actor)
            except (PlanishError, KeyError, TypeError, ValueError, AttributeError) as error:
                logger.warning("state_of_actor_lost reason=%r", str(error)[:200])
        return dict(load_state(self._state).get("jobs", {}))

    def _watch(self, info: JobInfo, state: Mapping[str, Any] | None) -> None:
        """Begin to watch a job, not all at the same second."""
        logger.info("job_found job=%s machines=%d", info.key, len(info.machines))
        watch = JobWatch(info, self._source_of(info), self.around, state)
        self.watches[info.key] = watch
        spread = min(60.0, float(self.settings.minder.service.interval_seconds))
        digest = hashlib.sha256(info.key.encode()).digest()
        self.calls.add(
            info.key, watch.call, after=spread * int.from_bytes(digest[:4], "big") / 2**32
        )

    def _drop(self, key: str) -> JobWatch:
        """Watch a job no longer; its call may just go on, and its result is not wanted."""
        self.calls.remove(key)
        self._missed.pop(key, None)
        watch = self.watches.pop(key)
        with self.around.taking_in:
            watch.is_over = True
            self.around.metrics.end_job(key)
        return watch

    def _send(self) -> float:
        """Send firing alerts again, however long the pause between calls is."""
        if self._leader is None or self._leader.is_leader():
            for watch in list(self.watches.values()):
                with self.around.taking_in:
                    deadline = Deadline.after(10.0, self.around.stop)
                    watch.notify(watch.now(), (), deadline)
        return float(self.settings.alertmanager.resend_seconds)

    def _reconcile(self) -> float:
        """Let the actor look what humans did, and close the breaker when they say so."""
        assert self._keeper is not None
        if self._leader is None or self._leader.is_leader():
            with self.around.taking_in:
                for machine, outcome in self._keeper.reconcile(int(time.time())):
                    dry_run = str(self.around.is_dry_run).lower()
                    self.around.metrics.count("actions", outcome.action, outcome.result, dry_run)
                    logger.info("reconciled machine=%s outcome=%r", machine, outcome)
        return _RECONCILE_SECONDS

    def _keep(self) -> float:
        """Save what must not be lost, and take in what an operator asks for."""
        self._last_tick = self.around.clock()
        if self._leader is not None and not self._leader.is_leader():
            return _TICK_SECONDS
        if self._keeper is not None:
            try:
                asked = self._state.take_reset() if self._state is not None else 0.0
            except PlanishError as error:
                logger.warning("reset_not_read reason=%r", str(error)[:200])
                asked = 0.0
            if asked:
                with self.around.taking_in:
                    self._keeper.close_breaker(asked)
                logger.warning("breaker_closed asked=%d", int(asked))
            self.around.metrics.breaker(is_open=bool(self._keeper.breaker.is_open))
        changed = any(watch.is_changed for watch in list(self.watches.values()))
        if changed or self.around.clock() - self._last_save >= _SAVE_SECONDS:
            with self.around.taking_in:
                self._save()
        return _TICK_SECONDS

    def _save(self) -> None:
        """Write the state; what fails is tried again with the next save."""
        self._last_save = self.around.clock()
        if self._earlier is None:
            return
        if self._keeper is not None:
            save_state(self._actor_state, self._keeper.to_json())
        watches = dict(self.watches)
        # A job that has not been found again yet keeps what is known of it.
        jobs = {**self._earlier, **{key: watch.to_json() for key, watch in watches.items()}}
        if self._state is not None:
            jobs = fit_jobs(jobs, self._state.max_bytes)
        if save_state(self._state, {"jobs": jobs}):
            for watch in watches.values():
                watch.is_changed = False
