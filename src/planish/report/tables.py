"""Tables of the page: scores, configuration, digests, the funnel of curation."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.report.facts import Evaluation, RunFacts, Saved, Task
from planish.report.words import number, one_line

MAX_SAVED = 24
"""Policies and states listed; the newest are kept."""
_ERROR_SUFFIXES = ("_standard_error", "_se", "_stderr")
_SHARE_WORDS = ("accuracy", "pass@", "cons@", "avg@", "greedy", "fraction", "frac", "rate")


@dataclass(frozen=True)
class Change:
    """A difference in words, judged."""

    text: str
    """With sign."""
    is_better: bool
    """Clearly up."""
    is_worse: bool
    """Clearly down."""


@dataclass(frozen=True)
class Row:
    """One line of a table."""

    label: str
    """First cell."""
    cells: list[str]
    """Other cells."""
    change: Change | None = None
    """Last cell."""


@dataclass(frozen=True)
class Table:
    """A table of scores."""

    title: str
    """Heading."""
    columns: list[str]
    """Heads of all columns."""
    rows: list[Row]
    """Lines."""
    has_change: bool
    """The last column is a change."""


def change_of(before: float, after: float, *, noise: float = 0.0) -> Change:
    """Describe a change of a fraction in percentage points.

    Args:
        before: fraction.
        after: fraction.
        noise: one standard error of the difference; a smaller change is not judged.

    Example:
        >>> change_of(0.25, 0.5).text
        '+25.0 points'
    """
    difference = after - before
    is_clear = abs(difference) > noise
    return Change(
        f"{100 * difference:+.1f} points", is_clear and difference > 0, is_clear and difference < 0
    )


def _is_share(name: str) -> bool:
    return any(word in name for word in _SHARE_WORDS)


def _is_error(name: str) -> bool:
    return name.endswith(_ERROR_SUFFIXES)


def _cell(scalars: Mapping[str, float], name: str) -> str:
    if name not in scalars:
        return ""
    value = scalars[name]
    if not _is_share(name):
        return number(value)
    error = next((scalars[name + s] for s in _ERROR_SUFFIXES if name + s in scalars), None)
    spread = f" \u00b1 {100 * error:.1f}" if error is not None else ""
    return f"{100 * value:.1f}{spread} %"


def _change(name: str, first: Mapping[str, float], last: Mapping[str, float]) -> Change | None:
    if name not in first or name not in last:
        return None
    if _is_share(name):
        if name.startswith(("truncated", "invalid")):
            raised = change_of(first[name], last[name])
            return Change(raised.text, raised.is_worse, raised.is_better)
        return change_of(first[name], last[name])
    return Change(
        f"{'+' if last[name] >= first[name] else ''}{number(last[name] - first[name])}",
        False,
        False,
    )


def label_of(name: str) -> str:
    """Turn a metric name into words."""
    return one_line(name.replace("_", " "), limit=60)


def score_tables(evaluations: Sequence[Evaluation]) -> list[Table]:
    """Return the table over all prompts and the table per source; none without evaluations."""
    if not evaluations:
        return []
    has_change = len(evaluations) > 1
    heads = [f"policy {evaluation.version}" for evaluation in evaluations]
    if has_change:
        heads[0] += " (before)"
        heads[-1] += " (after)"
    tail = ["change"] if has_change else []
    tables = [_overall(evaluations, ["score", *heads, *tail], has_change)]
    tables += _per_source(evaluations, ["source", *heads, *tail], has_change)
    return tables


def _overall(evaluations: Sequence[Evaluation], columns: list[str], has_change: bool) -> Table:
    names: dict[str, None] = {}
    for evaluation in evaluations:
        names.update(dict.fromkeys(n for n in evaluation.scalars if not _is_error(n)))
    first, last = evaluations[0].scalars, evaluations[-1].scalars
    rows = [
        Row(
            label_of(name),
            [_cell(evaluation.scalars, name) for evaluation in evaluations],
            _change(name, first, last) if has_change else None,
        )
        for name in sorted(names, key=_importance)
    ]
    return Table("All held-out prompts", columns, rows, has_change)


def _importance(name: str) -> tuple[int, int, str]:
    order = ("avg@", "accuracy", "greedy", "cons@", "pass@")
    place = next((i for i, start in enumerate(order) if name.startswith(start)), len(order))
    return place, len(name), name


def _per_source(
    evaluations: Sequence[Evaluation], columns: list[str], has_change: bool
) -> list[Table]:
    sources = sorted({name for evaluation in evaluations for name in evaluation.sources})
    if len(sources) < 2:
        return []
    first, last = evaluations[0].sources, evaluations[-1].sources
    rows = []
    for source in sources:
        name = main_score({**first.get(source, {}), **last.get(source, {})})
        if not name:
            continue
        cells = [_cell(evaluation.sources.get(source, {}), name) for evaluation in evaluations]
        change = _change(name, first.get(source, {}), last.get(source, {})) if has_change else None
        rows.append(Row(source, cells, change))
    return [Table("Mean accuracy per source", columns, rows, has_change)] if rows else []


def main_score(scalars: Mapping[str, float]) -> str:
    """Return the name of the mean accuracy among scores, empty when there is none."""
    names = sorted((n for n in scalars if not _is_error(n)), key=_importance)
    return names[0] if names and _is_share(names[0]) else ""


def stage_seconds(tasks: Sequence[Task]) -> dict[int, dict[str, float]]:
    """Return iteration -> stage -> seconds; of parallel tasks the slowest counts."""
    found: dict[int, dict[str, float]] = {}
    for task in tasks:
        stages = found.setdefault(task.iteration, {})
        stages[task.stage] = max(stages.get(task.stage, 0.0), task.seconds)
    return dict(sorted(found.items()))


def saved_rows(facts: RunFacts) -> tuple[list[dict[str, str]], str]:
    """Return the newest policies and states with their digests, and what was left out."""
    kept = [*facts.policies[-MAX_SAVED // 2 :], *facts.states[-MAX_SAVED // 2 :]]
    rows = [
        {
            "label": f"policy {item.number}"
            if item.kind == "policy"
            else f"state, step {item.number}",
            "place": _below_root(item, facts.root),
            "sha256": item.sha256,
        }
        for item in kept
    ]
    hidden = len(facts.policies) + len(facts.states) - len(kept)
    return rows, f"{hidden} older sets are not listed." if hidden else ""


def _below_root(item: Saved, root: str) -> str:
    return item.uri.removeprefix(root).lstrip("/")


def config_tables(config: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return section -> (key, value as JSON) of a resolved configuration, sorted."""
    return [
        (
            one_line(section),
            [
                (one_line(key), one_line(json.dumps(table[key], sort_keys=True)))
                for key in sorted(table)
            ],
        )
        for section, table in sorted(config.items())
        if isinstance(table, Mapping) and table
    ]


def funnel(facts: RunFacts) -> list[dict[str, Any]]:
    """Return the steps of curation with what each removed; none when curation logged no counts."""
    del facts
    return []
