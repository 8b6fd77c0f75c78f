"""The result of a call, as an object and as JSON."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import Literal

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.frame import Frame

Kind = Literal["dissimilar", "silent", "job_wide", "telemetry"]
"""`telemetry`: what measures the machines has failed, and nothing is known of them."""
Status = Literal["ok", "fault", "outage", "skipped", "too_few_machines"]


@dataclass(frozen=True)
class Evidence:
    """How one metric shows that a machine differs."""

    candidate_share: float
    """Share of the windows of the frame in which it was the candidate."""
    median_distance: float
    """Median over those windows of its distance above the median machine, normalised units."""


@dataclass(frozen=True)
class Finding:
    """One faulty machine, or an event of the whole job."""

    machine: str
    """Node name; empty for `job_wide`."""
    metric: str
    """Metric that confirmed it; empty for `silent` and `job_wide`."""
    kind: Kind
    run_start: int
    confirmed_at: int
    """Unix seconds at which it had differed for long enough."""
    duration_s: float
    """From `run_start` to the last second in which it differed."""
    score_mean: float
    """Mean normal score over the run."""
    evidence: dict[str, Evidence] = field(default_factory=dict)
    """By metric."""
    machines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Candidate:
    """A machine that is unlike its peers at the end of the frame, confirmed or not yet."""

    machine: str
    metric: str
    since: int
    seconds: int
    """For how long it has been candidate."""
    score: float
    """Normal score in the last window of the run."""


@dataclass(frozen=True)
class Result:
    """The answer of one call; equal frames give equal results but for `call_seconds`."""

    job: str
    status: Status
    start: int
    end: int
    """Second after the last."""
    n_machines: int
    profile: str
    theta: float
    """Threshold of the normal score for `n_machines`."""
    distance: str
    findings: tuple[Finding, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict)
    """Metrics that were not used, with the reason."""
    known: dict[str, float] = field(default_factory=dict)
    """Those that lack samples to the share of seconds that is known of enough machines."""
    model_ids: dict[str, str] = field(default_factory=dict)
    """Metric to denoiser and version."""
    silent: tuple[str, ...] = ()
    """Machines that give no sample at the end of the frame."""
    candidates: tuple[Candidate, ...] = ()
    """Machines that are unlike their peers at the end of the frame."""
    clipped: dict[str, float] = field(default_factory=dict)
    """Metric to the share of its values beyond the limits."""
    broken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Metric to machines whose exporter is broken, see `Prepared.broken`."""
    intervals: dict[str, float] = field(default_factory=dict)
    """Metric to the seconds between its samples, where they are more than two; a machine must
    differ for so much longer."""
    turns: dict[str, dict[str, int]] = field(default_factory=dict)
    """Metric to machine to the longest time for which it differed and then no longer did; the
    machine "" stands for a part of them."""
    call_seconds: float = 0.0

    @property
    def is_judged(self) -> bool:
        """Whether machines could be compared."""
        return self.status in ("ok", "fault")

    def to_json(self) -> str:
        """Return canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


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
