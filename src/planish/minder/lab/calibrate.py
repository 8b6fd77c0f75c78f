"""Calibration: fits limits, thresholds and floors to the recorded traces of a site.

Limits are quantiles of the metrics of healthy jobs. For thresholds and floors, every trace is
replayed once and its scores and distances are kept. Another threshold then needs only comparisons;
side effects of naming a machine stay as in the replay. All pairs of theta and kappa are tried; then
the floors are improved one metric at a time until none gets better.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from planish.base.errors import ConfigError
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.continuity import job_wide_limit
from planish.minder.detect.denoise import WINDOW, Models
from planish.minder.detect.detector import Detector
from planish.minder.detect.distances import (
    MAX_MASKED_SHARE,
    Trace,
    activity,
    fleet_median,
    floor_of,
    floors_of,
    median_of_known,
    threshold,
)
from planish.minder.detect.frame import F32, Mask
from planish.minder.detect.job_monitor import JobMonitor
from planish.minder.detect.metrics_table import METRICS
from planish.minder.detect.preprocess import fit_limits, prepare
from planish.minder.detect.runs import Rule, long_runs, runs_of
from planish.minder.lab.cases import Case, read_case
from planish.minder.lab.evaluate import fault_of, table
from planish.minder.lab.replay import Alarm
from planish.minder.lab.score import CaseOutcome, Score, score

LEAST_FAULTS = 10
"""Fewest labelled faults to which thresholds are fitted; with fewer they would overfit."""
THETAS = (1.5, 2.0, 2.5, 3.0)
KAPPAS = (0.6, 0.7, 0.8, 0.9, 0.95)
FLOORS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.10, 0.12)
_ROUNDS = 3
_FIGURES = ("precision", "recall", "f1")

SiteLimits = Mapping[str, tuple[float, float]]
"""Map from metric to its limits, in its unit."""
Hits = tuple[tuple[str, int], ...]
"""Pairs of a machine and the unix second of the call that would name it."""


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the score and floors of the distance."""

    theta: float
    kappa: float | None
    floors: Mapping[str, float]

    def of_job(self, machines: int) -> float:
        """Return the threshold of the score in a job with N machines."""
        return round(threshold(self.theta, self.kappa, machines), 6)


@dataclass(frozen=True)
class Recorded:
    """One replayed job, with the machines that each combination of thresholds would name."""

    outcome: CaseOutcome
    """Outcome with only the alarms that no threshold changes: silent machines."""
    hits: Mapping[tuple[str, float, float], Hits]
    """Map from (metric, threshold of the score, floor) to the machines that would be named."""
    job_wide_limit: float
    """Most machines that are named one by one; more are an event of the whole job."""
    window_seconds: int


@dataclass(frozen=True)
class Calibrated:
    """The best thresholds, and their scores on the jobs they were fitted to."""

    start: Thresholds
    best: Thresholds
    scores: tuple[Score, Score]
    """Scores over all faults at the start and at the best, counting first alarms."""
    tried: int
    """Number of thresholds that were tried."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        start, best = (
            {**asdict(one), **{name: getattr(reached, name).value for name in _FIGURES}}
            for one, reached in zip((self.start, self.best), self.scores, strict=True)
        )
        return {"tried": self.tried, "start": start, "best": best}

    def markdown(self) -> str:
        """Return start and best as a Markdown table."""
        both = (self.start, self.best)
        rows: list[tuple[object, ...]] = [
            (name, *(getattr(one, name) for one in both)) for name in ("theta", "kappa")
        ]
        rows += [(f"floor of {n}", *(one.floors[n] for one in both)) for n in self.best.floors]
        rows += [(name, *(getattr(reached, name) for reached in self.scores)) for name in _FIGURES]
        return table("| | start | best |", rows) + "\n"


def calibrate(
    recorded: Sequence[Recorded], config: MinderConfig, *, min_precision: float = 0.9
) -> Calibrated:
    """Return the thresholds with the largest F1 among those with `min_precision`, if there are any.

    `recorded` are jobs that were replayed with `config`. Among equal F1, the higher precision wins,
    then the higher floors.
    """
    rules = config.detect
    metrics = sorted({metric for job in recorded for metric, _, _ in job.hits})
    start = Thresholds(rules.theta, rules.kappa, {name: floor_of(name, rules) for name in metrics})
    scores: dict[str, Score] = {}

    def reach(one: Thresholds) -> Score:
        key = repr((one.theta, one.kappa, sorted(one.floors.items())))
        if key not in scores:
            scores[key] = score([outcome_with(job, one) for job in recorded], "first")
        return scores[key]

    def order(one: Thresholds) -> tuple[float, ...]:
        precision, f1 = reach(one).precision.value, reach(one).f1.value
        return (precision >= min_precision, round(f1, 4), precision, sum(one.floors.values()))

    grid = [replace(start, theta=t, kappa=k) for t, k in itertools.product(THETAS, KAPPAS)]
    best = max([start, *grid], key=order)
    for _ in range(_ROUNDS):
        before = best
        for name in best.floors:
            choices = [replace(best, floors={**best.floors, name: floor}) for floor in FLOORS]
            best = max([best, *choices], key=order)
        if best == before:
            break
    return Calibrated(start, best, (reach(start), reach(best)), tried=len(scores))


def outcome_with(job: Recorded, thresholds: Thresholds) -> CaseOutcome:
    """Return the outcome of a recorded job under other thresholds."""
    theta = thresholds.of_job(job.outcome.machines)
    first = {alarm.machine: alarm for alarm in job.outcome.alarms}
    for metric, floor in thresholds.floors.items():
        for machine, time in job.hits.get((metric, theta, floor), ()):
            if machine not in first or time < first[machine].time:
                first[machine] = Alarm(machine, time, "dissimilar", metric)
    alarms: list[Alarm] = []
    for alarm in sorted(first.values(), key=lambda alarm: (alarm.time, alarm.machine)):
        recent = [a for a in first.values() if 0 <= alarm.time - a.time < job.window_seconds]
        if len(recent) <= job.job_wide_limit:
            alarms.append(alarm)
        elif not any(other.kind == "job_wide" for other in alarms):
            alarms.append(Alarm("", alarm.time, "job_wide", ""))
    return replace(job.outcome, alarms=tuple(alarms))


@dataclass
class _Kept:
    """One metric of a job over all calls; row w is the window that begins at second w."""

    scores: F32
    above: F32
    """[W, N], distance above the machine's usual distance."""
    present: Mask
    resting: Mask
    rule: Rule

    def take(self, rows: slice, trace: Trace, above: F32, rule: Rule) -> None:
        """Store the last rows of a call; where calls overlap, the larger distance is kept."""
        last = slice(rows.start - rows.stop, None)
        more = trace.present[last] & (above[last] > self.above[rows])
        self.scores[rows] = np.where(more, trace.scores[last], self.scores[rows])
        self.above[rows] = np.where(more, above[last], self.above[rows])
        self.present[rows] |= trace.present[last]
        self.resting[rows] |= rule.resting[last]
        self.rule = replace(rule, resting=self.resting)


def record(source: Case | Path, models: Models, config: MinderConfig) -> Recorded:
    """Replay one job (or that of a file) and return it with the machines that each grid point
    names.

    `config` has the thresholds at which the search starts.
    """
    case = read_case(source) if isinstance(source, Path) else source
    frame, detector = case.frame, Detector(models, config)
    monitor = JobMonitor(frame.job, models, config, detector=detector)
    start, shape = int(frame.ts[0]), (max(0, frame.num_seconds - WINDOW + 1), frame.num_machines)
    kept: dict[str, _Kept] = {}
    silent: dict[str, Alarm] = {}
    step = config.service.interval_seconds
    for end in range(start + step, start + frame.num_seconds + 1, step):
        result = monitor.call(
            frame.slice(end - config.service.window_seconds, end),
            stages=case.stages,
            waiting=case.waiting,
            board=case.board,
        )
        for finding in result.findings:
            if finding.kind == "silent":
                alarm = Alarm(finding.machine, end, finding.kind, "")
                silent.setdefault(finding.machine, alarm)
        last = end - start - WINDOW + 1
        for name, trace in detector.last.items():
            new, prepared = min(last, len(trace.scores)), detector.prepared
            if new <= 0 or trace.scores.shape[1] != frame.num_machines or prepared is None:
                continue
            share = activity(name, prepared, config.detect)
            floors = floors_of(name, prepared.frame.machines, share, config.detect, monitor.known)
            lift = (floors - floor_of(name, config.detect)).astype(np.float32)
            rule = Rule.of(name, prepared, share, config.detect)
            if name not in kept:
                empty, flags = np.zeros(shape, np.float32), np.zeros(shape, bool)
                kept[name] = _Kept(empty, empty - np.inf, flags, np.zeros(shape[0], bool), rule)
            kept[name].take(slice(last - new, last), trace, trace.above - lift, rule)
    outcome = CaseOutcome(
        case=case.name,
        fault=fault_of(case, config.detect.metrics),
        machines=frame.num_machines,
        seconds=frame.num_seconds,
        alarms=tuple(sorted(silent.values(), key=lambda alarm: (alarm.time, alarm.machine))),
    )
    limit = job_wide_limit(frame.num_machines)
    hits = _hits(kept, case, config)
    return Recorded(outcome, hits, limit, config.service.window_seconds)


def _hits(
    kept: Mapping[str, _Kept], case: Case, config: MinderConfig
) -> dict[tuple[str, float, float], Hits]:
    """Return for each grid point the machines that are candidates for long enough, with the time of
    the next call.
    """
    rules, step, start = config.detect, config.service.interval_seconds, int(case.frame.ts[0])
    machines = case.frame.machines
    floors = sorted({*FLOORS, *(floor_of(name, rules) for name in kept)})
    pairs = [(rules.theta, rules.kappa), *itertools.product(THETAS, KAPPAS)]
    thetas = sorted({Thresholds(t, k, {}).of_job(len(machines)) for t, k in pairs})
    hits: dict[tuple[str, float, float], Hits] = {}
    for name, metric in kept.items():
        unknown = (~metric.present).mean(axis=1) > MAX_MASKED_SHARE
        for theta, floor in itertools.product(thetas, floors):
            far = metric.present & (metric.above > floor)
            runs = runs_of(far & (metric.scores > theta), metric.rule, unknown, metric.present, far)
            named = []
            for run in long_runs(runs, metric.rule):
                confirmed = run.first + metric.rule.needed[run.machine] + WINDOW
                named.append((machines[run.machine], start + step * math.ceil(confirmed / step)))
            hits[name, theta, floor] = tuple(named)
    return hits


def fitted_limits(cases: Sequence[Case], metrics: Sequence[str]) -> dict[str, SiteLimits]:
    """Return the limits of healthy traces, for the metrics that have no fixed limits.

    Returns:
        Board model to its limits; "" for jobs whose boards are not known.

    Raises:
        ConfigError: there is no trace of a healthy job.
    """
    healthy = [case for case in cases if not case.truth.faulty]
    if not healthy:
        raise ConfigError(
            "`--traces` must hold a trace of a healthy job, to which limits are fitted, got "
            f"{len(cases)} with a fault; record some healthy hours"
        )
    result: dict[str, SiteLimits] = {}
    for board in sorted({case.board for case in healthy}):
        frames = [case.frame for case in healthy if case.board == board]
        limits = {}
        for name in metrics:
            if METRICS[name].limits is None and any(name in frame.values for frame in frames):
                low, high = fit_limits(frames, METRICS[name])
                if METRICS[name].transform == "log1p":
                    low, high = float(np.expm1(low)), float(np.expm1(high))
                limits[name] = (float(f"{low:.6g}"), float(f"{high:.6g}"))
        result[board] = {name: pair for name, pair in limits.items() if pair[0] < pair[1]}
    return result


def fitted_roles(cases: Sequence[Case], models: Models, config: MinderConfig) -> dict[str, float]:
    """Return 1.25 times the largest lasting difference of a healthy machine, by metric."""
    most: dict[str, float] = {}
    for case in (case for case in cases if not case.truth.faulty):
        prepared = prepare(case.frame, config, models.limits, board=case.board)
        for name, values in prepared.values.items():
            masked = prepared.masked[name]
            away = values - fleet_median(values, masked)[:, None]
            lasting = np.abs(median_of_known(away.T, ~masked.T))
            widest = float(np.nanmax(lasting, initial=floor_of(name, config.detect)))
            most[name] = max(most.get(name, 0.0), widest)
    return {name: float(f"{1.25 * widest:.3g}") for name, widest in most.items()}


def site_tables(
    limits: Mapping[str, SiteLimits],
    thresholds: Thresholds | None,
    roles: Mapping[str, float] | None = None,
    metrics: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the fitted values as tables of a configuration; empty tables are left out."""
    boards = {board: dict(pairs) for board, pairs in limits.items()}
    tables: dict[str, Any] = {"limits": boards.pop("")} if "" in boards else {}
    detect: dict[str, Any] = {"role_limits": dict(roles or {})}
    if thresholds is not None:
        kappa = {} if thresholds.kappa is None else {"kappa": thresholds.kappa}
        detect |= {"theta": thresholds.theta, **kappa, "floors": dict(thresholds.floors)}
    detect["metrics"] = list(metrics)
    tables |= {"boards": boards, "detect": {name: part for name, part in detect.items() if part}}
    return {name: part for name, part in tables.items() if part or name == "limits"}


def toml_of(table: Mapping[str, Any], name: str = "") -> str:
    """Return a table of numbers, lists and further tables as TOML."""
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    rows = [f"{k} = {json.dumps(value)}\n" for k, value in table.items() if k not in inner]
    if name and (rows or not inner):
        rows.insert(0, f"[{name}]\n")
    for key, value in inner.items():
        quoted = key if key.isidentifier() and key.isascii() else json.dumps(key)
        rows.append(toml_of(value, f"{name}.{quoted}" if name else quoted))
    return "".join(rows)
