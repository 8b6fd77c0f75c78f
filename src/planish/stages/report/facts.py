"""What the report knows about a run: plain values, gathered once, drawn and written afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import PlanishError
from planish.run.avoid import AvoidedNode

WEIGHT = "num_generated_groups"
"""Metric of a shard that weighs its means."""


@dataclass(frozen=True)
class Task:
    """One stage attempt, from its log.

    Example:
        >>> Task("rollout", 3, 1, "done", 100.0, 2.5).end_seconds
        102.5
    """

    stage: str
    """Name of the stage."""
    iteration: int
    """1, 2, ...; 0 outside iterations."""
    shard: int
    """Index among parallel tasks."""
    state: str
    """running, done or failed."""
    start_seconds: float
    """Seconds since 1970."""
    seconds: float
    """Duration so far."""
    startup_seconds: float = 0.0
    """Process start and imports before `start_seconds`."""
    already_done: bool = False
    """The output stood there from an earlier attempt."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Scalars that the stage logged."""
    error: str = ""
    """Message of the failure."""

    @property
    def end_seconds(self) -> float:
        """Seconds since 1970 at which the attempt ended, or was last heard of."""
        return self.start_seconds + self.seconds

    @property
    def name(self) -> str:
        """How people call the task: `rollout 1 of iteration 3`."""
        shard = f" {self.shard}" if self.stage == "rollout" else ""
        return (
            f"{self.stage}{shard} of iteration {self.iteration}" if self.iteration else self.stage
        )


@dataclass(frozen=True)
class Saved:
    """A finished policy or train state."""

    kind: str
    """policy or state."""
    number: int
    """Policy version or optimizer step."""
    uri: str
    """Folder of its manifest."""
    sha256: str
    """Digest of the manifest."""

    @property
    def pin(self) -> str:
        """`<uri>#sha256=<digest>`."""
        return f"{self.uri}#sha256={self.sha256}"


@dataclass(frozen=True)
class Evaluation:
    """Scores of one policy version on the held-out prompts."""

    version: int
    """Policy version."""
    scalars: dict[str, float]
    """Scores by name."""
    sources: dict[str, dict[str, float]]
    """Scores by source and name."""


@dataclass(frozen=True)
class Sample:
    """One response with its verdict. All text is untrusted."""

    prompt_id: str
    """Id of the prompt."""
    prompt: str
    """Text of the prompt; empty when its set is missing."""
    answer: str
    """Ground truth."""
    response: str
    """What the model wrote."""
    is_correct: bool
    """The verifier's verdict."""
    extracted: str = ""
    """The answer that the verifier saw."""
    num_tokens: int = 0
    """Response length."""


@dataclass(frozen=True)
class Comparison:
    """Responses to one prompt by two policies, or by one."""

    title: str
    """What the reader should look at."""
    columns: Sequence[tuple[str, Sequence[Sample]]]
    """Heading and responses, left to right."""


@dataclass(frozen=True)
class Alert:
    """An anomaly that the monitor reported while the run was alive."""

    machine: str
    """Host."""
    metric: str
    """Metric that showed it."""
    score: float
    """Distance in the detector's unit."""
    first_second: float
    """Start of the evidence, seconds since 1970."""
    last_second: float
    """End of the evidence, seconds since 1970."""
    action: str
    """What was done."""
    kind: str = ""
    """dissimilar, silent or job_wide."""
    state: str = ""
    """As it was last told; `resolved` when it is over."""
    stage: str = ""
    """Stage that ran on the machine."""
    iteration: int = 0
    """1, 2, ...; 0 outside iterations."""


@dataclass
class RunFacts:
    """Everything that the report shows."""

    root: str
    """URI of the run."""
    run: dict[str, Any] = field(default_factory=dict)
    """`run.json`."""
    tasks: list[Task] = field(default_factory=list)
    """Newest attempt of each task, by start."""
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    """Iteration to the scalars of its update."""
    evaluations: list[Evaluation] = field(default_factory=list)
    """By policy version."""
    policies: list[Saved] = field(default_factory=list)
    """Finished exports by version."""
    states: list[Saved] = field(default_factory=list)
    """Finished train states by step."""
    alerts: list[Alert] = field(default_factory=list)
    """By first second."""
    avoided: list[AvoidedNode] = field(default_factory=list)
    """Nodes that following runs keep away from, where they are told to."""
    restart: str = ""
    """Whether this run is started again; empty where restarts are off or none was due."""
    curation: str = ""
    """Markdown of the curation report."""
    comparisons: list[Comparison] = field(default_factory=list)
    """Sample rollouts."""
    missing: list[str] = field(default_factory=list)
    """What could not be read, in words."""
    failure: PlanishError | None = None
    """Why nothing more could be read; None where the store answered to the end."""
    is_stopped: bool = False
    """An operator ended the run through the stop file."""

    @property
    def name(self) -> str:
        """Last part of the root."""
        return self.root.rstrip("/").rpartition("/")[2] or self.root

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Resolved configuration; empty when unknown."""
        config = self.run.get("config")
        return config if isinstance(config, dict) else {}

    @property
    def iterations(self) -> list[int]:
        """Iterations whose update finished."""
        return sorted(self.updates)

    def per_iteration(
        self, stage: str, key: str, combine: Callable[[list[float]], float] | None = None
    ) -> dict[int, float]:
        """Return iteration -> metric `key` of `stage`, its shards combined.

        Without `combine` it is their mean, weighted by the groups that each shard generated.
        """
        found: dict[int, list[Task]] = {}
        for task in self.tasks:
            if task.stage == stage and task.iteration and key in task.metrics:
                found.setdefault(task.iteration, []).append(task)
        if combine is not None:
            return {i: combine([t.metrics[key] for t in found[i]]) for i in sorted(found)}
        return {i: _weighted_mean(found[i], key) for i in sorted(found)}


def _weighted_mean(tasks: Sequence[Task], key: str) -> float:
    weights = [task.metrics.get(WEIGHT, 1.0) for task in tasks]
    if sum(weights) <= 0:
        weights = [1.0] * len(tasks)
    total = sum(w * task.metrics[key] for w, task in zip(weights, tasks, strict=True))
    return total / sum(weights)
