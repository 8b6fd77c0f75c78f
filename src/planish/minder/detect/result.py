"""Results of calls, as objects and as JSON."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import numpy as np

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.frame import Frame

Kind = Literal["dissimilar", "silent", "job_wide"]
Status = Literal["ok", "fault", "outage", "skipped", "too_few_machines"]


@dataclass(frozen=True)
class Evidence:
    """Evidence of one metric that a machine differs."""

    candidate_share: float
    """Share of the frame's windows in which the machine was a candidate."""
    median_distance: float
    """Median over those windows of its distance above the median machine, in normalised units."""


@dataclass(frozen=True)
class Finding:
    """One faulty machine, or an event of the whole job."""

    machine: str
    """Node name; empty for `job_wide`."""
    metric: str
    """Metric whose run confirmed the machine; empty for `silent` and `job_wide`."""
    kind: Kind
    run_start: int
    confirmed_at: int
    """Unix second at which it had differed for long enough."""
    duration_s: float
    """Seconds from `run_start` to the last second in which it differed."""
    score_mean: float
    """Mean normal score over the run."""
    evidence: dict[str, Evidence] = field(default_factory=dict)
    """Evidence by metric."""
    machines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A machine that differs at the end of the frame, whether named already or not."""

    machine: str
    metric: str
    since: int
    seconds: int
    """Seconds for which it has been a candidate."""
    score: float
    """Normal score in the last window of the run."""


@dataclass(frozen=True)
class Result:
    """The result of one call. Equal frames give equal results except for `call_seconds`."""

    job: str
    status: Status
    start: int
    end: int
    """Unix second after the last second of the frame."""
    n_machines: int
    profile: str
    theta: float
    """Threshold of the normal score for `n_machines`."""
    distance: str
    findings: tuple[Finding, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    """Map from unused metric to the reason."""
    known: dict[str, float] = field(default_factory=dict)
    """Share of seconds that enough machines know, by metric, for metrics that lack samples."""
    model_ids: dict[str, str] = field(default_factory=dict)
    """Map from metric to denoiser and version."""
    silent: tuple[str, ...] = ()
    """Machines without a sample at the end of the frame."""
    candidates: tuple[Candidate, ...] = ()
    """Machines that differ at the end of the frame."""
    clipped: dict[str, float] = field(default_factory=dict)
    """Map from metric to the share of its values outside the limits."""
    broken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Map from metric to machines whose exporter is broken, see `Prepared.broken`."""
    intervals: dict[str, float] = field(default_factory=dict)
    """Map from metric to the seconds between its samples, if more than two. A machine must differ
    for longer by about 1.5 times as much."""
    turns: dict[str, dict[str, int]] = field(default_factory=dict)
    """Longest turn in seconds, by metric and machine. A turn is a time in which a machine differed
    and then no longer did. The machine "" is a part of the job."""
    call_seconds: float = 0.0

    @property
    def is_judged(self) -> bool:
        """True if the machines could be compared."""
        return self.status in ("ok", "fault")

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


def job_wide(findings: Sequence[Finding]) -> Finding:
    """Return one finding of the whole job in place of findings about many machines."""
    return Finding(
        machine="",
        metric="",
        kind="job_wide",
        run_start=min(finding.run_start for finding in findings),
        confirmed_at=max(finding.confirmed_at for finding in findings),
        duration_s=max(finding.duration_s for finding in findings),
        score_mean=float(np.mean([finding.score_mean for finding in findings])),
        machines=tuple(sorted({finding.machine for finding in findings})),
    )


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
        distance="euclidean",
        call_seconds=time.perf_counter() - started,
        **known,  # type: ignore[arg-type]
    )
