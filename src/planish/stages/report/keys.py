"""The few numbers that say how a run went, for page, summary and metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planish.stages.report.facts import Evaluation, RunFacts, Saved, Task

SUCCESS = {"SUCCEEDED", "COMPLETE", "COMPLETED", "DONE"}
"""Final states of a run that went well."""


@dataclass(frozen=True)
class Score:
    """Held-out accuracy of one policy."""

    accuracy: float | None
    """Mean accuracy over prompts and samples, `avg@n`."""
    error: float | None
    """Its standard error."""
    greedy: float | None
    """Accuracy of the most probable response."""
    version: int
    """Policy version."""


@dataclass(frozen=True)
class Keys:
    """Key numbers; None where the run did not get that far."""

    state: str
    """Final state as the scheduler tells it, or `UNKNOWN`."""
    before: Score | None
    """The starting policy."""
    after: Score | None
    """The newest evaluated policy, when it is another one."""
    gain_error: float | None
    """Standard error of the rise between the two, as the evaluation measured it."""
    iterations: int
    """Finished updates."""
    seconds: float
    """From the first task's begin to the last one's end."""
    busy_seconds: float
    """Seconds in which at least one task ran."""
    stage_seconds: dict[str, float]
    """Stage to seconds, summed over tasks."""
    num_tokens: float | None
    """Response tokens generated in the iterations, dropped groups included."""
    failed: list[Task] = field(default_factory=list)
    """Tasks that failed or were cut off, newest first."""
    last_policy: Saved | None = None
    """Newest finished policy."""
    last_state: Saved | None = None
    """Newest finished train state."""

    @property
    def is_success(self) -> bool:
        """The run ended well as far as the scheduler and the logs know."""
        return self.state in SUCCESS

    @property
    def gain(self) -> float | None:
        """Rise of held-out accuracy."""
        if self.before is None or self.after is None:
            return None
        if self.before.accuracy is None or self.after.accuracy is None:
            return None
        return self.after.accuracy - self.before.accuracy


def key_numbers(facts: RunFacts, state: str) -> Keys:
    """Work out the key numbers of a run."""
    scores = [score(evaluation) for evaluation in facts.evaluations]
    begin = [task.start_seconds for task in facts.tasks if task.start_seconds > 0]
    end = [task.end_seconds for task in facts.tasks if task.start_seconds > 0]
    rises = [task.metrics for task in facts.tasks if task.stage == "evaluate"]
    return Keys(
        state=state.upper() or "UNKNOWN",
        before=scores[0] if scores else None,
        after=scores[-1] if len(scores) > 1 else None,
        gain_error=rises[-1].get("accuracy_rise_standard_error") if rises else None,
        iterations=len(facts.updates),
        seconds=max(end) - min(begin) if begin else 0.0,
        busy_seconds=busy_seconds(facts.tasks),
        stage_seconds=_stage_seconds(facts.tasks),
        num_tokens=_num_tokens(facts),
        failed=[task for task in reversed(facts.tasks) if task.state != "done"],
        last_policy=facts.policies[-1] if facts.policies else None,
        last_state=facts.states[-1] if facts.states else None,
    )


def score(evaluation: Evaluation) -> Score:
    """Read the main scores of one evaluation."""
    scalars = evaluation.scalars
    return Score(
        accuracy=scalars.get("accuracy"),
        error=scalars.get("accuracy_standard_error"),
        greedy=scalars.get("greedy"),
        version=evaluation.version,
    )


def busy_seconds(tasks: Sequence[Task]) -> float:
    """Return the length of the union of the times of all tasks.

    Example:
        >>> busy_seconds([Task("a", 0, 0, "done", 10, 5), Task("b", 0, 0, "done", 12, 5)])
        7.0
    """
    total, reached = 0.0, float("-inf")
    for task in sorted(tasks, key=lambda task: task.start_seconds):
        total += max(0.0, task.end_seconds - max(reached, task.start_seconds))
        reached = max(reached, task.end_seconds)
    return total


def _stage_seconds(tasks: Sequence[Task]) -> dict[str, float]:
    found: dict[str, float] = {}
    for task in tasks:
        found[task.stage] = found.get(task.stage, 0.0) + task.seconds
    return dict(sorted(found.items()))


def _num_tokens(facts: RunFacts) -> float | None:
    found = facts.per_iteration("rollout", "num_generated_tokens", sum)
    return sum(found.values()) if found else None


def as_summary(facts: RunFacts, keys: Keys) -> dict[str, object]:
    """Return the machine-readable summary: plain JSON, None where unknown."""
    before, after = keys.before, keys.after
    return {
        "root": facts.root,
        "state": keys.state,
        "accuracy_before": before.accuracy if before else None,
        "accuracy_before_standard_error": before.error if before else None,
        "accuracy_after": after.accuracy if after else None,
        "accuracy_after_standard_error": after.error if after else None,
        "greedy_before": before.greedy if before else None,
        "greedy_after": after.greedy if after else None,
        "iterations": keys.iterations,
        "seconds": keys.seconds,
        "busy_seconds": keys.busy_seconds,
        "seconds_by_stage": keys.stage_seconds,
        "num_tokens": keys.num_tokens,
        "failed_tasks": [{"task": task.name, "error": task.error} for task in keys.failed],
        "last_policy": keys.last_policy.pin if keys.last_policy else None,
        "last_state": keys.last_state.pin if keys.last_state else None,
        "num_alerts": len(facts.alerts),
        "missing": facts.missing,
    }


def as_metrics(summary: Mapping[str, object]) -> dict[str, float]:
    """Return the scalars of a summary that are known, for the metrics artifact."""
    metrics: dict[str, float] = {}
    for key, value in summary.items():
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            metrics[key] = float(value)
    failed = summary["failed_tasks"]
    metrics["num_failed_tasks"] = float(len(failed)) if isinstance(failed, list) else 0.0
    return metrics
