"""Charts of time: per stage and iteration, and the timeline of all tasks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planish.stages.report.facts import RunFacts, Task
from planish.stages.report.figures.charts import Chart, Part, Span, boxes, stacked_bars, timeline
from planish.stages.report.words import seconds

STAGE_COLORS: dict[str, str] = {
    "prepare": "slate",
    "curate": "slate",
    "sft": "violet",
    "rollout": "blue",
    "reward": "orange",
    "train": "teal",
    "checkpoint": "violet",
    "evaluate": "violet",
}
"""Stage to colour; stages outside iterations may share one with each other."""


def stage_seconds(tasks: Sequence[Task]) -> dict[int, dict[str, float]]:
    """Return iteration -> stage -> seconds; of parallel tasks the slowest counts."""
    found: dict[int, dict[str, float]] = {}
    for task in tasks:
        stages = found.setdefault(task.iteration, {})
        stages[task.stage] = max(stages.get(task.stage, 0.0), task.seconds)
    return dict(sorted(found.items()))


def stage_times(facts: RunFacts, *, is_wide: bool) -> Chart | None:
    """Draw the time per stage and iteration; None without iterations."""
    per_iteration = {i: stages for i, stages in stage_seconds(facts.tasks).items() if i}
    if not per_iteration:
        return None
    names = _stage_order({name for stages in per_iteration.values() for name in stages})
    parts = [
        Part(
            name,
            STAGE_COLORS.get(name, "slate"),
            [s.get(name, 0.0) for s in per_iteration.values()],
        )
        for name in names
    ]
    svg = stacked_bars(
        "Time per stage",
        [*per_iteration],
        parts,
        y_label="time per iteration",
        unit="seconds",
        width=1124 if is_wide else 540,
    )
    hint = (
        "Where an iteration spends its time; of parallel rollout shards the slowest counts. "
        "A bar that grows with response length is healthy, a sudden one is a slow machine."
    )
    return Chart("Time per stage", svg, hint, boxes(parts), is_wide)


def _stage_order(names: set[str]) -> list[str]:
    order = [*STAGE_COLORS, *sorted(names - STAGE_COLORS.keys())]
    return [name for name in order if name in names]


def task_timeline(facts: RunFacts) -> Chart | None:
    """Draw when each task ran; None without stage logs."""
    tasks = [task for task in facts.tasks if task.start_seconds > 0]
    if not tasks:
        return None
    zero = min(task.start_seconds for task in tasks)
    rows: dict[str, None] = {}
    shards = {task.shard for task in tasks if task.stage == "rollout"}
    for name in _stage_order({task.stage for task in tasks}):
        if name == "rollout" and 1 < len(shards) <= 8:
            rows.update(dict.fromkeys(f"rollout {shard}" for shard in sorted(shards)))
        else:
            rows[name] = None
    spans = [span for task in tasks for span in _spans(task, rows, zero)]
    hint = (
        "When each task ran. Pale bars are process start and imports, white space between bars is "
        "the scheduler; rollout rows that overlap are shards that run in parallel."
    )
    return Chart("Timeline", timeline("Timeline", [*rows], spans), hint, is_wide=True)


def _spans(task: Task, rows: Collection[str], zero: float) -> list[Span]:
    row = task.stage if task.stage in rows else f"{task.stage} {task.shard}"
    color = "red" if task.state == "failed" else STAGE_COLORS.get(task.stage, "slate")
    start = task.start_seconds - zero
    tip = f"{task.name}: {seconds(task.seconds)}, {_state_words(task)}"
    spans = [Span(row, color, start, task.seconds, tip)]
    wait = min(task.startup_seconds, start)
    if wait > 0:
        tip = f"{task.name}: {seconds(task.startup_seconds)} of process start"
        spans.insert(0, Span(row, "line", start - wait, wait, tip))
    return spans


def _state_words(task: Task) -> str:
    return "reused an earlier result" if task.already_done else task.state
