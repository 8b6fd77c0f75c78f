"""The charts of one run: curves over iterations, fates of groups, slots, and where time went."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from planish.stages.report.facts import ReportFacts, TaskLog
from planish.stages.report.figures.charts import (
    MAX_BARS,
    NARROW,
    WIDE,
    Band,
    Chart,
    LineSeries,
    Mark,
    Span,
    Unit,
    line_chart,
    stacked_bars,
    table,
    timeline,
)
from planish.stages.report.figures.panels import (
    ACCURACY,
    CRITIC_PANELS,
    LENGTHS,
    PANELS,
    PREFIX,
    SLOTS,
    Curve,
    Panel,
    SeriesSource,
    update,
)
from planish.stages.report.happenings import (
    ALERTS,
    ATTEMPTS,
    COMMITS,
    CORDONS,
    GANGS,
    ROWS,
)
from planish.stages.report.words import one_line, seconds

GROUPS: tuple[tuple[str, str, str], ...] = (
    ("kept", "blue", "ds/kept_frac"),
    ("all correct", "teal", "ds/all_correct_frac"),
    ("all wrong", "red", "ds/all_wrong_frac"),
)
"""Label, colour and rollout metric of the fates of a group."""

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


LAST_SECOND = 1e11
"""Unix time after which nothing happens: in the year 5138."""
HAPPENING_COLORS: dict[str, str] = {
    ATTEMPTS: "teal",
    GANGS: "blue",
    COMMITS: "violet",
    ALERTS: "red",
    CORDONS: "orange",
}
"""Row of the picture of faults to the colour of what went well."""


def all_charts(facts: ReportFacts) -> list[Chart]:
    """Draw every chart whose numbers exist, in the order of the page."""
    marks = held_out(facts)
    control: tuple[str, float] | None = None
    if "accuracy" in facts.control:
        control = ("supervised instead", facts.control["accuracy"])
    keeps_all = facts.config.get("rollout", {}).get("dynamic_sampling") is False
    hint = "Every group trains, whatever its accuracy." if keeps_all else ACCURACY.hint
    if marks:
        when = "before, during and after" if len(marks) > 2 else "before and after"
        hint = f"Diamonds: held-out prompts {when}, +- 1 standard error. {hint}"
    if control is not None:
        hint += " Dotted: held-out prompts after as many seconds of supervised training instead."
    sections = (facts.config.get(name, {}) for name in ("rollout", "reward"))
    limits = [section.get("max_response_tokens") for section in sections]
    longest = next(((f"limit {n:,}", float(n)) for n in limits if isinstance(n, int)), None)
    reward, entropy, *others = (draw(facts, panel) for panel in PANELS)
    charts = [
        draw(facts, ACCURACY, marks=marks, hint=hint, limit=control),
        reward,
        draw(facts, LENGTHS, limit=longest),
        entropy,
        _groups(facts, keeps_all=keeps_all),
        *others,
    ]
    if any("critic_learning_rate" in scalars for scalars in facts.updates.values()):
        charts += [draw(facts, panel) for panel in CRITIC_PANELS]
    charts += _window_charts(facts)
    drawn = [chart for chart in charts if chart is not None]
    # Two columns: an odd count would leave a hole before the timeline.
    times = stage_times(facts, is_wide=len(drawn) % 2 == 0)
    return drawn + [chart for chart in (times, task_timeline(facts)) if chart is not None]


def held_out(facts: ReportFacts) -> list[Mark]:
    """Return the accuracies of evaluated policies, the first and last at the ends of the run."""
    first = facts.iterations[0] - 1 if facts.iterations else 0
    last = facts.iterations[-1] if facts.iterations else 0
    places = {id(facts.after): ("after", last), id(facts.before): ("before", first)}
    marks = []
    for evaluation in facts.evaluations:
        if evaluation.accuracy is None:
            continue
        name, x = places.get(id(evaluation), (f"policy {evaluation.version}", evaluation.version))
        error = evaluation.error or 0.0
        marks.append(Mark(f"held-out, {name}", "orange", x, evaluation.accuracy, error))
    return marks


def series(facts: ReportFacts, sources: Sequence[SeriesSource]) -> dict[int, float]:
    """Return iteration -> value of the first source that has any."""
    for source in sources:
        if source.stage == "update":
            values = {
                iteration: scalars[source.key]
                for iteration, scalars in sorted(facts.updates.items())
                if source.key in scalars
            }
        else:
            values = facts.per_iteration(source.stage, source.key, source.combine)
        if values:
            return values
    return {}


def pretraining(facts: ReportFacts) -> tuple[Band, ...]:
    """Return the stretches of iterations that trained the critic alone: every chart shades them."""
    numbers = [n for n, flag in series(facts, (update("pretraining"),)).items() if flag > 0]
    stretches: list[list[int]] = []
    for number in numbers:
        if stretches and number == stretches[-1][1] + 1:
            stretches[-1][1] = number
        else:
            stretches.append([number, number])
    return tuple(Band("value pretraining", first, last) for first, last in stretches)


def lines_of(facts: ReportFacts, curves: Sequence[Curve]) -> list[LineSeries]:
    """Return the curves that have numbers."""
    lines = []
    for curve in curves:
        points = series(facts, curve.sources)
        if curve.unless is not None:
            hidden = series(facts, (curve.unless,))
            points = {number: y for number, y in points.items() if not hidden.get(number)}
        if points and (any(points.values()) or not curve.is_quiet):
            lines.append(
                LineSeries(
                    curve.label, curve.color, [*points], [*points.values()], curve.is_secondary
                )
            )
    return lines


def draw(
    facts: ReportFacts,
    panel: Panel,
    *,
    lines: Sequence[LineSeries] | None = None,
    marks: Sequence[Mark] = (),
    limit: tuple[str, float] | None = None,
    hint: str = "",
) -> Chart | None:
    """Draw a chart made of curves; None where there is nothing to draw.

    Args:
        facts: the run.
        panel: what to draw, and how.
        lines: curves that are worked out already; None takes those of the panel.
        marks: measured points beside the curves.
        limit: label and height of a dotted line across the chart.
        hint: how to read it; empty takes that of the panel.
    """
    is_single = lines is None and len(panel.curves) == 1
    lines = lines_of(facts, panel.curves) if lines is None else lines
    if not lines and not marks:
        return None
    bands = pretraining(facts)
    svg, narrow = (
        line_chart(
            panel.title,
            lines,
            y_label=panel.y_label,
            unit=panel.unit,
            limit=limit,
            marks=marks,
            from_zero=panel.from_zero,
            is_log=panel.is_log,
            floor=panel.floor,
            bands=bands,
            width=width,
        )
        for width in (540, NARROW)
    )
    keys = [
        (line.label, line.color, "dash" if line.is_secondary else "line")
        for line in lines
        if not is_single
    ]
    keys += [(label, "line", "box") for label in dict.fromkeys(band.label for band in bands)]
    keys += [("held out", marks[0].color, "mark")] if marks else []
    values = table(lines, panel.unit)
    return Chart(panel.title, svg, hint or panel.hint, tuple(keys), False, narrow, values)


def _groups(facts: ReportFacts, *, keeps_all: bool) -> Chart | None:
    """Draw the shares of groups by what the filter of dynamic sampling sees in them."""
    fates = [(label, color, facts.per_iteration("rollout", key)) for label, color, key in GROUPS]
    iterations = sorted({iteration for _, _, values in fates for iteration in values})
    if not iterations:
        return None
    parts = [
        LineSeries(
            "mixed" if keeps_all and label == "kept" else label,
            color,
            iterations,
            [values.get(i, 0.0) for i in iterations],
        )
        for label, color, values in fates
        if values
    ]
    title = "Groups kept by dynamic sampling"
    hint = (
        "Only groups with right and wrong responses carry a signal and are kept. A growing share "
        "of all-correct groups says that the prompts become too easy for the policy."
    )
    if keeps_all:
        title = "Groups by outcome"
        hint = (
            "Nothing is filtered, every group trains. Where advantages compare the responses of a "
            "group they are 0 in those that are all right or all wrong; those of a critic are not."
        )
    return _bars(title, parts, "share of sampled groups", "percent", hint)


def _window_charts(facts: ReportFacts) -> list[Chart | None]:
    """Draw how many slots went on with a response, and what that cost; none without windows."""
    live = facts.per_iteration("rollout", "num_live_slots", sum)
    continued = facts.per_iteration("rollout", "num_continued", sum)
    if not live or not any(continued.values()):
        return []
    shares = {number: continued.get(number, 0.0) / max(n, 1.0) for number, n in live.items()}
    used = facts.per_iteration("rollout", "slot_utilisation")
    lines = [LineSeries("continued", "orange", [*shares], [*shares.values()])]
    if used:
        lines.append(LineSeries("utilisation", "teal", [*used], [*used.values()]))
    return [draw(facts, SLOTS, lines=lines), draw(facts, PREFIX)]


def stage_times(facts: ReportFacts, *, is_wide: bool) -> Chart | None:
    """Draw the time per stage and iteration; None without iterations."""
    times: dict[int, dict[str, float]] = {}
    for task in facts.tasks:
        if task.iteration:
            stages = times.setdefault(task.iteration, {})
            stages[task.stage] = max(stages.get(task.stage, 0.0), task.seconds)
    if not times:
        return None
    iterations = sorted(times)
    parts = [
        LineSeries(
            name,
            STAGE_COLORS.get(name, "slate"),
            iterations,
            [times[iteration].get(name, 0.0) for iteration in iterations],
        )
        for name in _stage_order({name for stages in times.values() for name in stages})
    ]
    hint = (
        "Where an iteration spends its time; of parallel rollout shards the slowest counts. "
        "A bar that grows with response length is healthy, a sudden one is a slow machine."
    )
    return _bars("Time per stage", parts, "time per iteration", "seconds", hint, is_wide=is_wide)


def _bars(
    title: str,
    parts: Sequence[LineSeries],
    y_label: str,
    unit: Unit,
    hint: str,
    *,
    is_wide: bool = False,
) -> Chart:
    svg, narrow = (
        stacked_bars(title, parts, y_label=y_label, unit=unit, width=width)
        for width in (WIDE if is_wide else 540, NARROW)
    )
    keys = tuple((part.label, part.color, "box") for part in parts)
    values = table(parts, unit, MAX_BARS)
    return Chart(title, svg, hint, keys, is_wide, narrow, values)


def _stage_order(names: set[str]) -> list[str]:
    order = [*STAGE_COLORS, *sorted(names - STAGE_COLORS.keys())]
    return [name for name in order if name in names]


def task_timeline(facts: ReportFacts) -> Chart | None:
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
    svg = timeline("Timeline", [*rows], spans)
    narrow = timeline("Timeline", [*rows], spans, width=NARROW)
    return Chart("Timeline", svg, hint, is_wide=True, narrow=narrow)


def recovery(facts: ReportFacts) -> Chart | None:
    """Draw what disturbed a run and what was done about it; None for an undisturbed run."""
    known = [one for one in facts.happenings if 0 < one.begin_seconds < LAST_SECOND]
    if not known:
        return None
    zero = min(one.begin_seconds for one in known)
    ends = [max(one.begin_seconds, one.end_seconds) for one in known]
    last = min(LAST_SECOND, max([*ends, *(task.end_seconds for task in facts.tasks)]))
    spans = []
    for one in known:
        start, end = one.begin_seconds - zero, min(one.end_seconds or last, last) - zero
        color = "red" if one.is_bad else HAPPENING_COLORS[one.row]
        spans.append(Span(one.row, color, start, max(0.0, end - start), one_line(one.text)))
    rows = [row for row in ROWS if any(one.row == row for one in known)]
    svg, narrow = (
        timeline("Recovery", rows, spans, width=width, since="the first of them")
        for width in (WIDE, NARROW)
    )
    hint = (
        "Red bars are faults, or ended in one. Gangs are the pods that trained together, commits "
        "the training that went on from one, cordons the time in which a machine takes no pods."
    )
    return Chart("What happened when", svg, hint, is_wide=True, narrow=narrow)


def _spans(task: TaskLog, rows: Collection[str], zero: float) -> list[Span]:
    """Return the bar of a task, and one for the start of its process."""
    row = task.stage if task.stage in rows else f"{task.stage} {task.shard}"
    color = "red" if task.state == "failed" else STAGE_COLORS.get(task.stage, "slate")
    start = task.start_seconds - zero
    state = "reused an earlier result" if task.already_done else task.state
    spans = [
        Span(row, color, start, task.seconds, f"{task.name}: {seconds(task.seconds)}, {state}")
    ]
    wait = min(task.startup_seconds, start)
    if wait > 0:
        tip = f"{task.name}: {seconds(task.startup_seconds)} of process start"
        spans.insert(0, Span(row, "line", start - wait, wait, tip))
    return spans
