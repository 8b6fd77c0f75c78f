"""Evaluation: replays labelled traces as the service would see them, and scores its alarms.

`planish minder evaluate` prints the tables of `markdown` and writes every figure of `report`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import Models
from planish.minder.detect.runs import growth
from planish.minder.lab.cases import DETECTABLE_SECONDS, Case, Truth, read_case
from planish.minder.lab.replay import Alarm, notes_of, replay
from planish.minder.lab.score import GRACE_SECONDS, CaseOutcome, summary

Progress = Callable[[int, int], None]
"""Function that is called with the number of traces done and in all."""
Item = TypeVar("Item")
T = TypeVar("T")


def in_processes(
    work: Callable[[Item], T], items: Sequence[Item], *, workers: int, progress: Progress
) -> Iterator[T]:
    """Yield the result of `work` for each item, in order."""
    # torch does not survive a fork after it has computed.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context) as pool:
        results = pool.map(work, items) if workers > 1 else map(work, items)
        for done, result in enumerate(results, 1):
            progress(done, len(items))
            yield result


def outcome_of(source: Case | Path, models: Models, config: MinderConfig) -> CaseOutcome:
    """Replay one case (or that of a file) with the interval and window of the service."""
    case = read_case(source) if isinstance(source, Path) else source
    first: dict[str, Alarm] = {}
    costs, results = [], []
    for call in replay(case, models, config):
        costs.append(call.seconds)
        results.append(call.result)
        for alarm in call.alarms:
            first.setdefault(alarm.machine, alarm)
    return CaseOutcome(
        case=case.name,
        fault=fault_of(case, config.detect.metrics, results[-1].intervals if results else {}),
        machines=case.frame.num_machines,
        seconds=case.frame.num_seconds,
        alarms=tuple(sorted(first.values(), key=lambda alarm: (alarm.time, alarm.machine))),
        call_seconds=tuple(costs),
        notes=tuple(notes_of(results)),
    )


def fault_of(
    case: Case, metrics: Sequence[str], intervals: Mapping[str, float] | None = None
) -> Truth | None:
    """Return the truth of a case for a detector of some metrics; None for a healthy job.

    `intervals` maps a metric to the seconds between its samples, if more than two.
    """
    truth, held = case.truth, intervals or {}
    if not truth.faulty:
        return None
    longest = max(
        truth.visible.get(name, 0) - growth(held.get(name, 1.0)) for name in (*metrics, "silent")
    )
    return replace(truth, detectable=truth.detectable and longest >= DETECTABLE_SECONDS)


def report(outcomes: Sequence[CaseOutcome]) -> dict[str, Any]:
    """Return every figure of one detector as JSON values."""
    return {**summary(outcomes), "grace_seconds": GRACE_SECONDS, "wrong": wrong_cases(outcomes)}


def wrong_cases(outcomes: Sequence[CaseOutcome]) -> list[dict[str, Any]]:
    """Return the cases with a missed fault or a false alarm."""
    return [
        {
            "case": outcome.case,
            "kind": outcome.fault.kind if outcome.fault else "",
            "machines": outcome.machines,
            "detectable": bool(outcome.fault and outcome.fault.detectable),
            "missed": bool(outcome.fault and not outcome.right),
            "false": [asdict(alarm) for alarm in outcome.wrong],
        }
        for outcome in outcomes
        if outcome.wrong or (outcome.fault and not outcome.right)
    ]


def markdown(document: Mapping[str, Any]) -> str:
    """Return the tables of a report."""
    parts = [
        main_table(document),
        group_table("kind of fault", document["by_kind"]),
        group_table("machines", document["by_size"]),
    ]
    return "\n\n".join(parts) + "\n"


def table(head: str, rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    rule = "|" + "---|" * (head.count("|") - 1)
    return "\n".join([head, rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


def main_table(figures: Mapping[str, Any]) -> str:
    """Return a table of the summary of a detector."""
    head = (
        "| detector | precision | recall | F1 | F1 strict | F1 detectable | alert after s, median "
        "(p90) | false alarms / 1,000 machine-h | normal runs quiet | s per call, mean (max) |"
    )
    median, p90 = (
        "-" if figures[key] is None else f"{figures[key]:.0f}"
        for key in ("delay_median_s", "delay_p90_s")
    )
    row = (
        "minder",
        *(_interval(figures["first"][key]) for key in ("precision", "recall", "f1")),
        _interval(figures["strict"]["f1"]),
        _interval(figures["detectable_first"]["f1"]),
        f"{median} ({p90})",
        f"{figures['false_alarms_per_1000_machine_hours']:.1f}",
        f"{100 * figures['normal_without_alert']:.0f} %",
        f"{figures['call_mean_s']:.3f} ({figures['call_max_s']:.2f})",
    )
    return table(head, [row])


def group_table(title: str, groups: Mapping[str, Any]) -> str:
    """Return a table with a row for each group of cases, the group with the most faults first."""
    head = (
        f"| {title} | cases | faults (detectable) | recall | recall of detectable | false alarms |"
    )
    rows = []
    for name, group in sorted(groups.items(), key=lambda item: -item[1]["faults"]):
        faults = f"{group['faults']} ({group['detectable_faults']})"
        recall = _interval(group["first"]["recall"]) if group["faults"] else ""
        detectable = f"{group['detectable_recall']:.3f}" if group["detectable_faults"] else ""
        rows.append((name, group["cases"], faults, recall, detectable, group["false_alarms"]))
    return table(head, rows)


def _interval(figure: Mapping[str, float]) -> str:
    return f"{figure['value']:.3f} ({figure['low']:.2f}-{figure['high']:.2f})"
