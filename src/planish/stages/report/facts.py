"""What the report knows about a run: plain values, gathered once, drawn and written afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import PlanishError
from planish.records.refs import Ref
from planish.records.reports import BestPolicy, EvalReport
from planish.run.avoid import AvoidedNode

WEIGHT = "num_generated_groups"
"""Metric of a shard that weighs its means."""
Evaluations = Mapping[int, EvalReport]
"""Evaluations on one set of prompts by policy version, increasing."""
ACCURACY_ERROR = "accuracy_standard_error"
"""Score that is there where a prompt has several samples."""
SUCCESS = {"SUCCEEDED", "COMPLETE", "COMPLETED", "DONE"}


def task_name(stage: str, iteration: int, shard: int) -> str:
    """Return how people call a task.

    Example:
        >>> task_name("rollout", 3, 1), task_name("sft", 0, 0)
        ('rollout 1 of iteration 3', 'sft')
    """
    name = f"{stage} {shard}" if stage == "rollout" and iteration else stage
    return f"{name} of iteration {iteration}" if iteration else name


@dataclass(frozen=True)
class TaskLog:
    """One stage attempt, from its log.

    Example:
        >>> TaskLog("rollout", 3, 1, "done", 100.0, 2.5).end_seconds
        102.5
    """

    stage: str
    iteration: int
    """1, 2, ...; 0 outside iterations."""
    shard: int
    """Index among parallel tasks."""
    state: str
    """running, done or failed."""
    start_seconds: float
    """Seconds since 1970."""
    seconds: float
    startup_seconds: float = 0.0
    """Process start and imports before `start_seconds`."""
    already_done: bool = False
    """The output stood there from an earlier attempt."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def end_seconds(self) -> float:
        """Seconds since 1970 at which the attempt ended, or was last heard of."""
        return self.start_seconds + self.seconds

    @property
    def name(self) -> str:
        """How people call the task: `rollout 1 of iteration 3`."""
        return task_name(self.stage, self.iteration, self.shard)


def busy_seconds(tasks: Iterable[TaskLog]) -> float:
    """Return the seconds in which at least one of the tasks ran."""
    total, reached = 0.0, float("-inf")
    for task in sorted(tasks, key=lambda task: task.start_seconds):
        total += max(0.0, task.end_seconds - max(reached, task.start_seconds))
        reached = max(reached, task.end_seconds)
    return total


def last_pin(refs: Mapping[int, Ref]) -> str | None:
    """Return the pin of the newest policy or state, None without any."""
    return refs[max(refs)].pin() if refs else None


@dataclass(frozen=True)
class Sample:
    """One response with its verdict. All text is untrusted."""

    prompt_id: str
    prompt: str
    """Empty when the set of prompts is missing."""
    answer: str
    response: str
    is_correct: bool
    extracted: str = ""
    num_tokens: int = 0


@dataclass(frozen=True)
class SampleComparison:
    """Responses to one prompt by two policies, or by one."""

    title: str
    columns: Sequence[tuple[str, Sequence[Sample]]]
    """Heading and responses, left to right."""

    @property
    def prompts(self) -> Iterable[Sample]:
        """One response to each of the prompts."""
        return {s.prompt_id: s for _, column in self.columns for s in column}.values()


@dataclass(frozen=True)
class MachineAlert:
    """An anomaly that the monitor reported while the run was alive."""

    machine: str
    metric: str
    score: float
    first_second: float
    """Start of the evidence, seconds since 1970."""
    last_second: float
    action: str
    kind: str = ""
    """dissimilar, silent or job_wide."""
    state: str = ""
    """Newest state that the monitor wrote; `resolved` when it is over."""
    stage: str = ""
    iteration: int = 0
    """1, 2, ...; 0 outside iterations."""
    history: tuple[tuple[float, str], ...] = ()
    """Seconds since 1970 and what was done or refused then, in words."""

    @property
    def what(self) -> str:
        """Metric that showed the fault, or else its kind."""
        return self.metric or self.kind

    @property
    def is_over(self) -> bool:
        """The monitor has told its end."""
        return self.state in ("", "resolved")

    @property
    def where(self) -> str:
        """Task that ran on the machine, in words."""
        is_inside = self.stage and self.iteration
        return f"{self.stage} of iteration {self.iteration}" if is_inside else self.stage


@dataclass(frozen=True)
class Event:
    """One thing that disturbed a run, or that it did about it."""

    row: str
    """Which row of the picture shows it."""
    begin_seconds: float
    end_seconds: float
    """The same; 0 where it has no end."""
    text: str
    is_bad: bool = False
    """It was a fault, or ended in one."""


@dataclass
class ReportFacts:
    """Everything that the report shows."""

    root: str
    state: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    """`run.json`; empty when unknown."""
    tasks: list[TaskLog] = field(default_factory=list)
    """Newest attempt of each task, by start."""
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    """Iteration to the scalars of its update."""
    evaluations: Evaluations = field(default_factory=dict)
    sets: dict[str, Evaluations] = field(default_factory=dict)
    control: dict[str, float] = field(default_factory=dict)
    """Scores of as many seconds of supervised training from the same start; empty: not measured."""
    best: BestPolicy | None = None
    policies: dict[int, Ref] = field(default_factory=dict)
    states: dict[int, Ref] = field(default_factory=dict)
    alerts: list[MachineAlert] = field(default_factory=list)
    avoided: list[AvoidedNode] = field(default_factory=list)
    """Nodes that following runs keep away from, where that is set."""
    restart: str = ""
    """Whether this run is started again; empty where restarts are off or none was due."""
    curation: str = ""
    events: list[Event] = field(default_factory=list)
    """Faults and what was done about them; empty for an undisturbed run."""
    comparisons: list[SampleComparison] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failure: PlanishError | None = None
    """Why nothing more could be read; None where the store answered to the end."""
    is_stopped: bool = False
    """An operator ended the run through the stop file."""

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Resolved configuration; empty when unknown."""
        config: dict[str, dict[str, Any]] = self.run.get("config", {})
        return config

    @property
    def final_state(self) -> str:
        """Final state in capitals, or `UNKNOWN`."""
        return self.state.upper() or "UNKNOWN"

    @property
    def is_success(self) -> bool:
        """The run ended well as far as the scheduler knows."""
        return self.final_state in SUCCESS

    @property
    def failed(self) -> list[TaskLog]:
        """Tasks that failed or were cut off, newest first."""
        return [task for task in reversed(self.tasks) if task.state != "done"]

    @property
    def before(self) -> Mapping[str, float]:
        """Scores of the starting policy on the held-out prompts; empty without an evaluation."""
        return self.evaluations[min(self.evaluations)].scalars if self.evaluations else {}

    @property
    def after(self) -> Mapping[str, float]:
        """The same of the newest evaluated policy, when it is another one."""
        last = max(self.evaluations, default=0)
        return self.evaluations[last].scalars if len(self.evaluations) > 1 else {}

    @property
    def rise_error(self) -> float | None:
        """Standard error of the rise of accuracy, as the evaluate stage measured it."""
        measured = [
            task.metrics for task in self.tasks if task.stage == "evaluate" and not task.iteration
        ]
        return measured[-1].get("accuracy_rise_standard_error") if measured else None

    @property
    def began(self) -> float:
        """Seconds since 1970 at which the first task began; 0 without one."""
        return min((task.start_seconds for task in self.tasks), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first task's begin to the last one's end."""
        return max((task.end_seconds for task in self.tasks), default=0.0) - self.began

    @property
    def busy_seconds(self) -> float:
        """Seconds in which at least one task ran."""
        return busy_seconds(self.tasks)

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Stage to seconds, summed over its tasks."""
        seconds: dict[str, float] = {}
        for task in self.tasks:
            seconds[task.stage] = seconds.get(task.stage, 0.0) + task.seconds
        return dict(sorted(seconds.items()))

    @property
    def num_tokens(self) -> float | None:
        """Response tokens generated in the iterations, dropped groups included."""
        counts = self.series("rollout/num_generated_tokens", combine=sum)
        return sum(counts.values()) if counts else None

    @property
    def iterations(self) -> list[int]:
        """Iterations whose update finished."""
        return sorted(self.updates)

    def series(
        self, *sources: str, combine: Callable[[list[float]], float] | None = None
    ) -> dict[int, float]:
        """Return iteration -> value of the first source (`stage/metric`) that has any.

        The stage `update` is the update report. `combine` makes one value of those of parallel
        tasks; without it that is their mean, weighted by the groups that each has generated.
        """
        for source in sources:
            stage, _, key = source.partition("/")
            if stage == "update":
                values = {
                    i: self.updates[i][key] for i in self.iterations if key in self.updates[i]
                }
            else:
                values = self._of_tasks(stage, key, combine)
            if values:
                return values
        return {}

    def _of_tasks(
        self, stage: str, key: str, combine: Callable[[list[float]], float] | None
    ) -> dict[int, float]:
        measured: dict[int, list[TaskLog]] = {}
        for task in self.tasks:
            if task.stage == stage and task.iteration and key in task.metrics:
                measured.setdefault(task.iteration, []).append(task)
        values = {}
        for iteration, tasks in sorted(measured.items()):
            numbers = [task.metrics[key] for task in tasks]
            if combine is None:
                weights = [task.metrics.get(WEIGHT, 1.0) for task in tasks]
                weights = weights if sum(weights) > 0 else [1.0] * len(tasks)
                total = sum(w * number for w, number in zip(weights, numbers, strict=True))
                values[iteration] = total / sum(weights)
            else:
                values[iteration] = combine(numbers)
        return values
