"""Disturbances of a run and the reactions to them, from events, stage logs and alerts.

An undisturbed run has none: gangs are shown only in iterations with another disturbance.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from planish.stages.report.facts import Event, MachineAlert, TaskLog, task_name
from planish.stages.report.text import one_line, seconds

ATTEMPTS, GANGS, ALERTS, CORDONS = "attempts", "gangs", "alerts", "cordons"
ROWS = {
    ATTEMPTS: "teal",
    GANGS: "blue",
    ALERTS: "red",
    CORDONS: "orange",
}
"""Rows of the chart, from top to bottom, to the colour of events without a fault."""
CORDONED = ("cordon done", "evict done")
"""First words of the monitor's text for actions after which a node takes no more pods."""


def run_events(
    records: Sequence[Mapping[str, Any]], tasks: Sequence[TaskLog], alerts: Sequence[MachineAlert]
) -> list[Event]:
    """Return the disturbances of a run in order of start; `tasks` are the newest attempts."""
    attempts = [record for record in records if record["kind"] == "attempt"]
    events = [_attempt(record) for record in attempts]
    again = {(record["stage"], record["iteration"], record["shard"]) for record in attempts}
    disturbed = {iteration for _, iteration, _ in again} | {alert.iteration for alert in alerts}
    for task in tasks:
        is_bad = task.state == "failed"
        if is_bad or (task.stage, task.iteration, task.shard) in again:
            text = f"{task.name}: {task.state} after {seconds(task.seconds)}"
            text += f": {one_line(task.error, limit=200)}" if is_bad else ""
            events.append(Event(ATTEMPTS, task.start_seconds, task.end_seconds, text, is_bad))
            disturbed.add(task.iteration)
    for record in records:
        iteration, begin = record["iteration"], record["begin_seconds"]
        if record["kind"] == "gang" and iteration in disturbed:
            end = one_line(record.get("end", "it has told no end"), limit=200)
            text = f"gang of {record['nodes']} pods, {_grid(record)}: {end}"
            is_bad = end != "complete"
            events.append(Event(GANGS, begin, record.get("end_seconds", 0.0), text, is_bad))
    for alert in alerts:
        events += _alert(alert)
    order = list(ROWS)
    return sorted(events, key=lambda event: (event.begin_seconds, order.index(event.row)))


def _attempt(record: Mapping[str, Any]) -> Event:
    """Return the event of an attempt that was tried again."""
    begin, end = record["begin_seconds"], record["end_seconds"]
    name = task_name(record["stage"], record["iteration"], record["shard"])
    code = record.get("exit_code")
    ended = "without a word" if code is None else f"with {code}"
    error = one_line(record.get("error") or "", limit=200)
    text = f"{name}: ended {ended} after {seconds(end - begin)}"
    return Event(ATTEMPTS, begin, end, f"{text}: {error}" if error else text, True)


def _alert(alert: MachineAlert) -> Iterator[Event]:
    """Yield the event of an alert and, if its node was cordoned, that of the cordon."""
    end = alert.last_second if alert.state == "resolved" else 0.0
    text = f"{alert.machine} unlike its peers in {alert.what}"
    yield Event(ALERTS, alert.first_second, end, text, True)
    for second, action in alert.history:
        if action.startswith(CORDONED):
            text = f"{alert.machine}: {one_line(action, limit=200)}"
            yield Event(CORDONS, second, 0.0, text)
            return


def _grid(record: Mapping[str, Any]) -> str:
    names = [name for name in ("tp", "cp", "pp", "dp") if name in record]
    sizes = ", ".join(f"{name} {record[name]}" for name in names)
    return f"{record['trainer']} {sizes}"
