"""What a comparison of detectors says, as plain values for a file and as tables for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from planish.minder.lab.evaluate import group_table, main_table, table, wrong_cases
from planish.minder.lab.score import (
    GRACE_SECONDS,
    CaseOutcome,
    Counting,
    Interval,
    bootstrap,
    f1,
    interval,
    summary,
)

PUBLISHED: dict[str, tuple[float | None, float | None, float | None]] = {
    "minder-paper": (0.904, 0.883, 0.893),
    "mahalanobis": (0.788, 0.767, 0.777),
    "no-continuity": (0.757, None, None),
}
"""Precision, recall and F1 on the paper's own faults (section 6)."""

GOALS: dict[str, tuple[str, float, int]] = {
    "F1 on detectable faults": ("detectable_first.f1", 0.95, 1),
    "precision": ("first.precision", 0.95, 1),
    "F1 over all faults": ("first.f1", 0.88, 1),
    "normal runs without any alert": ("normal_without_alert", 0.95, 1),
    "false alarms per 1,000 machine-hours": ("false_alarms_per_1000_machine_hours", 4.0, -1),
}
"""What the default profile should reach: figure, bound, 1 for at least and -1 for at most."""


def report(
    outcomes: Mapping[str, Sequence[CaseOutcome]], about: Mapping[str, str]
) -> dict[str, Any]:
    """Return every figure of every variant, and differences of the default from the others.

    Args:
        outcomes: by variant, on the same cases.
        about: variant to what it is.
    """
    ours = outcomes.get("minder")
    differences = {
        name: {how: asdict(f1_difference(ours, theirs, how)) for how in ("first", "strict")}
        for name, theirs in outcomes.items()
        if ours is not None and name != "minder"
    }
    return {
        "variants": {
            name: {"about": about.get(name, ""), **summary(found)}
            for name, found in outcomes.items()
        },
        "minder_minus_others_f1": differences,
        "grace_seconds": GRACE_SECONDS,
        "wrong": {name: wrong_cases(found) for name, found in outcomes.items()},
    }


def f1_difference(
    ours: Sequence[CaseOutcome], theirs: Sequence[CaseOutcome], counting: Counting
) -> Interval:
    """Return F1 of one detector minus that of another on the same cases, resampled together.

    Raises:
        ValueError: the cases differ.
    """
    if [one.case for one in ours] != [one.case for one in theirs]:
        raise ValueError("both detectors must have seen the same cases in the same order")
    # Equal seeds draw equal cases.
    (our_total, our_samples), (their_total, their_samples) = (
        bootstrap(outcomes, counting) for outcomes in (ours, theirs)
    )
    return interval(f1(our_total) - f1(their_total), f1(our_samples) - f1(their_samples))


def markdown(document: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    summaries: Mapping[str, Mapping[str, Any]] = document["variants"]
    parts = [main_table(summaries), _published(summaries)]
    if "minder" in summaries:
        chosen = summaries["minder"]
        parts += [
            _goals(chosen),
            group_table("kind of fault", chosen["by_kind"]),
            group_table("machines", chosen["by_size"]),
        ]
        parts += _statements(document)
    return "\n\n".join(part for part in parts if part) + "\n"


def _published(summaries: Mapping[str, Any]) -> str:
    rows = [
        (name, *("-" if value is None else f"{value:.3f}" for value in figures))
        for name, figures in PUBLISHED.items()
        if name in summaries
    ]
    return table("| published | precision | recall | F1 |", rows) if rows else ""


def _goals(one: Mapping[str, Any]) -> str:
    rows = []
    for name, (path, bound, sign) in GOALS.items():
        value: Any = one
        for key in path.split("."):
            value = value[key]
        value = value["value"] if isinstance(value, Mapping) else value
        met = "held" if sign * value >= sign * bound else "MISSED"
        limit = f"at {'least' if sign > 0 else 'most'} {bound:g}"
        rows.append((name, limit, f"{value:.3f}", met))
    return table("| goal of the default profile | bound | here | |", rows)


def _statements(document: Mapping[str, Any]) -> list[str]:
    """Say whether the LSTM-VAE beats principal components and raw windows."""
    found = []
    for name in ("pca", "raw"):
        difference = document["minder_minus_others_f1"].get(name)
        if difference is None:
            continue
        one = difference["first"]
        if one["low"] > 0:
            verdict = f"the LSTM-VAE beats `{name}`"
        elif one["high"] < 0:
            verdict = f"the LSTM-VAE is worse than `{name}`"
        else:
            verdict = f"the LSTM-VAE and `{name}` do not differ"
        figures = f"{one['value']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})"
        found.append(f"{verdict[0].upper()}{verdict[1:]}: F1 {figures}.")
    return found
