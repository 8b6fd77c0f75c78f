"""The command `planish compare`: overlays the curves of several runs on one page.

The command reads the data of each run's report, and changes nothing below the roots.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from planish import store
from planish.base.errors import ConfigError, ObjectMissing
from planish.base.text import Table
from planish.run.stage import read_run
from planish.stages.report.facts import ReportFacts, busy_seconds
from planish.stages.report.figures.charts import Chart, Line, line_chart
from planish.stages.report.figures.panels import LENGTHS, PANELS, Panel
from planish.stages.report.figures.run_charts import held_out
from planish.stages.report.gather import gather
from planish.stages.report.page import MAX_LISTED
from planish.stages.report.render import drawn, fill
from planish.stages.report.tables import score_cell
from planish.stages.report.text import number, one_line, percent, seconds
from planish.store import normal_uri

COLORS = ("blue", "orange", "teal", "red", "violet", "slate")
"""Keys of the palette, one for each run in order; from the seventh run on lines are dashed."""
MAX_RUNS = 2 * len(COLORS)

HELD_OUT = Panel(
    "Held-out accuracy",
    "share of correct responses",
    "Diamonds: policies on the held-out prompts of their run, +- 1 standard error. Only runs with "
    "the same prompts can be compared.",
    unit="percent",
    from_zero=False,
)
SECONDS = Panel(
    "Time per iteration",
    "time per iteration",
    "Time in which at least one stage of the iteration ran: what a scheduler waited between them "
    "is left out.",
    unit="seconds",
)
_OF_THE_REPORT = {panel.title: panel for panel in (*PANELS, LENGTHS)}
_TITLES = ("Reward", "Response length", "Entropy", "Gradient norm")
# With an axis from zero, runs that differ by little would overlap.
CHARTS = (
    HELD_OUT,
    *(replace(_OF_THE_REPORT[title], from_zero=False) for title in _TITLES),
    SECONDS,
)
"""Charts in the order of the page; a chart of the report has only its first curve."""


class Run(NamedTuple):
    """One of the compared runs."""

    name: str
    facts: ReportFacts
    color: str
    is_dashed: bool


def run(
    options: argparse.Namespace, progress: Callable[[str, int, int], None]
) -> Iterator[Table | str]:
    """Write the page, and yield the outcomes and the path of the page."""
    roots = [normal_uri(root) for root in options.roots]
    if not 2 <= len(set(roots)) == len(roots) <= MAX_RUNS:
        raise ConfigError(f"roots must be 2 to {MAX_RUNS} different ones, got {', '.join(roots)}")
    names = [one_line(name) for name in options.name or default_names(roots)]
    if not len(set(names)) == len(names) == len(roots):
        raise ConfigError(f"`--name` must name each of {len(roots)} roots differently, got {names}")
    runs = []
    for place, (name, root) in enumerate(zip(names, roots, strict=True)):
        progress("reading runs", place, len(roots))
        second, color = divmod(place, len(COLORS))
        runs.append(Run(name, read(root), COLORS[color], second > 0))
    uri = normal_uri(options.out)
    store.write(uri, page(runs).encode())
    yield Table("outcomes", ("", *names), rows_of([outcomes(run.facts) for run in runs]))
    yield str(store.local_path(uri) or uri)


def default_names(roots: Sequence[str]) -> list[str]:
    """Return a name for each root: its last path parts, as few as make the names distinct."""
    cuts = (["/".join(root.split("/")[-n:]) for root in roots] for n in itertools.count(1))
    return next(names for names in cuts if len(set(names)) == len(roots))


def read(root: str) -> ReportFacts:
    """Return the data for the curves of a run, which may still be running."""
    try:
        read_run(root)
    except ObjectMissing:
        raise ConfigError(f"`{root}` must be the root of a run, got no run.json there") from None
    facts = gather(root, curves_only=True)
    if facts.failure:
        raise facts.failure
    return facts


def page(runs: Sequence[Run]) -> str:
    """Return the page as HTML."""
    head = ["", *(run.name for run in runs)]
    stages = [
        {f"time in {stage}": seconds(spent) for stage, spent in run.facts.stage_seconds.items()}
        for run in runs
    ]
    differing = [
        [one_line(cell) for cell in row]
        for row in sorted(rows_of([settings(run.facts) for run in runs]))
        if len(set(row[1:])) > 1
    ]
    missing = [f"{run.name}: {one_line(item)}" for run in runs for item in run.facts.missing]
    return fill(
        "compare.html.j2",
        {
            "names": ", ".join(head[1:]),
            "runs": [(run.name, run.color, run.is_dashed, run.facts.root) for run in runs],
            "outcomes": [head, *rows_of([outcomes(run.facts) for run in runs]), *rows_of(stages)],
            "charts": drawn(charts(runs)),
            "settings": [head, *differing],
            "missing": missing[:MAX_LISTED],
        },
    )


def charts(runs: Sequence[Run]) -> list[Chart]:
    """Return the charts for which at least two runs have data."""
    found = []
    for panel in CHARTS:
        points = [points_of(run.facts, panel) for run in runs]
        lines = [
            Line(run.name, run.color, curve, run.is_dashed)
            for run, curve in zip(runs, points, strict=True)
            if curve
        ]
        marks = [
            mark._replace(label=f"{run.name}, {mark.label}", color=run.color)
            for run in runs
            for mark in (held_out(run.facts) if panel is HELD_OUT else ())
        ]
        if len(lines) > 1:
            chart = line_chart(panel, lines, marks=marks)
            found.append(chart._replace(legend=chart.legend[: len(lines)]))
    return found


def points_of(facts: ReportFacts, panel: Panel) -> Mapping[int, float]:
    """Return the values of a run by iteration or policy version; empty if unknown."""
    if panel is HELD_OUT:
        return {mark.x: mark.y for mark in held_out(facts)}
    if panel is SECONDS:
        tasks = sorted(facts.tasks, key=lambda task: task.iteration)
        groups = itertools.groupby(tasks, key=lambda task: task.iteration)
        return {n: busy_seconds(group) for n, group in groups if n in facts.updates}
    return facts.series(*panel.curves[0].sources)


def settings(facts: ReportFacts) -> dict[str, str]:
    """Return the settings of a run by dotted name, as JSON."""
    values = {key: facts.run.get(key) for key in ("preset", "code_version")}
    for section, table in facts.config.items():
        values |= {f"{section}.{key}": value for key, value in table.items()}
    return {key: json.dumps(value, sort_keys=True) for key, value in values.items()}


def outcomes(facts: ReportFacts) -> dict[str, str]:
    """Return the key numbers of a run as text, by label; "" if unknown."""
    found = {
        f"{score} {when}": score_cell(scalars, score)
        for score in ("accuracy", "greedy")
        for when, scalars in (("before", facts.before), ("after", facts.after))
    }
    best, tokens = facts.best, facts.num_tokens
    share = percent(best.accuracy, decimals=1) if best else ""
    found["best policy"] = f"version {best.policy_version}, {share}" if best else ""
    found["iterations"] = f"{len(facts.updates)}"
    found["tokens generated"] = number(tokens) if tokens is not None else ""
    found["total time"] = seconds(facts.seconds)
    return found


def rows_of(columns: Sequence[Mapping[str, str]]) -> list[list[str]]:
    """Return a row for each key: the key, then its value in each column."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return [[key, *(column.get(key) or "-" for column in columns)] for key in keys]
