"""Detection: metric after metric, which machine stays most unlike its peers?

Source: Minder, arXiv 2411.01791, sections 4.4 and 4.5. Several machines, silence and events of the
whole job are ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planish.minder.config import DetectConfig, MinderConfig
from planish.minder.continuity import NOBODY, Run, first_long_run, runs
from planish.minder.denoise import WINDOW, Denoiser
from planish.minder.distances import threshold
from planish.minder.frame import F32, I64, Frame, Mask
from planish.minder.preprocess import Limits, Prepared, prepare
from planish.minder.result import Candidate, Evidence, Finding, Result
from planish.minder.traces import (
    Job,
    Trace,
    candidates,
    compared_values,
    comparison_groups,
    fill_trace,
    floors_of,
    thresholds,
    without,
)

_BEGUN = 30
"""A run of fewer windows is not worth telling."""


@dataclass(frozen=True)
class Models:
    """What a call needs besides the frame."""

    denoisers: Mapping[str, Denoiser]
    """By metric; a metric without one is skipped."""
    limits: Limits = field(default_factory=dict)
    """Of metrics whose limits are fitted."""


@dataclass
class Seen:
    """One metric as the last call saw it."""

    first: int
    """Unix second of row 0."""
    values: F32
    masked: Mask
    trace: Trace


class Detector:
    """Detection in one job, call after call; only windows that have changed are looked at again.

    A call of a new detector looks at everything, so results never depend on earlier calls.
    """

    def __init__(self, models: Models, config: MinderConfig) -> None:
        """Take models and configuration."""
        self.models, self.config = models, config
        self.windows_computed = 0
        """Windows of all metrics that the last call looked at."""
        self.prepared: Prepared | None = None
        """What the last call looked at; None before, and for a job that is too small."""
        self.last: Mapping[str, Trace] = {}
        """Traces of the last call."""
        self._machines: tuple[str, ...] = ()
        self._groups: list[I64] = []
        self._seen: dict[str, Seen] = {}

    def call(self, frame: Frame, job: Job | None = None) -> Result:
        """Look at one frame, e.g. the last 15 minutes.

        Args:
            frame: of one job.
            job: stages, baseline and start.
        """
        started = time.perf_counter()
        rules, job = self.config.detect, job or Job()
        self.windows_computed = 0
        self.prepared = None
        if frame.num_machines < rules.min_machines:
            return make_result(frame, self.config, "too_few_machines", started)
        if job.started and rules.warmup_seconds and frame.num_seconds:
            begin = max(int(frame.ts[0]), job.started + rules.warmup_seconds)
            frame = frame.slice(begin, int(frame.ts[-1]) + 1)
        prepared = self.prepared = prepare(frame, self.config, self.models.limits)
        groups = comparison_groups(frame.machines, rules, job)
        if frame.machines != self._machines or not _same(groups, self._groups):
            self._seen = {}
        self._machines, self._groups = frame.machines, groups
        traces = self.traces(prepared, job)
        self._seen = {name: self._seen[name] for name in traces if name in self._seen}
        ignored = _ignored_windows(frame, job)
        self.last = traces
        view = _View(prepared, traces, groups, self.config, ignored, job)
        return _conclude(view, self.models, started)

    def traces(self, prepared: Prepared, job: Job) -> dict[str, Trace]:
        """Return what is known of each metric's windows, in the order in which they are tried."""
        return {
            name: self._trace(prepared, name, job)
            for name in self.config.detect.metrics
            if name in prepared.values and name in self.models.denoisers
        }

    def _trace(self, prepared: Prepared, name: str, job: Job) -> Trace:
        values = compared_values(prepared, name, self.config.detect, job)
        masked = prepared.masked[name]
        count = max(0, len(values) - WINDOW + 1)
        trace = Trace.empty(count, values.shape[1])
        first = int(prepared.frame.ts[0]) if len(values) else 0

        def fill(which: I64) -> None:
            fill_trace(
                *(trace, which, values, masked, self.models.denoisers[name], self._groups),
                self.config.detect,
            )

        self.renew(name, Seen(first, values, masked, trace), fill)
        return trace

    def renew(self, name: str, seen: Seen, fill: Callable[[I64], None]) -> None:
        """Fill a trace: old windows from the last call, the others by `fill`, which gets them.

        Args:
            name: of the trace.
            seen: what it is made of, [T, any], and the empty trace.
            fill: writes the rows of some windows.
        """
        which = np.flatnonzero(self._reuse(name, seen.first, seen.values, seen.masked, seen.trace))
        fill(which)
        self.windows_computed += len(which)
        self._seen[name] = seen

    def _reuse(self, name: str, first: int, values: F32, masked: Mask, trace: Trace) -> Mask:
        """Copy rows whose seconds are as the last call saw them; returns [W] the others."""
        old = self._seen.get(name)
        if old is not None and old.values.shape[1] != values.shape[1]:
            old = None
        same = np.zeros(len(values), bool)
        shift = first - old.first if old else 0
        if old is not None:
            low, high = max(0, -shift), min(len(values), len(old.values) - shift)
            if high > low:
                mine, theirs = slice(low, high), slice(low + shift, high + shift)
                same[mine] = (values[mine] == old.values[theirs]).all(axis=1)
                same[mine] &= (masked[mine] == old.masked[theirs]).all(axis=1)
        if len(values) < WINDOW:
            return np.zeros(0, bool)
        kept = np.lib.stride_tricks.sliding_window_view(same, WINDOW).all(axis=1)
        rows = np.flatnonzero(kept)
        if old is not None and len(rows):
            for attribute in ("sums", "scores", "above", "present"):
                getattr(trace, attribute)[rows] = getattr(old.trace, attribute)[rows + shift]
        return np.logical_not(kept)


def detect(frame: Frame, models: Models, config: MinderConfig, job: Job | None = None) -> Result:
    """Look at one frame on its own; see `Detector.call`."""
    return Detector(models, config).call(frame, job)


def _ignored_windows(frame: Frame, job: Job) -> Mask:
    """Return [T - 7], windows that hold an ignored second."""
    seconds = np.zeros(frame.num_seconds, bool)
    for start, end in job.ignored:
        seconds |= (frame.ts >= start) & (frame.ts < end)
    if frame.num_seconds < WINDOW:
        return np.zeros(0, bool)
    found: Mask = np.lib.stride_tricks.sliding_window_view(seconds, WINDOW).max(axis=1)
    return found


def _same(a: Sequence[I64], b: Sequence[I64]) -> bool:
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class _View:
    """All that findings are made of."""

    prepared: Prepared
    traces: Mapping[str, Trace]
    groups: Sequence[I64]
    config: MinderConfig
    ignored: Mask
    """[W], windows in which nobody is a candidate."""
    job: Job

    @property
    def frame(self) -> Frame:
        return self.prepared.frame


def _conclude(view: _View, models: Models, started: float) -> Result:
    """Turn the traces of all metrics into findings."""
    config, rules, frame = view.config, view.config.detect, view.frame
    silent = np.zeros(frame.num_machines, bool)
    if config.preprocess.silent_after_seconds:
        silent = view.prepared.silent_seconds > config.preprocess.silent_after_seconds
    unmodelled = {name: "no model" for name in view.prepared.values if name not in view.traces}
    chosen = {name: models.denoisers[name] for name in view.traces if name in models.denoisers}
    facts = {
        "skipped": {**view.prepared.skipped, **unmodelled},
        "model_ids": {name: f"{one.name}:{one.version}" for name, one in chosen.items()},
        "silent": tuple(np.array(frame.machines)[silent].tolist()),
        "clipped": dict(view.prepared.clipped),
        "broken": dict(view.prepared.broken),
        "theta": threshold(rules.theta, rules.kappa, frame.num_machines),
    }
    # One silent machine of four is no outage.
    if silent.sum() > max(1.0, config.preprocess.outage_share * frame.num_machines):
        return make_result(frame, config, "outage", started, **facts)
    findings = _silent_findings(view, silent)
    if not view.traces and not findings:
        return make_result(frame, config, "skipped", started, **facts)
    facts["candidates"] = ()
    for number in range(rules.max_rounds if rules.exhaustive else 1):
        one = _named(view, {finding.machine for finding in findings})
        if number == 0:
            facts["candidates"] = _ongoing(view, one)
        found = _round(view, one)
        findings += found
        if not found:
            break
    findings = _as_job_wide(view, findings)
    findings.sort(key=lambda finding: (finding.confirmed_at, finding.machine))
    status = "fault" if findings else "ok"
    return make_result(frame, config, status, started, findings=tuple(findings), **facts)


@dataclass(frozen=True)
class _Named:
    """Candidates of all metrics, without the machines that were found before."""

    gone: Mask
    """[N], found before."""
    traces: Mapping[str, Trace]
    candidates: Mapping[str, Mask]
    """Metric to [W, N]."""
    unknown: Mapping[str, Mask]
    """Metric to [W], windows of which too little is known."""


def _named(view: _View, excluded: set[str]) -> _Named:
    rules = view.config.detect
    gone = np.array([name in excluded for name in view.frame.machines])
    now = {name: without(one, gone, view.groups) for name, one in view.traces.items()}
    theta = thresholds(rules, view.groups, gone)
    found, unknown = {}, {}
    for name, one in now.items():
        floor = floors_of(name, view.frame.machines, rules, view.job)
        named = candidates(one, theta, floor, only_most_unlike=rules.only_most_unlike)
        named[view.ignored] = False
        found[name] = named
        masked = (~one.present[:, ~gone]).mean(axis=1) if not gone.all() else np.ones(len(named))
        unknown[name] = (masked > rules.max_masked_share) & ~view.ignored
    return _Named(gone, now, found, unknown)


def _round(view: _View, one: _Named) -> list[Finding]:
    """Go through the metrics once."""
    rules = view.config.detect
    found: dict[str, Finding] = {}
    for name, named in one.candidates.items():
        for run in _long_runs(named, one.unknown[name], rules):
            finding = _finding(view, name, run, one.traces, one.candidates)
            found.setdefault(finding.machine, finding)
        if found and not rules.exhaustive:
            break
    return list(found.values())[: None if rules.exhaustive else 1]


def _ongoing(view: _View, one: _Named) -> tuple[Candidate, ...]:
    """Return the runs that reach the end of the frame and are not just begun."""
    rules, found = view.config.detect, []
    for name, named in one.candidates.items():
        recent = named[-1 - rules.gap_tolerance :].any(axis=0) & (named.sum(axis=0) >= _BEGUN)
        for machine in np.flatnonzero(recent).tolist():
            mine = np.where(named[:, machine], machine, NOBODY)
            run = [r for r in runs(mine, one.unknown[name], gap_tolerance=rules.gap_tolerance)
                   if r.machine == machine][-1]  # fmt: skip
            if run.length >= _BEGUN and run.last >= len(named) - 1 - rules.gap_tolerance:
                score = float(one.traces[name].scores[run.last, machine])
                since = int(view.frame.ts[run.first])
                found.append(
                    Candidate(view.frame.machines[machine], name, since, run.length, score)
                )
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.machine, one.metric)))


def _long_runs(named: Mask, unknown: Mask, rules: DetectConfig) -> list[Run]:
    """Return for each machine its first run that is long enough, the earliest first."""
    found = []
    for machine in np.flatnonzero(named.sum(axis=0) > rules.continuity_seconds * 0.9).tolist():
        mine = np.where(named[:, machine], machine, NOBODY)
        every = runs(mine, unknown, gap_tolerance=rules.gap_tolerance)
        run = first_long_run(every, rules.continuity_seconds)
        if run is not None:
            found.append(run)
    return sorted(found, key=lambda run: (run.first, run.machine))


def _finding(
    view: _View, name: str, run: Run, traces: Mapping[str, Trace], named: Mapping[str, Mask]
) -> Finding:
    start = int(view.frame.ts[run.first])
    rows = slice(run.first, run.last + 1)
    one = traces[name]
    evidence = {}
    for other, found in named.items():
        mine = found[:, run.machine]
        distance = float(np.median(traces[other].above[mine, run.machine])) if mine.any() else 0.0
        evidence[other] = Evidence(float(mine.mean()), distance)
    return Finding(
        machine=view.frame.machines[run.machine],
        metric=name,
        kind="dissimilar",
        run_start=start,
        confirmed_at=start + view.config.detect.continuity_seconds + WINDOW - 1,
        duration_s=float(run.last - run.first + WINDOW),
        score_mean=float(one.scores[rows, run.machine][one.present[rows, run.machine]].mean()),
        evidence=evidence,
    )


def _silent_findings(view: _View, silent: Mask) -> list[Finding]:
    """Return the machines that have been silent for longer than the continuity."""
    frame, needed = view.frame, view.config.detect.continuity_seconds
    end = int(frame.ts[-1]) + 1 if frame.num_seconds else 0
    found = []
    for column in np.flatnonzero(silent).tolist():
        seconds = int(view.prepared.silent_seconds[column])
        if seconds > needed:
            found.append(
                Finding(
                    machine=frame.machines[column],
                    metric="",
                    kind="silent",
                    run_start=end - seconds,
                    confirmed_at=end - seconds + needed,
                    duration_s=float(seconds),
                    score_mean=0.0,
                )
            )
    return found


def _as_job_wide(view: _View, findings: list[Finding]) -> list[Finding]:
    """Replace too many findings by one of the whole job."""
    rules = view.config.detect
    limit = max(2.0, rules.job_wide_share * view.frame.num_machines)
    if not rules.exhaustive or len(findings) <= limit:
        return findings
    return [
        Finding(
            machine="",
            metric="",
            kind="job_wide",
            run_start=min(finding.run_start for finding in findings),
            confirmed_at=max(finding.confirmed_at for finding in findings),
            duration_s=max(finding.duration_s for finding in findings),
            score_mean=float(np.mean([finding.score_mean for finding in findings])),
            machines=tuple(sorted(finding.machine for finding in findings)),
        )
    ]


def make_result(
    frame: Frame, config: MinderConfig, status: str, started: float, **facts: object
) -> Result:
    """Return a result about a frame; `started` is the call's `time.perf_counter()`."""
    start = int(frame.ts[0]) if frame.num_seconds else 0
    known = {"theta": config.detect.theta, **facts}
    return Result(
        job=frame.job,
        status=status,  # type: ignore[arg-type]
        start=start,
        end=start + frame.num_seconds,
        n_machines=frame.num_machines,
        profile=config.profile,
        distance=config.detect.distance,
        call_seconds=time.perf_counter() - started,
        **known,  # type: ignore[arg-type]
    )
