"""From the traces of all metrics to findings: who was candidate for long enough?

Source: Minder, arXiv 2411.01791, section 4.5. Several machines, silence and events of the whole job
are ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planish.minder.detect.config import DetectConfig, MinderConfig
from planish.minder.detect.continuity import Run, long_runs, runs_of
from planish.minder.detect.denoise import WINDOW, Denoiser
from planish.minder.detect.distances import threshold
from planish.minder.detect.frame import F32, I64, Frame, Mask
from planish.minder.detect.modes import BLOCK_SECONDS, find_part
from planish.minder.detect.preprocess import Prepared
from planish.minder.detect.result import Candidate, Evidence, Finding, Result
from planish.minder.detect.traces import (
    Job,
    Trace,
    candidates,
    floor_of,
    floors_of,
    thresholds,
    without,
)

_BEGUN = 30
"""A run of fewer windows is not worth telling."""


@dataclass(frozen=True)
class View:
    """All that findings are made of."""

    prepared: Prepared
    traces: Mapping[str, Trace]
    groups: Sequence[I64]
    config: MinderConfig
    ignored: Mask
    """[W], windows in which nobody is a candidate."""
    job: Job
    compared: Mapping[str, F32]
    """Metric to the values [T, N] that are compared."""

    @property
    def frame(self) -> Frame:
        """As it was measured."""
        return self.prepared.frame


def conclude(view: View, denoisers: Mapping[str, Denoiser], started: float) -> Result:
    """Turn the traces of all metrics into findings."""
    config, rules, frame = view.config, view.config.detect, view.frame
    silent = np.zeros(frame.num_machines, bool)
    if config.preprocess.silent_after_seconds:
        silent = view.prepared.silent_seconds > config.preprocess.silent_after_seconds
    unmodelled = {name: "no model" for name in view.prepared.values if name not in view.traces}
    chosen = {name: denoisers[name] for name in view.traces if name in denoisers}
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
    findings = _as_job_wide(view, findings + _part_findings(view))
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


def _named(view: View, excluded: set[str]) -> _Named:
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


def _round(view: View, one: _Named) -> list[Finding]:
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


def _ongoing(view: View, one: _Named) -> tuple[Candidate, ...]:
    """Return the runs that reach the end of the frame and are not just begun."""
    rules, found = view.config.detect, []
    for name, named in one.candidates.items():
        recent = named[-1 - rules.gap_tolerance :].any(axis=0) & (named.sum(axis=0) >= _BEGUN)
        for machine in np.flatnonzero(recent).tolist():
            mine, unknown = named[:, machine], one.unknown[name]
            run = runs_of(machine, mine, unknown, gap_tolerance=rules.gap_tolerance)[-1]
            if run.length >= _BEGUN and run.last >= len(named) - 1 - rules.gap_tolerance:
                score = float(one.traces[name].scores[run.last, machine])
                since = int(view.frame.ts[run.first])
                found.append(
                    Candidate(view.frame.machines[machine], name, since, run.length, score)
                )
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.machine, one.metric)))


def _long_runs(named: Mask, unknown: Mask, rules: DetectConfig) -> list[Run]:
    """Return for each machine its first run that is long enough, the earliest first."""
    found = long_runs(named, unknown, rules.continuity_seconds, gap_tolerance=rules.gap_tolerance)
    return sorted(found, key=lambda run: (run.first, run.machine))


def _finding(
    view: View, name: str, run: Run, traces: Mapping[str, Trace], named: Mapping[str, Mask]
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


def _silent_findings(view: View, silent: Mask) -> list[Finding]:
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


def _part_findings(view: View) -> list[Finding]:
    """Return the machines of a part of the job that lies apart from the rest."""
    rules, frame = view.config.detect, view.frame
    if not (rules.exhaustive and rules.two_modes) or rules.floors is None:
        return []
    # Ignored windows are told by their first seconds.
    ignored = np.append(view.ignored, np.zeros(WINDOW - 1, bool))
    for name in (one for one in view.traces if one in view.prepared.values):
        gap, unknown = floor_of(name, rules), view.job.unknown.get(name, ())
        for columns in view.groups:
            # What has always been so is learned with the roles of the machines.
            if 2 * sum(frame.machines[n] in unknown for n in columns) > len(columns):
                continue
            part = find_part(
                *(frame.ts, view.compared[name][:, columns]),
                view.prepared.masked[name][:, columns],
                ignored,
                gap=gap,
                smallest=_job_wide_limit(view) + 1,
                seconds=rules.continuity_seconds,
                max_masked=rules.max_masked_share,
            )
            if part is not None:
                return [
                    Finding(
                        machine=frame.machines[n],
                        metric=name,
                        kind="dissimilar",
                        run_start=part.start,
                        confirmed_at=part.start + rules.continuity_seconds + BLOCK_SECONDS,
                        duration_s=float(part.seconds),
                        score_mean=0.0,
                    )
                    for n in columns[part.columns].tolist()
                ]
    return []


def _job_wide_limit(view: View) -> int:
    """Return how many faulty machines are still no event of the whole job."""
    return int(max(2.0, view.config.detect.job_wide_share * view.frame.num_machines))


def _as_job_wide(view: View, findings: list[Finding]) -> list[Finding]:
    """Replace too many findings by one of the whole job."""
    names = sorted({finding.machine for finding in findings})
    if not view.config.detect.exhaustive or len(names) <= _job_wide_limit(view):
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
            machines=tuple(names),
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
