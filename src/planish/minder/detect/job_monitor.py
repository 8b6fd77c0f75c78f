"""Monitor of one job over many calls: runs the detector and learns baselines, roles and turns."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planish.minder.detect.baseline import Baseline, History
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import Models
from planish.minder.detect.detector import Detector
from planish.minder.detect.distances import comparison_groups
from planish.minder.detect.frame import Frame, Job, Mask, Stretches
from planish.minder.detect.metrics_table import BUSY, DEVICES, METRICS, columns_of
from planish.minder.detect.preprocess import OUTAGE_SHARE, limits_of, needed_scale
from planish.minder.detect.result import Result, make_result
from planish.minder.detect.roles import ROLE_SECONDS, differ, find_roles
from planish.minder.detect.runs import stretches

_IDLE_SHARE = 0.05
"""Share of its full activity below which a GPU is idle."""
_CANDIDATE_SECONDS = 60
"""Seconds after which a candidate stops the learning of baselines."""
_SUSPECT_SECONDS = 86_400
"""Seconds for which a machine that was named may still be faulty."""
_SAVED = ("joined", "suspects", "devices", "started", "scales", "turns", "roles", "idle")
"""Attributes that are saved for a restart."""
_YOUNG_SECONDS = 1_800
"""Seconds after which a job has shown which of its machines differ in turn."""
_MOVED_SHARE = 0.1
"""Share of the machines that must have changed roles, in two consecutive looks, before the new
roles are used."""
_SAME_JOB_SHARE = 0.5
"""Share of its machines that a job must keep; a job that keeps fewer has moved to other nodes."""


class JobMonitor:
    """Combines detector, baselines, warm-up, idle times and the machines that join and leave."""

    _begun: int
    """Unix second of the first measurement of the job."""
    _roles: dict[str, str]
    """Map from machine to the role that the monitor found, for jobs whose pods have no labels of
    roles."""

    def __init__(
        self, job: str, models: Models, config: MinderConfig, *, detector: Detector | None = None
    ) -> None:
        self.job, self.config = job, config
        self._forget()
        self.known = Job()
        self._detector = detector or Detector(models, config)
        self._limits = models.limits
        self._scales: dict[str, float] = {}
        self._joined: dict[str, int] = {}
        self._idle: list[tuple[int, int]] = []
        self._asked = 0
        self._suspects: dict[str, int] = {}
        self._named: tuple[str, ...] = ()
        self._started = 0

    def call(
        self,
        frame: Frame,
        *,
        started: int = 0,
        stages: Mapping[str, str] | None = None,
        waiting: Stretches | None = None,
        board: str = "",
        suspects: Mapping[str, int] | None = None,
    ) -> Result:
        """Return the result for the newest measurements of the job.

        Args:
            frame: at least the last `service.window_seconds` of all machines of the job.
            started: unix seconds of the last start of the job; 0 if not known.
            stages: machine to pipeline stage.
            waiting: stretches in which each machine only waits for others; it is not compared then.
            board: model of the job's GPU boards; empty if not known.
            suspects: machine to the unix second at which another job named it. A machine that was
                named within a day can have no role. The monitor adds the machines of this job
                itself.
        """
        begun = time.perf_counter()
        if not frame.num_seconds:
            return make_result(frame, self.config, "skipped", begun)
        if not self._begun:
            self._begun = int(frame.ts[0])
        now = int(frame.ts[-1]) + 1
        frame = frame.slice(now - self.config.service.window_seconds, now)
        self._follow(frame, started, now)
        frame, since = self._of_age(frame, now)
        rules = self.config.detect
        warmup = rules.warmup_seconds
        self._note_idle(frame)
        ignored = [(started, started + warmup)] if started and warmup else []
        for start, stop in self._idle:
            # A job that goes on after a long pause warms up again.
            ignored.append((start, stop + warmup * (stop - start >= warmup)))
        self._widen(frame, board)
        self._count_devices(frame)
        self._suspects = of_last_day(self._suspects, now)
        self.baseline.suspects = {*self._suspects, *of_last_day(suspects or {}, now)}
        self.baseline.keep(frame.machines)
        self.usual.keep(frame.machines)
        metrics = columns_of(rules.metrics, frame.values) if rules.role_baseline else ()
        self.known = job = Job(
            stages=dict(stages or self._roles),
            waiting=waiting or {},
            baseline=self.baseline.table(),
            usual=self.usual.table(),
            since=since,
            ignored=ignored,
            unknown={name: self.baseline.unknown(name) for name in metrics},
            refused=self.baseline.refused,
            board=board,
            scales=dict(self._scales),
            turns=self._turns,
            devices=self._devices,
            mature=set(np.array(self.baseline.machines)[self.baseline.mature].tolist()),
            is_young=now < self._begun + _YOUNG_SECONDS,
            asked=self._asked,
            named=self._named,
        )
        result = self._detector.call(frame, job)
        self._asked = now - 2 * self.config.service.interval_seconds
        named = {f.machine for f in result.findings}.union(*(f.machines for f in result.findings))
        self._named = tuple(sorted(named))
        self._suspects |= {f.machine: now for f in result.findings if f.machine}
        if rules.exhaustive:
            for metric, by_machine in result.turns.items():
                known = self._turns.setdefault(metric, {})
                for name, turn in by_machine.items():
                    known[name] = max(known.get(name, 0), turn)
        if not stages and rules.exhaustive and rules.compare_within_stage:
            self._learn_roles(result, now)
        # New roles change which machines are compared, so this call's result teaches nothing.
        if stages or self._roles == job.stages:
            self._learn(result, now, ignored)
        return result

    @property
    def suspects(self) -> Mapping[str, int]:
        """Unix second at which this job named a machine last, by machine."""
        return self._suspects

    def _follow(self, frame: Frame, started: int, now: int) -> None:
        """Record which machines joined and left; a job that moved to other nodes is a new job."""
        old, new = set(self._joined), set(frame.machines)
        moved = bool(old) and len(old & new) < _SAME_JOB_SHARE * max(len(old), len(new))
        if moved:
            self._forget()
        for name in old - new:
            del self._joined[name]
        for name in sorted(new - self._joined.keys()):
            if not old or moved:
                # The age of the first machines is not known.
                self._joined[name] = 0
                continue
            column = frame.machines.index(name)
            rows = [np.flatnonzero(real[:, column])[:1] for real in frame.mask.values()]
            first = np.concatenate(rows) if rows else np.zeros(0, int)
            self._joined[name] = int(frame.ts[first.min()]) if len(first) else now
        if not self._roles.keys() >= new:
            self._roles = {}
        self._started = max(self._started, started)

    def _of_age(self, frame: Frame, now: int) -> tuple[Frame, dict[str, int]]:
        """Return the frame without young machines, and the second from which each other machine
        counts.
        """
        grace = self.config.preprocess.join_grace_seconds
        since = {name: joined + grace for name, joined in self._joined.items() if joined and grace}
        old = [name for name in frame.machines if since.get(name, 0) <= now]
        frame = frame.select(old) if len(old) < frame.num_machines else frame
        since = {name: at for name, at in since.items() if name in old and at > frame.ts[0]}
        if len(since) > OUTAGE_SHARE * frame.num_machines:
            # Too many machines are young: the frame begins when the last of them counts.
            frame = frame.slice(max(since.values()), now)
        return frame, since

    def _note_idle(self, frame: Frame) -> None:
        """Record the stretches in which all machines are idle. A stretch may have begun before the
        window.
        """
        first, shortest = int(frame.ts[0]), self.config.detect.idle_seconds
        kept = [stretch for stretch in self._idle if stretch[1] > first]
        for low, high in stretches(_idle(frame)):
            start, stop = first + low, first + high
            known = [old for old in kept if old[0] <= stop and start <= old[1]]
            if known or 0 < shortest <= stop - start:
                whole = [*known, (start, stop)]
                kept = [old for old in kept if old not in known]
                kept.append((min(old[0] for old in whole), max(old[1] for old in whole)))
        self._idle = sorted(kept)

    def _widen(self, frame: Frame, board: str) -> None:
        """Widen fitted limits that most machines of the job exceed."""
        if not self.config.preprocess.widen_limits:
            return
        old = dict(self._scales)
        for name in self.config.detect.metrics:
            limits = limits_of(METRICS[name], self.config, self._limits, board)
            if METRICS[name].limits is None and limits is not None and name in frame.values:
                known = old.get(name, 1.0)
                self._scales[name] = needed_scale(frame, METRICS[name], limits, known)
        if old and old != self._scales:
            # Baselines are in units of the old limits.
            self._forget()

    def _count_devices(self, frame: Frame) -> None:
        if DEVICES in frame.values:
            counts = np.nan_to_num(frame.values[DEVICES]).max(axis=0).astype(int).tolist()
            for name, count in zip(frame.machines, counts, strict=True):
                self._devices[name] = max(count, self._devices.get(name, 0))

    def _unlearn(self) -> None:
        """Forget the differences between healthy machines."""
        self.baseline = Baseline(self.config.detect)
        self.usual = Baseline(self.config.detect, is_role=False)
        self._turns: dict[str, dict[str, int]] = {}

    def _forget(self) -> None:
        self._unlearn()
        self._roles = {}
        self._seen: dict[str, str] = {}
        """Map from machine to role in the last frame that showed roles."""
        self._looked = 0
        """Unix second at which roles were looked for last."""
        self._devices: dict[str, int] = {}
        """Map from machine to the largest number of GPUs that it has shown."""
        self._begun = 0

    def _learn_roles(self, result: Result, now: int) -> None:
        """Find two parts of a job with different work; from then on, compare each part with
        itself.
        """
        prepared, rules = self._detector.prepared, self.config.detect
        if prepared is None or now < max(self._begun, self._looked) + ROLE_SECONDS:
            return
        self._looked = now
        found = find_roles(prepared, rules)
        if not found:
            return
        before, self._seen = self._seen, found
        is_new = differ(self._roles, found) > max(1, _MOVED_SHARE * len(found))
        if before == found and is_new and (self._roles or not result.findings):
            self._roles = found
            # The baselines were learned from machines in other roles.
            suspects = self.baseline.suspects
            self._unlearn()
            self.baseline.suspects = suspects
            self.baseline.keep(prepared.frame.machines)
            groups = comparison_groups(prepared.frame.machines, rules, Job(stages=found))
            history = History(prepared.frame.ts, prepared.values, prepared.masked, groups)
            long = [c.since for c in result.candidates if c.seconds >= _CANDIDATE_SECONDS]
            self.baseline.add(history, min(long, default=now), np.zeros(len(found), bool))
            self.baseline.skip(now)

    def _learn(self, result: Result, now: int, ignored: Sequence[tuple[int, int]]) -> None:
        """Add the healthy measurements to the baselines."""
        prepared, rules = self._detector.prepared, self.config.detect
        if result.status not in ("ok", "fault") or prepared is None:
            return
        if not (rules.role_baseline or rules.usual_distance):
            return
        baseline, recent = self.baseline, now - 2 * self.config.service.interval_seconds
        unhealthy = any(
            start < now and stop > max(baseline.until, recent) for start, stop in ignored
        )
        faulty = {finding.machine for finding in result.findings}
        unsure = np.array([name in faulty for name in baseline.machines], bool)
        if faulty or any(c.seconds >= _CANDIDATE_SECONDS for c in result.candidates):
            unsure |= baseline.mature
        if unhealthy or unsure.all():
            baseline.skip(now)
            self.usual.skip(now)
            return
        # A machine that began to differ a moment ago is not a candidate yet.
        mature = baseline.mature.all()
        until = now - _CANDIDATE_SECONDS if mature else now
        # Distances are meaningful only after the baselines have been subtracted.
        last = self._detector.last
        if baseline.begun and last:
            # A window is stored at its first second.
            above = {name: trace.above for name, trace in last.items()}
            masked = {name: ~trace.present for name, trace in last.items()}
            seconds = prepared.frame.ts[: len(next(iter(above.values())))]
            self.usual.add(History(seconds, above, masked, self._detector.groups), until, unsure)
        values = History(prepared.frame.ts, prepared.values, prepared.masked, self._detector.groups)
        baseline.add(values, until, unsure)

    def to_json(self) -> dict[str, Any]:
        """Return the state that a restarted service needs."""
        return {
            "job": self.job,
            **{name: copy.deepcopy(getattr(self, f"_{name}")) for name in _SAVED},
            "baseline": self.baseline.to_json(),
            "usual": self.usual.to_json(),
        }

    @classmethod
    def from_json(
        cls,
        state: Mapping[str, Any],
        models: Models,
        config: MinderConfig,
        *,
        detector: Detector | None = None,
    ) -> JobMonitor:
        """Restore a monitor from the values of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the values are not of that form.
        """
        monitor = cls(state["job"], models, config, detector=detector)
        monitor.baseline = Baseline.from_json(config.detect, state["baseline"])
        monitor.usual = Baseline.from_json(config.detect, state["usual"], is_role=False)
        # The state of an earlier release lacks some entries.
        for name in state.keys() & set(_SAVED):
            setattr(monitor, f"_{name}", copy.deepcopy(state[name]))
        monitor._idle = [(start, stop) for start, stop in monitor._idle]
        return monitor


def of_last_day(suspects: Mapping[str, int], now: int) -> dict[str, int]:
    """Return the machines that were named within the day before `now`, with the unix second."""
    return {name: at for name, at in suspects.items() if at > now - _SUSPECT_SECONDS}


def too_few_machines(job: str, machines: Sequence[str], config: MinderConfig) -> Result | None:
    """Return the result for a job of a single machine, which has no peers; None for other jobs.

    It needs no data, so the many small jobs of a cluster cost no queries to Prometheus.
    """
    if len(machines) > 1:
        return None
    frame = Frame(job, np.zeros(0, np.int64), tuple(machines), {})
    return make_result(frame, config, "too_few_machines", time.perf_counter())


def _idle(frame: Frame) -> Mask:
    """Return [T], True for seconds in which the GPUs of all machines with samples are idle."""
    for name, full in zip(BUSY, (100.0, 1.0), strict=True):
        if name in frame.values:
            real = frame.mask[name]
            busy = real & (frame.values[name] >= _IDLE_SHARE * full)
            return np.asarray(real.any(axis=1) & ~busy.any(axis=1))
    return np.zeros(frame.num_seconds, bool)
