"""Charts of one run: curves over iterations, fates of groups, slots, and times of stages."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planish.stages.report.events import ROWS
from planish.stages.report.facts import ACCURACY_ERROR, ReportFacts, TaskLog
from planish.stages.report.figures import charts, panels
from planish.stages.report.figures.charts import Chart, Line, Mark, Span
from planish.stages.report.figures.panels import Curve, Panel
from planish.stages.report.text import seconds

GROUPS: tuple[tuple[str, str, str], ...] = (
    ("kept", "blue", "rollout/ds/kept_frac"),
    ("all correct", "teal", "rollout/ds/all_correct_frac"),
    ("all wrong", "red", "rollout/ds/all_wrong_frac"),
)
KEPT_GROUPS = Panel(
    "Groups kept by dynamic sampling",
    "share of sampled groups",
    "Only groups with right and wrong responses carry a signal and are kept. A growing share of "
    "all-correct groups says that the prompts become too easy for the policy.",
    unit="percent",
)
ALL_GROUPS = Panel(
    "Groups by outcome",
    "share of sampled groups",
    "Nothing is filtered, every group trains. Where advantages compare the responses of a group "
    "they are 0 in those that are all right or all wrong; those of a critic are not.",
    unit="percent",
)
STAGE_TIMES = Panel(
    "Time per stage",
    "time per iteration",
    "Where an iteration spends its time; of parallel rollout shards the slowest counts. A bar "
    "that grows with response length is healthy, a sudden one is a slow machine.",
    unit="seconds",
)
TIMELINE = Panel(
    "Timeline",
    "",
    "When each task ran. Pale bars are process start and imports, white space between bars is the "
    "scheduler; rollout rows that overlap are shards that run in parallel.",
)
RECOVERY = Panel(
    "What happened when",
    "",
    "Red bars are faults, or ended in one. Gangs are the pods that trained together, commits the "
    "training that went on from one, cordons the time in which a machine takes no pods.",
)
STAGE_COLORS = {
    "prepare": "slate",
    "curate": "slate",
    "sft": "violet",
    "rollout": "blue",
    "reward": "orange",
    "train": "teal",
    "checkpoint": "violet",
    "evaluate": "violet",
}
"""Stage to colour; stages outside iterations may share a colour."""


def all_charts(facts: ReportFacts) -> list[Chart]:
    """Return every chart whose numbers exist, in the order of the page."""
    keeps_all = facts.config.get("rollout", {}).get("dynamic_sampling") is False
    sections = (facts.config.get(name, {}) for name in ("rollout", "reward"))
    limits = [section.get("max_response_tokens") for section in sections]
    longest = next(((f"limit {n:,}", float(n)) for n in limits if n), None)
    reward, entropy, *others = panels.PANELS
    found = [
        _accuracy(facts, keeps_all=keeps_all),
        draw(facts, reward),
        draw(facts, panels.LENGTHS, limit=longest),
        draw(facts, entropy),
        _groups(facts, keeps_all=keeps_all),
        *(draw(facts, panel) for panel in others),
    ]
    if any("critic_learning_rate" in scalars for scalars in facts.updates.values()):
        found += [draw(facts, panel) for panel in panels.CRITIC_PANELS]
    found += _window_charts(facts)
    drawn = [chart for chart in found if chart is not None]
    # The page has two columns: an odd count would leave a gap before the timeline.
    times = _stage_times(facts, is_wide=len(drawn) % 2 == 0)
    return drawn + [chart for chart in (times, _task_timeline(facts)) if chart is not None]


def _accuracy(facts: ReportFacts, *, keeps_all: bool) -> Chart | None:
    marks = held_out(facts)
    hint = "Every group trains, whatever its accuracy." if keeps_all else panels.ACCURACY.hint
    if marks:
        when = "before, during and after" if len(marks) > 2 else "before and after"
        hint = f"Diamonds: held-out prompts {when}, +- 1 standard error. {hint}"
    control = None
    if facts.control:
        control = ("supervised instead", facts.control["accuracy"])
        hint += " Dotted: held-out prompts after as many seconds of supervised training instead."
    return draw(facts, panels.ACCURACY, marks=marks, limit=control, hint=hint)


def held_out(facts: ReportFacts) -> list[Mark]:
    """Return the accuracies of evaluated policies, the first and last at the ends of the run."""
    first = facts.iterations[0] - 1 if facts.iterations else 0
    last = facts.iterations[-1] if facts.iterations else 0
    versions = [*facts.evaluations]
    places = {versions[-1]: ("after", last), versions[0]: ("before", first)} if versions else {}
    marks = []
    for version, report in facts.evaluations.items():
        name, x = places.get(version, (f"policy {version}", version))
        accuracy, error = (report.scalars.get(k, 0.0) for k in ("accuracy", ACCURACY_ERROR))
        marks.append(Mark(f"held-out, {name}", "orange", x, accuracy, error))
    return marks


def pretraining(facts: ReportFacts) -> list[tuple[int, int]]:
    """Return the ranges of iterations that trained only the critic; every chart shades them."""
    stretches: list[tuple[int, int]] = []
    for number, flag in facts.series("update/pretraining").items():
        if flag > 0:
            follows = bool(stretches) and number == stretches[-1][1] + 1
            first = stretches.pop()[0] if follows else number
            stretches.append((first, number))
    return stretches


def lines_of(facts: ReportFacts, curves: Sequence[Curve]) -> list[Line]:
    """Return the curves that have numbers."""
    lines = []
    for curve in curves:
        points = facts.series(*curve.sources, combine=curve.combine)
        if curve.unless:
            hidden = facts.series(curve.unless)
            points = {number: y for number, y in points.items() if not hidden.get(number)}
        if any(points.values()) or (points and not curve.is_quiet):
            lines.append(Line(curve.label, curve.color, points, curve.is_secondary))
    return lines


def draw(
    facts: ReportFacts,
    panel: Panel,
    *,
    lines: Sequence[Line] = (),
    marks: Sequence[Mark] = (),
    limit: tuple[str, float] | None = None,
    hint: str = "",
) -> Chart | None:
    """Draw a panel with `lines`, else with its own curves; None if there are no numbers."""
    lines = lines or lines_of(facts, panel.curves)
    if not lines and not marks:
        return None
    bands = pretraining(facts)
    return charts.line_chart(panel, lines, marks=marks, limit=limit, bands=bands, hint=hint)


def _groups(facts: ReportFacts, *, keeps_all: bool) -> Chart | None:
    """Draw the shares of groups by their class in the filter of dynamic sampling."""
    fates = [(label, color, facts.series(source)) for label, color, source in GROUPS]
    iterations = sorted({iteration for _, _, values in fates for iteration in values})
    layers = [
        Line(
            "mixed" if keeps_all and label == "kept" else label,
            color,
            {i: values.get(i, 0.0) for i in iterations},
        )
        for label, color, values in fates
        if values
    ]
    return charts.bar_chart(ALL_GROUPS if keeps_all else KEPT_GROUPS, layers) if layers else None


def _window_charts(facts: ReportFacts) -> list[Chart | None]:
    """Draw the share of slots that continued a response, and its cost; empty without windows."""
    live = facts.series("rollout/num_live_slots", combine=sum)
    continued = facts.series("rollout/num_continued", combine=sum)
    if not live or not any(continued.values()):
        return []
    shares = {number: continued.get(number, 0.0) / max(n, 1.0) for number, n in live.items()}
    lines = [Line("continued", "orange", shares)]
    if used := facts.series("rollout/slot_utilisation"):
        lines.append(Line("utilisation", "teal", used))
    return [draw(facts, panels.SLOTS, lines=lines), draw(facts, panels.PREFIX)]


def _stage_times(facts: ReportFacts, *, is_wide: bool) -> Chart | None:
    times: dict[int, dict[str, float]] = {}
    for task in facts.tasks:
        if task.iteration:
            stages = times.setdefault(task.iteration, {})
            stages[task.stage] = max(stages.get(task.stage, 0.0), task.seconds)
    layers = [
        Line(
            name, STAGE_COLORS.get(name, "slate"), {i: times[i].get(name, 0) for i in sorted(times)}
        )
        for name in _stage_order({name for stages in times.values() for name in stages})
    ]
    return charts.bar_chart(STAGE_TIMES, layers, is_wide=is_wide) if layers else None


def _stage_order(names: set[str]) -> list[str]:
    order = [*STAGE_COLORS, *sorted(names - STAGE_COLORS.keys())]
    return [name for name in order if name in names]


def _task_timeline(facts: ReportFacts) -> Chart | None:
    if not facts.tasks:
        return None
    rows: list[str] = []
    shards = {task.shard for task in facts.tasks if task.stage == "rollout"}
    for name in _stage_order({task.stage for task in facts.tasks}):
        is_split = name == "rollout" and 1 < len(shards) <= 8
        rows += [f"rollout {shard}" for shard in sorted(shards)] if is_split else [name]
    return charts.timeline(
        TIMELINE, rows, [s for task in facts.tasks for s in _spans(task, rows, facts.began)]
    )


def _spans(task: TaskLog, rows: Collection[str], zero: float) -> list[Span]:
    """Return the bar of a task, after one for the start of its process."""
    row = task.stage if task.stage in rows else f"{task.stage} {task.shard}"
    color = "red" if task.state == "failed" else STAGE_COLORS.get(task.stage, "slate")
    start = task.start_seconds - zero
    state = "reused an earlier result" if task.already_done else task.state
    spans = []
    wait = min(task.startup_seconds, start)
    if wait > 0:
        tip = f"{task.name}: {seconds(task.startup_seconds)} of process start"
        spans.append(Span(row, "line", start - wait, wait, tip))
    tip = f"{task.name}: {seconds(task.seconds)}, {state}"
    return [*spans, Span(row, color, start, task.seconds, tip)]


def recovery(facts: ReportFacts) -> Chart | None:
    """Draw the disturbances of a run and the reactions; None for an undisturbed run."""
    if not facts.events:
        return None
    zero = min(event.begin_seconds for event in facts.events)
    ends = [max(event.begin_seconds, event.end_seconds) for event in facts.events]
    last = max([*ends, *(task.end_seconds for task in facts.tasks)])
    spans = []
    for event in facts.events:
        color = "red" if event.is_bad else ROWS[event.row]
        start, end = event.begin_seconds, event.end_seconds or last
        spans.append(Span(event.row, color, start - zero, max(0.0, end - start), event.text))
    rows = [row for row in ROWS if any(event.row == row for event in facts.events)]
    return charts.timeline(RECOVERY, rows, spans, since="the first of them")
