"""Which charts the page has, where their numbers come from, and how to read them.

A chart whose numbers do not exist is left out; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planish.report.charts import Line, Mark, Part, Span, Unit, line_chart, stacked_bars, timeline
from planish.report.facts import RunFacts, Task
from planish.report.words import seconds

STAGE_COLORS: dict[str, str] = {
    "prepare": "slate",
    "curate": "slate",
    "sft": "violet",
    "rollout": "blue",
    "reward": "orange",
    "train": "teal",
    "checkpoint": "red",
    "evaluate": "violet",
}
"""Stage to colour; stages outside iterations may share one with each other."""


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean of at least one value."""
    return sum(values) / len(values)


@dataclass(frozen=True)
class Source:
    """Where a series lies.

    Example:
        >>> Source("rollout", "num_tokens", sum).combine([2.0, 3.0])
        5.0
    """

    stage: str
    """`update` for the update report, else the stage whose log holds it."""
    key: str
    """Name of the scalar."""
    combine: Callable[[list[float]], float] = mean
    """How the values of parallel tasks become one."""


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    label: str
    """Name in the legend."""
    color: str
    """Key of the palette."""
    sources: tuple[Source, ...]
    """The first that exists is drawn."""
    is_secondary: bool = False
    """Drawn thinner and dashed."""


@dataclass(frozen=True)
class Panel:
    """One chart made of curves."""

    title: str
    """Heading."""
    y_label: str
    """Quantity and unit of the vertical axis."""
    hint: str
    """How to read it."""
    curves: tuple[Curve, ...]
    """Lines."""
    unit: Unit = "number"
    """How values are written."""
    from_zero: bool = False
    """The vertical axis starts at 0."""


@dataclass(frozen=True)
class Chart:
    """A finished chart."""

    title: str
    """Heading."""
    svg: str
    """The drawing."""
    hint: str
    """How to read it."""
    legend: tuple[tuple[str, str, str], ...] = ()
    """Label, palette key and kind (line, dash, box, mark)."""
    is_wide: bool = False
    """Takes both columns."""


def update(key: str) -> Source:
    """Return the source of a scalar of the update report."""
    return Source("update", key)


PANELS: tuple[Panel, ...] = (
    Panel(
        "Reward",
        "mean reward per response",
        "What the update trains on: the verdict's reward plus the length penalty. It should rise; "
        "with dynamic sampling it rises less than accuracy, because solved prompts drop out.",
        (Curve("reward", "blue", (update("reward_mean"), Source("reward", "reward_mean"))),),
    ),
    Panel(
        "Entropy",
        "mean entropy (nats per token)",
        "How undecided the policy is at each token. A fast fall towards 0 means that it has "
        "stopped exploring; a fast rise means that its text falls apart.",
        (Curve("entropy", "violet", (update("entropy"),)),),
        from_zero=True,
    ),
    Panel(
        "Clip fractions",
        "share of trained tokens",
        "Tokens whose probability ratio left the trusted band. Some clipping is normal; many per "
        "cent mean steps that are too large. `high` limits rising tokens, `low` falling ones.",
        (
            Curve("high", "blue", (update("clipfrac_high"),)),
            Curve("low", "orange", (update("clipfrac_low"),)),
            Curve("dual", "red", (update("clipfrac_dual"),), is_secondary=True),
        ),
        unit="percent",
        from_zero=True,
    ),
    Panel(
        "Distance per update",
        "approximate KL (nats per token)",
        "How far the policy moves from the one that sampled the data within one iteration. Spikes "
        "go with clipped tokens and large gradients.",
        (Curve("approximate KL", "teal", (update("approx_kl"),)),),
    ),
    Panel(
        "Gradient norm",
        "global norm before clipping",
        "Size of the gradient before it is limited. Steady is good; growth over several "
        "iterations announces a collapse.",
        (
            Curve("mean", "orange", (update("grad_norm"), update("grad_norm_mean"))),
            Curve("largest", "slate", (update("grad_norm_max"),), is_secondary=True),
        ),
        from_zero=True,
    ),
    Panel(
        "Engine against trainer",
        "|exp(old) - exp(rollout)| per token",
        "Difference between the probability that the rollout engine sampled with and the one that "
        "the trainer computes. It should stay near rounding; drift means stale or wrong weights.",
        (
            Curve("mean", "teal", (update("mismatch_mean"),)),
            Curve("largest", "slate", (update("mismatch_max"),), is_secondary=True),
        ),
        from_zero=True,
    ),
)

LENGTH_MEAN = (
    update("response_length_mean"),
    Source("rollout", "response_length_mean"),
)
LENGTH_MAX = (update("response_length_max"), Source("rollout", "response_length_max", max))
ACCURACY_SAMPLED = (Source("rollout", "accuracy"), Source("rollout", "accuracy_mean"))
ACCURACY_TRAINED = (update("accuracy"), Source("reward", "accuracy"))
GROUPS: tuple[tuple[str, str, str], ...] = (
    ("kept", "blue", "ds/kept_frac"),
    ("all correct", "teal", "ds/all_correct_frac"),
    ("all wrong", "red", "ds/all_wrong_frac"),
)
"""Label, colour and rollout metric of the fates of a group."""


def series(facts: RunFacts, sources: Sequence[Source]) -> dict[int, float]:
    """Return iteration -> value of the first source that has any."""
    for source in sources:
        if source.stage == "update":
            found = {
                iteration: scalars[source.key]
                for iteration, scalars in sorted(facts.updates.items())
                if source.key in scalars
            }
        else:
            found = facts.per_iteration(source.stage, source.key, source.combine)
        if found:
            return found
    return {}


def all_charts(facts: RunFacts, before: Mark | None, after: Mark | None) -> list[Chart]:
    """Draw every chart whose numbers exist, in the order of the page.

    Args:
        facts: the run.
        before: held-out accuracy of the starting policy.
        after: held-out accuracy of the final policy.
    """
    drawn = {panel.title: _draw(facts, panel) for panel in PANELS}
    charts = [
        _accuracy(facts, [mark for mark in (before, after) if mark is not None]),
        drawn.pop("Reward"),
        _lengths(facts),
        drawn.pop("Entropy"),
        _groups(facts),
        *drawn.values(),
        _stage_times(facts),
        _timeline(facts),
    ]
    return [chart for chart in charts if chart is not None]


def _lines(facts: RunFacts, curves: Sequence[Curve]) -> list[Line]:
    lines = []
    for curve in curves:
        found = series(facts, curve.sources)
        if found:
            lines.append(
                Line(curve.label, curve.color, [*found], [*found.values()], curve.is_secondary)
            )
    return lines


def _legend(lines: Sequence[Line]) -> tuple[tuple[str, str, str], ...]:
    return tuple(
        (line.label, line.color, "dash" if line.is_secondary else "line") for line in lines
    )


def _draw(facts: RunFacts, panel: Panel) -> Chart | None:
    lines = _lines(facts, panel.curves)
    if not lines:
        return None
    svg = line_chart(
        panel.title, lines, y_label=panel.y_label, unit=panel.unit, from_zero=panel.from_zero
    )
    return Chart(panel.title, svg, panel.hint, _legend(lines) if len(panel.curves) > 1 else ())


def _accuracy(facts: RunFacts, marks: Sequence[Mark]) -> Chart | None:
    lines = _lines(
        facts,
        (
            Curve("all sampled responses", "blue", ACCURACY_SAMPLED),
            Curve("responses that train", "slate", ACCURACY_TRAINED, is_secondary=True),
        ),
    )
    if not lines and not marks:
        return None
    svg = line_chart(
        "Accuracy", lines, y_label="share of correct responses", unit="percent", marks=marks
    )
    legend = _legend(lines)
    if marks:
        legend += (("held-out prompts, +- 1 standard error", marks[0].color, "mark"),)
    hint = (
        "Diamonds are the honest score: prompts that were never trained on, before and after. "
        "Groups that are all right or all wrong do not train, so the dashed curve stays near one "
        "half by construction."
    )
    return Chart("Accuracy", svg, hint, legend)


def _lengths(facts: RunFacts) -> Chart | None:
    lines = _lines(
        facts,
        (
            Curve("mean", "blue", LENGTH_MEAN),
            Curve("longest", "slate", LENGTH_MAX, is_secondary=True),
        ),
    )
    if not lines:
        return None
    limit = facts.config.get("rollout", {}).get("max_response_tokens")
    svg = line_chart(
        "Response length",
        lines,
        y_label="tokens per response",
        limit=(f"limit {limit:,}", float(limit)) if isinstance(limit, int) else None,
        from_zero=True,
    )
    hint = (
        "Longer answers can mean more reasoning or mere padding: read it together with accuracy. "
        "A mean near the limit says that answers are cut off."
    )
    return Chart("Response length", svg, hint, _legend(lines))


def _groups(facts: RunFacts) -> Chart | None:
    found = [
        (label, color, facts.per_iteration("rollout", key, mean)) for label, color, key in GROUPS
    ]
    found = [item for item in found if item[2]]
    if not found:
        return None
    iterations = sorted({iteration for _, _, values in found for iteration in values})
    parts = [
        Part(label, color, [values.get(i, 0.0) for i in iterations])
        for label, color, values in found
    ]
    svg = stacked_bars(
        "Groups", iterations, parts, y_label="share of sampled groups", unit="percent"
    )
    hint = (
        "Only groups with right and wrong responses carry a signal and are kept. A growing share "
        "of `all correct` says that the prompts become too easy for the policy."
    )
    return Chart("Groups kept by dynamic sampling", svg, hint, _boxes(parts))


def _boxes(parts: Sequence[Part]) -> tuple[tuple[str, str, str], ...]:
    return tuple((part.label, part.color, "box") for part in parts)


def stage_seconds(tasks: Sequence[Task]) -> dict[int, dict[str, float]]:
    """Return iteration -> stage -> seconds; of parallel tasks the slowest counts."""
    found: dict[int, dict[str, float]] = {}
    for task in tasks:
        stages = found.setdefault(task.iteration, {})
        stages[task.stage] = max(stages.get(task.stage, 0.0), task.seconds)
    return dict(sorted(found.items()))


def _stage_times(facts: RunFacts) -> Chart | None:
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
        "Time per stage", [*per_iteration], parts, y_label="time per iteration", unit="seconds"
    )
    hint = (
        "Where an iteration spends its time; of parallel rollout shards the slowest counts. "
        "A bar that grows with response length is healthy, a sudden one is a slow machine."
    )
    return Chart("Time per stage", svg, hint, _boxes(parts))


def _stage_order(names: set[str]) -> list[str]:
    order = [*STAGE_COLORS, *sorted(names - STAGE_COLORS.keys())]
    return [name for name in order if name in names]


def _timeline(facts: RunFacts) -> Chart | None:
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
    spans = [
        Span(
            task.stage if task.stage in rows else f"{task.stage} {task.shard}",
            "red" if task.state == "failed" else STAGE_COLORS.get(task.stage, "slate"),
            task.start_seconds - zero,
            task.seconds,
            f"{task.name}: {seconds(task.seconds)}, {_state_words(task)}",
        )
        for task in tasks
    ]
    hint = (
        "When each task ran. White space between bars is the time that the scheduler and process "
        "start take; overlapping rollout rows are shards that run in parallel."
    )
    return Chart("Timeline", timeline("Timeline", [*rows], spans), hint, is_wide=True)


def _state_words(task: Task) -> str:
    return "reused an earlier result" if task.already_done else task.state


def cells(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return items in the order of their names."""
    return sorted(values.items())
