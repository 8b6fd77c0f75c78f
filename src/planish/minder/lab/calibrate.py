"""Find thresholds and floors on jobs that no evaluation ever sees.

Every job is replayed once with the settings to begin from. Its scores and distances are kept as
its calls saw them, so that another threshold or floor costs comparisons of numbers only; what
follows from naming a machine (scores without it, baselines that wait) stays as it was in that
replay. Theta and kappa are tried together; then the floor of one metric after the other is improved
until none can be.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.continuity import long_runs
from planish.minder.detect.denoise import WINDOW
from planish.minder.detect.distances import threshold
from planish.minder.detect.frame import F32, Mask
from planish.minder.detect.session import JobMonitor
from planish.minder.detect.traces import Trace, floor_of
from planish.minder.lab.evaluate import Plan, Progress, Wanted, case_of, each_case, fault_of
from planish.minder.lab.evaluate_report import table
from planish.minder.lab.evaluate_score import Named, Outcome, Score, score
from planish.minder.lab.simulator import Case
from planish.minder.lab.variants import Variant

THETAS = (1.5, 2.0, 2.5, 3.0)
KAPPAS = (0.6, 0.7, 0.8, 0.9, 0.95)
FLOORS = (0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.10, 0.12)
_ROUNDS = 3

Point = tuple[str, float, float]
"""Metric, threshold of the score for the job's machines, floor."""
Hits = tuple[tuple[str, int], ...]
"""Machines and the unix seconds of the calls that would name them."""


@dataclass(frozen=True)
class Settings:
    """What is looked for."""

    theta: float
    kappa: float | None
    floors: Mapping[str, float]


@dataclass(frozen=True)
class Recorded:
    """One replayed job, and who would be named at each point of the grid."""

    outcome: Outcome
    """With the alerts that depend on no threshold: silent machines."""
    hits: Mapping[Point, Hits]
    job_wide_limit: float
    """More machines than this are an event of the whole job."""
    window_seconds: int


@dataclass(frozen=True)
class Calibrated:
    """The best settings, and what they reach on the jobs they were found on."""

    start: Settings
    best: Settings
    scores: tuple[Score, Score]
    """Over all faults, at the start and at the best; first alerts."""
    tried: int

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        named = zip(("start", "best"), (self.start, self.best), self.scores, strict=True)
        return {
            "tried": self.tried,
            **{
                name: {
                    "theta": one.theta,
                    "kappa": one.kappa,
                    "floors": dict(one.floors),
                    "precision": found.precision.value,
                    "recall": found.recall.value,
                    "f1": found.f1.value,
                }
                for name, one, found in named
            },
        }

    def markdown(self) -> str:
        """Return both as a table."""
        both = (self.start, self.best)
        rows: list[tuple[object, ...]] = [
            ("theta", *(one.theta for one in both)),
            ("kappa", *(one.kappa for one in both)),
        ]
        for name in self.best.floors:
            rows.append((f"floor of {name}", *(one.floors[name] for one in both)))
        for name in ("precision", "recall", "f1"):
            rows.append((name, *(getattr(found, name) for found in self.scores)))
        return table("| | start | best |", rows) + "\n"


def calibrate(
    plan: Plan,
    wanted: Sequence[Wanted],
    *,
    workers: int = 1,
    min_precision: float = 0.9,
    progress: Progress | None = None,
) -> Calibrated:
    """Return the settings with the largest F1 among those that are precise enough.

    Args:
        plan: of one variant.
        wanted: the jobs.
        workers: processes.
        min_precision: least precision, if any setting reaches it.
        progress: called after each job.
    """
    (variant,) = plan.build().values()
    recorded = list(each_case(plan, wanted, _record, workers=workers, progress=progress))
    metrics = sorted({point[0] for one in recorded for point in one.hits})
    rules = variant.config.detect
    start = Settings(rules.theta, rules.kappa, {name: floor_of(name, rules) for name in metrics})
    return search(recorded, start, min_precision)


def search(recorded: Sequence[Recorded], start: Settings, min_precision: float) -> Calibrated:
    """Look for the best point of the grid.

    Of points with an equal F1 the more precise one wins, then the one with higher floors.
    """
    tried = 0
    seen: dict[str, tuple[tuple[float, ...], Score]] = {}

    def rate(one: Settings) -> tuple[float, ...]:
        nonlocal tried
        key = repr((one.theta, one.kappa, sorted(one.floors.items())))
        if key not in seen:
            tried += 1
            found = rated(recorded, one)
            precise = found.precision.value >= min_precision
            order = (
                float(precise),
                round(found.f1.value, 4),
                found.precision.value,
                sum(one.floors.values()),
            )
            seen[key] = (order, found)
        return seen[key][0]

    best = max(
        [start, *(replace(start, theta=t, kappa=k) for t, k in itertools.product(THETAS, KAPPAS))],
        key=rate,
    )
    for _ in range(_ROUNDS):
        before = best
        for name in best.floors:
            choices = [replace(best, floors={**best.floors, name: floor}) for floor in FLOORS]
            best = max([best, *choices], key=rate)
        if best == before:
            break
    ends = (rated(recorded, start), rated(recorded, best))
    return Calibrated(start, best, ends, tried)


def rated(recorded: Sequence[Recorded], settings: Settings) -> Score:
    """Return the score of some settings."""
    return score([named_by(one, settings) for one in recorded], "first")


def named_by(one: Recorded, settings: Settings) -> Outcome:
    """Return what a job would have come to with other settings."""
    theta = _theta(settings.theta, settings.kappa, one.outcome.machines)
    first = {alert.machine: alert for alert in one.outcome.alerts}
    for metric, floor in settings.floors.items():
        for machine, time in one.hits.get((metric, theta, floor), ()):
            if machine not in first or time < first[machine].time:
                first[machine] = Named(machine, time, "dissimilar", metric)
    alerts: list[Named] = []
    for alert in sorted(first.values(), key=lambda found: (found.time, found.machine)):
        together = [
            other
            for other in first.values()
            if alert.time - one.window_seconds < other.time <= alert.time
        ]
        if len(together) <= one.job_wide_limit:
            alerts.append(alert)
        elif not any(known.kind == "job_wide" for known in alerts):
            alerts.append(Named("", alert.time, "job_wide", ""))
    return replace(one.outcome, alerts=tuple(alerts))


def _theta(theta: float, kappa: float | None, machines: int) -> float:
    return round(threshold(theta, kappa, machines), 6)


def _record(wanted: Wanted, variants: Mapping[str, Variant], plan: Plan) -> Recorded:
    (variant,) = variants.values()
    return record(case_of(wanted), variant)


@dataclass
class _Kept:
    """One metric of a job as the calls saw it; row w is the window that begins at second w."""

    scores: F32
    above: F32
    """Beyond the machine's usual distance."""
    present: Mask

    def take(self, rows: slice, trace: Trace, above: F32) -> None:
        """Note the last rows of a call; a window counts as the call saw it that saw most in it."""
        count = rows.stop - rows.start
        more = trace.present[-count:] & (above[-count:] > self.above[rows])
        self.scores[rows] = np.where(more, trace.scores[-count:], self.scores[rows])
        self.above[rows] = np.where(more, above[-count:], self.above[rows])
        self.present[rows] |= trace.present[-count:]


def record(case: Case, variant: Variant) -> Recorded:
    """Replay one job and note who would be named at each point of the grid."""
    frame, config, detector = case.frame, variant.config, variant.make()
    monitor = JobMonitor(frame.job, variant.models, config, detector=detector)
    start, count = int(frame.ts[0]), frame.num_machines
    windows = max(0, frame.num_seconds - WINDOW + 1)
    kept: dict[str, _Kept] = {}
    silent: dict[str, Named] = {}
    step = config.service.interval_seconds
    for end in range(start + step, start + frame.num_seconds + 1, step):
        usual = monitor.usual_distances() if config.detect.usual_distance else {}
        result = monitor.call(
            frame.slice(end - config.service.window_seconds, end),
            stages=case.stages,
            board=case.board,
        )
        for one in result.findings:
            if one.kind == "silent":
                silent.setdefault(one.machine, Named(one.machine, end, one.kind, ""))
        last = end - start - WINDOW + 1
        for name, trace in detector.last.items():
            empty = np.zeros((windows, count), np.float32)
            mine = kept.setdefault(name, _Kept(empty, empty - np.inf, empty.astype(bool)))
            known = usual.get(name, {})
            lift = np.array([max(0.0, known.get(m, 0.0)) for m in frame.machines], np.float32)
            new = min(last, len(trace.scores))
            if new > 0 and trace.scores.shape[1] == count:
                mine.take(slice(last - new, last), trace, trace.above - lift)
    alerts = tuple(sorted(silent.values(), key=lambda one: (one.time, one.machine)))
    outcome = Outcome(
        case.name or str(case.seed),
        fault_of(case, config.detect.metrics),
        count,
        frame.num_seconds,
        alerts,
    )
    limit = max(2.0, config.detect.job_wide_share * count)
    hits = _hits(kept, case, config)
    return Recorded(outcome, hits, limit, config.service.window_seconds)


def _hits(kept: Mapping[str, _Kept], case: Case, config: MinderConfig) -> dict[Point, Hits]:
    machines = case.frame.num_machines
    floors = sorted({*FLOORS, *(floor_of(name, config.detect) for name in kept)})
    pairs = [(config.detect.theta, config.detect.kappa), *itertools.product(THETAS, KAPPAS)]
    thetas = sorted({_theta(theta, kappa, machines) for theta, kappa in pairs})
    return {
        (name, theta, floor): _named(one, theta, floor, case, config)
        for name, one in kept.items()
        for theta in thetas
        for floor in floors
    }


def _named(one: _Kept, theta: float, floor: float, case: Case, config: MinderConfig) -> Hits:
    """Return who is candidate for long enough, and the call after it."""
    rules, start = config.detect, int(case.frame.ts[0])
    over = one.present & (one.scores > theta) & (one.above > floor)
    unknown = (~one.present).mean(axis=1) > rules.max_masked_share
    found = []
    for run in long_runs(
        over, unknown, rules.continuity_seconds, gap_tolerance=rules.gap_tolerance
    ):
        confirmed = run.first + rules.continuity_seconds + WINDOW
        step = config.service.interval_seconds
        time = start + step * math.ceil(confirmed / step)
        found.append((case.frame.machines[run.machine], time))
    return tuple(found)
