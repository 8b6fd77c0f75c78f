"""Detection in one frame: metric after metric, which machine stays most unlike its peers?

Source: Minder, arXiv 2411.01791, sections 4.4 and 4.5. Floors, baselines, stages, silence and
events of the whole job are ours.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from planish.minder.config import DetectConfig, MinderConfig
from planish.minder.continuity import NOBODY, Run, first_long_run, runs
from planish.minder.denoise import WINDOW, Denoiser, windows_of
from planish.minder.distances import (
    distance_sums,
    distances_above_median,
    normal_scores,
    threshold,
)
from planish.minder.frame import F32, I64, Frame, Mask
from planish.minder.preprocess import Limits, Prepared, prepare
from planish.minder.result import Evidence, Finding, Result

_BLOCK_WINDOWS = 64


@dataclass(frozen=True)
class Models:
    """What a call needs besides the frame."""

    denoisers: Mapping[str, Denoiser]
    """By metric; a metric without one is skipped."""
    limits: Limits = field(default_factory=dict)
    """Of metrics whose limits are fitted."""


@dataclass(frozen=True)
class Job:
    """What is known of a job besides its metrics."""

    stages: Mapping[str, str] = field(default_factory=dict)
    """Machine to pipeline stage."""
    baseline: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric to machine to what it has differed by in healthy history (see `baseline.py`)."""
    started: int = 0
    """Unix seconds of the last start; 0 when not known."""


@dataclass
class Trace:
    """One metric, window by window; row w is the window that begins at second w of the frame."""

    sums: F32
    """[W, N], sum of the distances to the machines that each is compared with."""
    scores: F32
    """[W, N], normal scores."""
    above: F32
    """[W, N], distance above the median machine in normalised units."""
    present: Mask
    """[W, N], machines of which the whole window is known."""


def detect(frame: Frame, models: Models, config: MinderConfig, job: Job | None = None) -> Result:
    """Look at one frame.

    Args:
        frame: of one job; the window of a call, e.g. 15 minutes.
        models: denoisers and limits.
        config: of the monitor.
        job: stages, baseline and start.

    Returns:
        Findings in the order in which they were confirmed; none when status is not `fault`.
    """
    started = time.perf_counter()
    job = job or Job()
    if frame.num_machines < config.detect.min_machines:
        return _result(frame, config, "too_few_machines", started)
    frame = _after_warmup(frame, config.detect, job)
    prepared = prepare(frame, config, models.limits)
    traces = {
        name: trace(prepared, name, models.denoisers[name], config.detect, job)
        for name in config.detect.metrics
        if name in prepared.values and name in models.denoisers
    }
    return conclude(prepared, traces, models, config, started)


def _after_warmup(frame: Frame, config: DetectConfig, job: Job) -> Frame:
    if not (job.started and config.warmup_seconds and frame.num_seconds):
        return frame
    return frame.slice(max(int(frame.ts[0]), job.started + config.warmup_seconds), 1 << 60)


def trace(
    prepared: Prepared, name: str, denoiser: Denoiser, config: DetectConfig, job: Job
) -> Trace:
    """Compare the machines by one metric, in every window of the frame."""
    values = _without_baseline(prepared, name, config, job)
    windows = windows_of(values)
    unknown = windows_of(prepared.masked[name].astype(np.float32))
    present: Mask = unknown.max(axis=2, initial=0.0) == 0.0
    count, machines = windows.shape[:2]
    empty = np.zeros((3, count, machines), np.float32)
    result = Trace(empty[0], empty[1], empty[2], present)
    groups = comparison_groups(prepared.frame.machines, config, job)
    for start in range(0, count, _BLOCK_WINDOWS):
        rows = slice(start, start + _BLOCK_WINDOWS)
        block = np.ascontiguousarray(windows[rows]).reshape(-1, WINDOW)
        embedded = denoiser.embed(block).reshape(-1, machines, _width(denoiser, block))
        for columns in groups:
            compare(result, rows, columns, embedded[:, columns], config)
    return result


def _width(denoiser: Denoiser, block: F32) -> int:
    return denoiser.embed(block[:1]).shape[1] if len(block) else WINDOW


def compare(result: Trace, rows: slice, columns: I64, embedded: F32, config: DetectConfig) -> None:
    """Fill a block of windows for the machines of one comparison group."""
    here = result.present[rows][:, columns]
    sums = distance_sums(embedded, config.distance, here)
    result.sums[rows, columns] = sums
    result.scores[rows, columns] = normal_scores(sums, here)
    result.above[rows, columns] = distances_above_median(sums, WINDOW, here)


def comparison_groups(machines: Sequence[str], config: DetectConfig, job: Job) -> list[I64]:
    """Return the columns of machines that are compared with each other.

    Stages of at least four machines stand alone; everything else is one group, and so is all where
    one stage would be too small.
    """
    everything = np.arange(len(machines))
    if not (config.compare_within_stage and job.stages):
        return [everything]
    stages = [job.stages.get(name, "") for name in machines]
    groups = [np.flatnonzero([s == stage for s in stages]) for stage in sorted(set(stages))]
    if len(groups) < 2 or min(map(len, groups)) < max(4, config.min_machines):
        return [everything]
    return groups


def _without_baseline(prepared: Prepared, name: str, config: DetectConfig, job: Job) -> F32:
    values = prepared.values[name]
    known = job.baseline.get(name, {}) if config.role_baseline else {}
    if not known:
        return values
    offsets = np.array([known.get(m, 0.0) for m in prepared.frame.machines], np.float32)
    shifted: F32 = np.clip(values - offsets, 0.0, 1.0)
    return shifted


def conclude(
    prepared: Prepared,
    traces: Mapping[str, Trace],
    models: Models,
    config: MinderConfig,
    started: float,
) -> Result:
    """Turn the traces of all metrics into findings."""
    rules = config.detect
    frame = prepared.frame
    silent = np.zeros(frame.num_machines, bool)
    if config.preprocess.silent_after_seconds:
        silent = prepared.silent_seconds > config.preprocess.silent_after_seconds
    theta = threshold(rules.theta, rules.kappa, frame.num_machines)
    facts = {
        "skipped": {
            **prepared.skipped,
            **{name: "no model" for name in prepared.values if name not in traces},
        },
        "model_ids": {n: f"{models.denoisers[n].name}:{models.denoisers[n].version}"
                      for n in traces},
        "silent": tuple(np.array(frame.machines)[silent].tolist()),
        "theta": theta,
    }  # fmt: skip
    if silent.mean() > config.preprocess.outage_share:
        return _result(frame, config, "outage", started, **facts)
    findings = silent_findings(prepared, silent, rules)
    excluded = {f.machine for f in findings}
    if not traces and not findings:
        return _result(frame, config, "skipped", started, **facts)
    for _ in range(rules.max_rounds if rules.exhaustive else 1):
        found = _round(frame, traces, rules, excluded)
        findings += found
        excluded |= {f.machine for f in found}
        if not found or not rules.exhaustive:
            break
    findings = _as_job_wide(findings, frame, rules)
    findings.sort(key=lambda f: (f.confirmed_at, f.machine))
    status = "fault" if findings else "ok"
    return _result(frame, config, status, started, findings=tuple(findings), **facts)


def _round(
    frame: Frame, traces: Mapping[str, Trace], rules: DetectConfig, excluded: set[str]
) -> list[Finding]:
    """Go through the metrics once, without the machines that were found before."""
    gone = np.array([name in excluded for name in frame.machines])
    found: dict[str, Finding] = {}
    for name, one in traces.items():
        theta = threshold(rules.theta, rules.kappa, int((~gone).sum()))
        now = rescored(one, gone)
        candidates = candidates_of(now, theta, floor_of(name, rules))
        masked = (~now.present[:, ~gone]).mean(axis=1) > rules.max_masked_share
        run = first_long_run(
            runs(candidates, masked, gap_tolerance=rules.gap_tolerance), rules.continuity_seconds
        )
        if run is None:
            continue
        finding = _finding(frame, traces, name, now, run, rules, gone)
        if finding.machine not in found:
            found[finding.machine] = finding
        if not rules.exhaustive:
            break
    return sorted(found.values(), key=lambda f: (f.confirmed_at, f.machine))


def rescored(one: Trace, gone: Mask) -> Trace:
    """Return a trace without some machines; their distances no longer weigh in scores."""
    if not gone.any():
        return one
    present = one.present & ~gone
    return Trace(
        one.sums,
        normal_scores(one.sums, present),
        distances_above_median(one.sums, WINDOW, present),
        present,
    )


def floor_of(name: str, rules: DetectConfig) -> float:
    """Return the smallest distance above the median that counts; 0 when floors are off."""
    if rules.floors is None:
        return 0.0
    return rules.floors.get(name, rules.default_floor)


def candidates_of(one: Trace, theta: float, floor: float) -> I64:
    """Return for each window the machine with the largest score if it will do, or `NOBODY`.

    Of equal scores the first machine by name wins.
    """
    if not one.scores.size:
        return np.zeros(len(one.scores), np.int64)
    scores = np.where(one.present, one.scores, -np.inf)
    best = scores.argmax(axis=1)
    rows = np.arange(len(best))
    good = (scores[rows, best] > theta) & (one.above[rows, best] > floor)
    return np.where(good, best, NOBODY).astype(np.int64)


def _finding(
    frame: Frame,
    traces: Mapping[str, Trace],
    name: str,
    one: Trace,
    run: Run,
    rules: DetectConfig,
    gone: Mask,
) -> Finding:
    start = int(frame.ts[run.first])
    score = one.scores[run.first : run.last + 1, run.machine]
    evidence = {
        other: _evidence(rescored(t, gone), run.machine, rules, other, gone)
        for other, t in traces.items()
    }
    return Finding(
        machine=frame.machines[run.machine],
        metric=name,
        kind="dissimilar",
        run_start=start,
        confirmed_at=start + rules.continuity_seconds + WINDOW - 1,
        duration_s=float(run.last - run.first + WINDOW),
        score_mean=float(score[one.present[run.first : run.last + 1, run.machine]].mean()),
        evidence=evidence,
    )


def _evidence(one: Trace, machine: int, rules: DetectConfig, name: str, gone: Mask) -> Evidence:
    theta = threshold(rules.theta, rules.kappa, int((~gone).sum()))
    mine = candidates_of(one, theta, floor_of(name, rules)) == machine
    distance = float(np.median(one.above[mine, machine])) if mine.any() else 0.0
    return Evidence(float(mine.mean()) if len(mine) else 0.0, distance)


def silent_findings(prepared: Prepared, silent: Mask, rules: DetectConfig) -> list[Finding]:
    """Return the machines that have been silent for longer than the continuity."""
    frame = prepared.frame
    end = int(frame.ts[-1]) + 1 if frame.num_seconds else 0
    return [
        Finding(
            machine=frame.machines[column],
            metric="",
            kind="silent",
            run_start=end - int(prepared.silent_seconds[column]),
            confirmed_at=end - int(prepared.silent_seconds[column]) + rules.continuity_seconds,
            duration_s=float(prepared.silent_seconds[column]),
            score_mean=0.0,
        )
        for column in np.flatnonzero(silent)
        if prepared.silent_seconds[column] > rules.continuity_seconds
    ]


def _as_job_wide(findings: list[Finding], frame: Frame, rules: DetectConfig) -> list[Finding]:
    """Replace many findings by one of the whole job."""
    limit = max(2.0, rules.job_wide_share * frame.num_machines)
    if not rules.exhaustive or len(findings) <= limit:
        return findings
    return [
        Finding(
            machine="",
            metric="",
            kind="job_wide",
            run_start=min(f.run_start for f in findings),
            confirmed_at=max(f.confirmed_at for f in findings),
            duration_s=max(f.duration_s for f in findings),
            score_mean=float(np.mean([f.score_mean for f in findings])),
            machines=tuple(sorted(f.machine for f in findings)),
        )
    ]


def _result(
    frame: Frame, config: MinderConfig, status: str, started: float, **facts: object
) -> Result:
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
