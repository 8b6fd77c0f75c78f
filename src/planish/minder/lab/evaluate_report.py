"""What an evaluation says, as plain values for a file and as tables for a page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from planish.minder.lab.evaluate_score import GRACE_SECONDS, Outcome, f1_difference, summary

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

Summaries = Mapping[str, Mapping[str, Any]]


def report(outcomes: Mapping[str, Sequence[Outcome]], about: Mapping[str, str]) -> dict[str, Any]:
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
        "wrong": {name: _wrong(found) for name, found in outcomes.items()},
    }


def _wrong(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return the cases with a miss or a false alarm, for those who want to look at them."""
    return [
        {
            "case": one.case,
            "kind": one.fault.kind if one.fault else "",
            "machines": one.machines,
            "detectable": bool(one.fault and one.fault.detectable),
            "missed": bool(one.fault and not one.right),
            "false": [asdict(alert) for alert in one.wrong],
        }
        for one in outcomes
        if one.wrong or (one.fault and not one.right)
    ]


def markdown(document: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    summaries: Summaries = document["variants"]
    parts = [_main_table(summaries)]
    if "minder" in summaries:
        chosen = summaries["minder"]
        parts += [
            _goals(chosen),
            _groups("kind of fault", chosen["by_kind"]),
            _groups("machines", chosen["by_size"]),
        ]
        parts += _statements(document)
    return "\n\n".join(parts) + "\n"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a table of Markdown.

    Example:
        >>> table("| metric | depth |", [("cpu_usage", 1)]).splitlines()
        ['| metric | depth |', '|---|---|', '| cpu_usage | 1 |']
    """
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def _main_table(summaries: Summaries) -> str:
    head = (
        "| variant | precision | recall | F1 | F1 strict | F1 detectable | alert after s, median "
        "(p90) | false alarms / 1,000 machine-h | normal runs quiet | s per call, mean (max) | "
        "published P / R / F1 |"
    )
    rows = [
        (
            name,
            *(_interval(one["first"][key]) for key in ("precision", "recall", "f1")),
            _interval(one["strict"]["f1"]),
            _interval(one["detectable_first"]["f1"]),
            f"{_whole(one['delay_median_s'])} ({_whole(one['delay_p90_s'])})",
            f"{one['false_alarms_per_1000_machine_hours']:.1f}",
            f"{100 * one['normal_without_alert']:.0f} %",
            f"{one['call_mean_s']:.3f} ({one['call_max_s']:.2f})",
            " / ".join(_figure(value) for value in PUBLISHED[name]) if name in PUBLISHED else "",
        )
        for name, one in summaries.items()
    ]
    return table(head, rows)


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


def _groups(title: str, groups: Mapping[str, Any]) -> str:
    head = (
        f"| {title} | cases | faults (detectable) | recall | recall of detectable | false alarms |"
    )
    rows = []
    for name, one in sorted(groups.items(), key=lambda item: -item[1]["faults"]):
        faults = f"{one['faults']} ({one['detectable_faults']})"
        recall = _interval(one["first"]["recall"]) if one["faults"] else ""
        detectable = f"{one['detectable_recall']:.3f}" if one["detectable_faults"] else ""
        rows.append((name, one["cases"], faults, recall, detectable, one["false_alarms"]))
    return table(head, rows)


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


def _interval(one: Mapping[str, float]) -> str:
    return f"{one['value']:.3f} ({one['low']:.2f}-{one['high']:.2f})"


def _whole(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
