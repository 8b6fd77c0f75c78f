"""Tables of the page: scores, configuration, digests, steps of curation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from planish.records.reports import BestPolicy, EvalReport
from planish.stages.report.facts import Evaluations, ReportFacts
from planish.stages.report.text import number, one_line

_STEP = re.compile(r"\| (.{1,80}?) \| ([a-z ]{1,20}) \| (\d{1,12}) \| (\d{1,12}) \| (\d{1,12}) \|$")
MAX_STEPS = 30
MAX_SAVED = 24
NEWEST_SCORES = 4
"""Number of newest evaluations with a column, beside the first and the best one."""
_ERROR = "_standard_error"
_SHARES = ("accuracy", "pass@", "cons@", "greedy", "invalid", "truncated", "refused")
_LESS_IS_BETTER = ("invalid", "truncated", "refused", "verifier_")
_ORDER = ("accuracy", "greedy", "cons@", "pass@", "invalid", "truncated")
"""Prefixes of scores, in the order of the table."""
_QUIET = ("refused_fraction", "verifier_errors", "verifier_timeouts")
"""Scores that are shown only if one value is not 0."""
_LABELS = {
    "greedy": "greedy (temperature 0)",
    "invalid_fraction": "responses without a readable answer",
    "truncated_fraction": "responses cut off at the limit",
    "refused_fraction": "responses that the engine refused",
    "response_length_mean": "mean response length (tokens)",
    "verifier_errors": "verifier errors",
    "verifier_timeouts": "responses that took the verifier too long",
}


class ScoreChange(NamedTuple):
    """A difference in words, and its direction."""

    text: str
    is_better: bool = False
    is_worse: bool = False


class ScoreRow(NamedTuple):
    """One line of a table of scores."""

    label: str
    cells: list[str]
    change: ScoreChange | None = None


class ScoreTable(NamedTuple):
    """A table of scores."""

    title: str
    columns: list[str]
    """Column heads, including that of the labels."""
    rows: list[ScoreRow]
    has_change: bool


def change_of(before: float, after: float, *, noise: float = 0.0) -> ScoreChange:
    """Return a change of a fraction in percentage points; up to `noise` it has no direction.

    Example:
        >>> change_of(0.25, 0.5).text
        '+25.0 points'
    """
    difference = after - before
    is_clear = abs(difference) > noise
    # The difference of the printed numbers: 21.0 and 42.8 give 21.8, whatever their further digits.
    points = round(100 * after, 1) - round(100 * before, 1)
    return ScoreChange(
        f"{points:+.1f} points", is_clear and difference > 0, is_clear and difference < 0
    )


def score_cell(scalars: Mapping[str, float], name: str) -> str:
    """Return a score with its standard error, if known; empty without the score."""
    if name not in scalars:
        return ""
    value = scalars[name]
    if not name.startswith(_SHARES):
        return number(value)
    error = scalars.get(name + _ERROR)
    spread = f" \u00b1 {100 * error:.1f}" if error is not None else ""
    return f"{100 * value:.1f}{spread} %"


def _change(name: str, first: Mapping[str, float], last: Mapping[str, float]) -> ScoreChange | None:
    if name not in first or name not in last:
        return None
    if not name.startswith(_SHARES):
        # The decimals of the printed value, at least one, because `number` drops zeros.
        plain = number(last[name]).replace(",", "").lstrip("-")
        decimals = max(1, len(plain.partition(".")[2])) if plain.replace(".", "").isdigit() else 6
        rise = round(last[name] - first[name], decimals)
        return ScoreChange(f"+{number(rise)}" if rise > 0 else number(rise))
    noise = float((first.get(name + _ERROR, 0.0) ** 2 + last.get(name + _ERROR, 0.0) ** 2) ** 0.5)
    change = change_of(first[name], last[name], noise=noise)
    if name.startswith(_LESS_IS_BETTER):
        return ScoreChange(change.text, change.is_worse, change.is_better)
    return change


def _label(name: str, scalars: Mapping[str, float]) -> str:
    if name == "accuracy" and "num_samples" in scalars:
        return f"avg@{scalars['num_samples']:.0f} (mean accuracy over samples)"
    return _LABELS.get(name, one_line(name.replace("_", " "), limit=60))


def score_tables(
    evaluations: Evaluations, best: BestPolicy | None = None, *, name: str = ""
) -> list[ScoreTable]:
    """Return the table over all prompts and the table per source; none without evaluations.

    The first, the best and the newest evaluations have a column. `name` is the name of the
    evaluation set, empty for the held-out prompts.
    """
    if not evaluations:
        return []
    best_version = best.policy_version if best else None
    newest = len(evaluations) - NEWEST_SCORES
    chosen = [
        version
        for place, version in enumerate(evaluations)
        if not 0 < place < newest or version == best_version
    ]
    heads = [
        f"policy {version}" + " (best)" * (len(chosen) > 2 and version == best_version)
        for version in chosen
    ]
    shown, has_change = [evaluations[version] for version in chosen], len(chosen) > 1
    if has_change:
        heads[0] += " (before)"
        heads[-1] += " (after)"
        heads.append("change")
    titles = ("All held-out prompts", "Mean accuracy per source")
    if name:
        titles = (name, f"{name}, mean accuracy per source")
    tables = [ScoreTable(titles[0], ["score", *heads], _overall(shown), has_change)]
    if rows := _per_source(shown):
        tables.append(ScoreTable(titles[1], ["source", *heads], rows, has_change))
    return tables


def _overall(evaluations: Sequence[EvalReport]) -> list[ScoreRow]:
    first, last = evaluations[0].scalars, evaluations[-1].scalars
    # Scores that other cells show have no row of their own, and pass@1 equals avg@n.
    names = {name for evaluation in evaluations for name in evaluation.scalars}
    names = {n for n in names if not n.startswith(("num_", "accuracy_")) and n != "pass@1"}
    names -= {n for n in _QUIET if not any(e.scalars.get(n) for e in evaluations)}
    rows = [
        ScoreRow(
            _label(name, last),
            [score_cell(evaluation.scalars, name) for evaluation in evaluations],
            _change(name, first, last) if len(evaluations) > 1 else None,
        )
        for name in sorted(names, key=_importance)
    ]
    intervals = []
    for scalars in (evaluation.scalars for evaluation in evaluations):
        ends = [scalars.get(f"accuracy_bootstrap_{end}") for end in ("low", "high")]
        low, high = (None if end is None else f"{100 * end:.1f}" for end in ends)
        intervals.append(f"{low} to {high} %" if low and high else "")
    if any(intervals):
        rows.insert(1, ScoreRow("95 % interval over prompts", intervals))
    return rows


def _importance(name: str) -> tuple[int, int, str]:
    place = next((i for i, start in enumerate(_ORDER) if name.startswith(start)), len(_ORDER))
    return place, len(name), name


def _per_source(evaluations: Sequence[EvalReport]) -> list[ScoreRow]:
    sources = sorted({name for evaluation in evaluations for name in evaluation.sources})
    rows = []
    for source in sources if len(sources) > 1 else ():
        scores = [evaluation.sources.get(source, {}) for evaluation in evaluations]
        change = _change("accuracy", scores[0], scores[-1]) if len(scores) > 1 else None
        count = scores[-1].get("num_prompts")
        label = f"{source} ({number(count)} prompts)" if count is not None else source
        cells = [score_cell(scalars, "accuracy") for scalars in scores]
        rows.append(ScoreRow(label, cells, change))
    return rows


def saved_rows(facts: ReportFacts) -> tuple[list[dict[str, str]], str]:
    """Return rows of the best and newest policies and states, and a note on hidden ones."""
    best = facts.best.policy_version if facts.best else None
    newest = [*facts.policies][-MAX_SAVED // 2 :]
    kept = [
        (f"policy {version}" + ", best" * (version == best), ref)
        for version, ref in facts.policies.items()
        if version in newest or version == best
    ]
    kept += [(f"state, step {n}", ref) for n, ref in [*facts.states.items()][-MAX_SAVED // 2 :]]
    rows = [
        {
            "label": label,
            "place": ref.uri.removeprefix(facts.root).lstrip("/"),
            "sha256": ref.manifest_sha256,
        }
        for label, ref in kept
    ]
    hidden = len(facts.policies) + len(facts.states) - len(kept)
    return rows, f"{hidden} older sets are not listed." if hidden else ""


def config_tables(
    config: Mapping[str, Mapping[str, Any]],
) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return (section, [(key, value as JSON)]) of a resolved configuration, sorted."""
    return [
        (
            one_line(section),
            [
                (one_line(key), one_line(json.dumps(table[key], sort_keys=True)))
                for key in sorted(table)
            ],
        )
        for section, table in sorted(config.items())
        if table
    ]


def funnel(curation: str) -> list[dict[str, Any]]:
    """Return the steps of curation from its report: label, unit, rows kept, rows dropped.

    The table of the report has the columns filter, unit, in, out, dropped.
    """
    found = [match.groups() for line in curation.splitlines() if (match := _STEP.match(line))]
    steps = [(name, unit, int(out), int(gone)) for name, unit, _, out, gone in found[:MAX_STEPS]]
    # All bars have one scale, whatever unit a step counts.
    largest = max((num_out for _, _, num_out, _ in steps), default=1) or 1
    return [
        {
            "label": one_line(name, limit=60),
            "unit": unit,
            "count": f"{num_out:,}",
            "lost": f"-{dropped:,}" if dropped else "",
            "width": f"{100 * num_out / largest:.2f}",
        }
        for name, unit, num_out, dropped in steps
    ]
