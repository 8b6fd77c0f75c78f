"""Facts of a run for the report: plain values, collected once before drawing and writing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish.base.errors import PlanishError
from planish.records.refs import Ref
from planish.records.reports import BestPolicy, EvalReport
from planish.run.avoid import AvoidedNode

WEIGHT = "num_generated_groups"
"""Metric of a shard that is the weight of its means."""
Evaluations = Mapping[int, EvalReport]
"""Policy version, increasing, to the evaluation on one set of prompts."""
ACCURACY_ERROR = "accuracy_standard_error"
"""Score that exists if a prompt has several samples."""
SUCCESS = {"SUCCEEDED", "COMPLETE", "COMPLETED", "DONE"}
RUNNING = "RUNNING"
"""State of a run whose report is drawn while it goes on."""


def task_name(stage: str, iteration: int, shard: int) -> str:
    """Return the name of a task for people.

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
    """Start of the attempt, seconds since 1970."""
    seconds: float
    startup_seconds: float = 0.0
    """Seconds of process start and imports before `start_seconds`."""
    already_done: bool = False
    """True if the output existed from an earlier attempt."""
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""

    @property
    def end_seconds(self) -> float:
        """End of the attempt, or of its last log entry, seconds since 1970."""
        return self.start_seconds + self.seconds

    @property
    def name(self) -> str:
        """Name of the task for people: `rollout 1 of iteration 3`."""
        return task_name(self.stage, self.iteration, self.shard)


def busy_seconds(tasks: Iterable[TaskLog]) -> float:
    """Return the seconds in which at least one of the tasks ran."""
    total, reached = 0.0, float("-inf")
    for task in sorted(tasks, key=lambda task: task.start_seconds):
        total += max(0.0, task.end_seconds - max(reached, task.start_seconds))
        reached = max(reached, task.end_seconds)
    return total


def last_pin(refs: Mapping[int, Ref]) -> str | None:
    """Return the pin of the newest policy or state; None if there is none."""
    return refs[max(refs)].pin() if refs else None


@dataclass(frozen=True)
class Sample:
    """One response with its verdict. All text is untrusted."""

    prompt_id: str
    prompt: str
    """Text of the prompt; empty if the set of prompts is missing."""
    answer: str
    response: str
    is_correct: bool
    extracted: str = ""
    num_tokens: int = 0


@dataclass(frozen=True)
class SampleComparison:
    """Responses of one or two policies, to compare."""

    title: str
    columns: Sequence[tuple[str, Sequence[Sample]]]
    """Heading and responses, left to right."""

    @property
    def prompts(self) -> Iterable[Sample]:
        """One sample of each prompt."""
        return {s.prompt_id: s for _, column in self.columns for s in column}.values()


@dataclass(frozen=True)
class MachineAlert:
    """An anomaly that the monitor reported during the run."""

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
    """Newest state that the monitor wrote; `resolved` after its end."""
    stage: str = ""
    iteration: int = 0
    """1, 2, ...; 0 outside iterations."""
    history: tuple[tuple[float, str], ...] = ()
    """(Seconds since 1970, text of the action or refusal), in order."""

    @property
    def what(self) -> str:
        """Metric that shows the fault, else its kind."""
        return self.metric or self.kind

    @property
    def is_over(self) -> bool:
        """True if the monitor has reported its end."""
        return self.state in ("", "resolved")

    @property
    def where(self) -> str:
        """Task on the machine, in words."""
        is_inside = self.stage and self.iteration
        return f"{self.stage} of iteration {self.iteration}" if is_inside else self.stage


@dataclass(frozen=True)
class Event:
    """A disturbance of a run, or a reaction to one."""

    row: str
    """Row of the chart that shows it."""
    begin_seconds: float
    end_seconds: float
    """End, seconds since 1970; 0 if it has none."""
    text: str
    is_bad: bool = False
    """True if it was a fault, or ended in one."""


@dataclass
class ReportFacts:
    """All facts that the report shows."""

    root: str
    state: str = ""
    run: dict[str, Any] = field(default_factory=dict)
    """Content of `run.json`; empty if unknown."""
    tasks: list[TaskLog] = field(default_factory=list)
    """Newest attempt of each task, in order of start."""
    updates: dict[int, dict[str, float]] = field(default_factory=dict)
    """Iteration to the scalars of its update."""
    evaluations: Evaluations = field(default_factory=dict)
    sets: dict[str, Evaluations] = field(default_factory=dict)
    control: dict[str, float] = field(default_factory=dict)
    """Scores after supervised training from the same start for as long; empty if not measured."""
    best: BestPolicy | None = None
    policies: dict[int, Ref] = field(default_factory=dict)
    states: dict[int, Ref] = field(default_factory=dict)
    alerts: list[MachineAlert] = field(default_factory=list)
    avoided: list[AvoidedNode] = field(default_factory=list)
    """Nodes that following runs avoid, if their pipeline does so."""
    restart: str = ""
    """Decision on a restart, in words; empty if restarts are off or none was due."""
    curation: str = ""
    events: list[Event] = field(default_factory=list)
    """Faults and the reactions to them; empty for an undisturbed run."""
    comparisons: list[SampleComparison] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    failure: PlanishError | None = None
    """Error of the store that ended the reading; None if it answered to the end."""
    is_stopped: bool = False
    """True if an operator ended the run by the stop file."""

    @property
    def config(self) -> dict[str, dict[str, Any]]:
        """Resolved configuration; empty if unknown."""
        config: dict[str, dict[str, Any]] = self.run.get("config", {})
        return config

    @property
    def final_state(self) -> str:
        """Final state in capitals, or `UNKNOWN`."""
        return self.state.upper() or "UNKNOWN"

    @property
    def is_success(self) -> bool:
        """True if the scheduler reports success."""
        return self.final_state in SUCCESS

    @property
    def is_running(self) -> bool:
        """True if the run goes on."""
        return self.final_state == RUNNING

    @property
    def failed(self) -> list[TaskLog]:
        """Failed and interrupted tasks, newest first."""
        return [task for task in reversed(self.tasks) if task.state != "done"]

    @property
    def before(self) -> Mapping[str, float]:
        """Scores of the starting policy on the held-out prompts; empty without an evaluation."""
        return self.evaluations[min(self.evaluations)].scalars if self.evaluations else {}

    @property
    def after(self) -> Mapping[str, float]:
        """Scores of the newest evaluated policy; empty if it is the starting policy."""
        last = max(self.evaluations, default=0)
        return self.evaluations[last].scalars if len(self.evaluations) > 1 else {}

    @property
    def rise_error(self) -> float | None:
        """Standard error of the rise of accuracy, computed by the evaluate stage."""
        measured = [
            task.metrics for task in self.tasks if task.stage == "evaluate" and not task.iteration
        ]
        return measured[-1].get("accuracy_rise_standard_error") if measured else None

    @property
    def began(self) -> float:
        """Start of the first task, seconds since 1970; 0 without tasks."""
        return min((task.start_seconds for task in self.tasks), default=0.0)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first task to the end of the last one."""
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
        """Number of response tokens generated in all iterations, dropped groups included."""
        counts = self.series("rollout/num_generated_tokens", combine=sum)
        return sum(counts.values()) if counts else None

    @property
    def iterations(self) -> list[int]:
        """Iterations whose update finished."""
        return sorted(self.updates)

    def series(
        self, *sources: str, combine: Callable[[list[float]], float] | None = None
    ) -> dict[int, float]:
        """Return iteration -> value, from the first source (`stage/metric`) with any values.

        The stage `update` is the update report. `combine` reduces the values of parallel tasks;
        the default is their mean, weighted by the number of groups that each generated.
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
