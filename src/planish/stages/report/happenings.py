"""What disturbed a run and what was done about it, put together from events, stage logs and alerts.

An undisturbed run has none: gangs and commits are told only of iterations in which something else
happened too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planish.stages.report.facts import Happening, MachineAlert, TaskLog
from planish.stages.report.words import one_line, seconds

ATTEMPTS, GANGS, COMMITS, ALERTS, CORDONS = "attempts", "gangs", "commits", "alerts", "cordons"
ROWS = (ATTEMPTS, GANGS, COMMITS, ALERTS, CORDONS)
"""Of the picture, from top to bottom."""

DONE = ("cordon done", "evict done")
"""How the monitor's words for an action begin after which a node takes no pods any more."""

Event = tuple[Mapping[str, float], Mapping[str, str]]
"""Numbers and texts of an event, both by name."""


def happenings(
    events: Sequence[Event], tasks: Sequence[TaskLog], alerts: Sequence[MachineAlert]
) -> list[Happening]:
    """Return what disturbed a run, by begin.

    Args:
        events: as `planish.run.events` wrote them.
        tasks: newest attempt of each task.
        alerts: of machines.
    """
    found = [of_attempt(*event) for event in events if event[1].get("kind") == "attempt"]
    again = {
        (texts.get("stage"), numbers.get("iteration"), numbers.get("shard"))
        for numbers, texts in events
        if texts.get("kind") == "attempt"
    }
    disturbed = {numbers for _, numbers, _ in again} | {float(alert.iteration) for alert in alerts}
    for task in tasks:
        is_bad = task.state == "failed"
        if is_bad or (task.stage, task.iteration, task.shard) in again:
            text = f"{task.name}: {task.state} after {seconds(task.seconds)}"
            text += f": {one_line(task.error, limit=200)}" if is_bad else ""
            found.append(Happening(ATTEMPTS, task.start_seconds, task.end_seconds, text, is_bad))
            disturbed.add(float(task.iteration))
    ends = {float(task.iteration): task.end_seconds for task in tasks if task.stage == "train"}
    for numbers, texts in events:
        iteration, begin = numbers.get("iteration", 0.0), numbers.get("begin_seconds", 0.0)
        if texts.get("kind") == "gang" and iteration in disturbed:
            end = one_line(texts.get("end", "it has told no end"), limit=200)
            text = f"gang of {numbers.get('nodes', 0):g} pods, {_grid(numbers, texts)}: {end}"
            is_bad = end != "complete"
            found.append(Happening(GANGS, begin, numbers.get("end_seconds", 0.0), text, is_bad))
        elif texts.get("kind") == "resumed":
            steps = f"from step {numbers.get('step', 0):g} of {numbers.get('of', 0):g}"
            text = f"training went on {steps}, {_grid(numbers, texts)}"
            found.append(Happening(COMMITS, begin, ends.get(iteration, 0.0), text))
    for alert in alerts:
        found += of_alert(alert)
    return sorted(found, key=lambda one: (one.begin_seconds, ROWS.index(one.row)))


def of_attempt(numbers: Mapping[str, float], texts: Mapping[str, str]) -> Happening:
    """Return an attempt that a later one has followed."""
    begin, end = numbers.get("begin_seconds", 0.0), numbers.get("end_seconds", 0.0)
    stage, shard = one_line(texts.get("stage", "?"), limit=40), int(numbers.get("shard", 0))
    name = TaskLog(stage, int(numbers.get("iteration", 0)), shard, "failed", begin, 0.0).name
    code = f"with {numbers['exit_code']:g}" if "exit_code" in numbers else "without a word"
    error = one_line(texts.get("error", ""), limit=200)
    text = f"{name}: ended {code} after {seconds(end - begin)}"
    return Happening(ATTEMPTS, begin, end, f"{text}: {error}" if error else text, True)


def of_alert(alert: MachineAlert) -> list[Happening]:
    """Return an alert, and the time in which its machine takes no pods."""
    machine = one_line(alert.machine, limit=80)
    what = one_line(alert.metric or alert.kind, limit=80)
    end = alert.last_second if alert.state == "resolved" else 0.0
    text = f"{machine} unlike its peers in {what}"
    found = [Happening(ALERTS, alert.first_second, end, text, True)]
    done = [told for told in alert.history if told[1].startswith(DONE)]
    if done:
        second, action = done[0]
        text = f"{machine}: {one_line(action, limit=200)}"
        found.append(Happening(CORDONS, second, 0.0, text))
    return found


def _grid(numbers: Mapping[str, float], texts: Mapping[str, str]) -> str:
    """Return trainer and grid in words."""
    sizes = ", ".join(f"{name} {numbers.get(name, 0):g}" for name in ("tp", "pp", "dp"))
    return f"{one_line(texts.get('trainer', '?'), limit=20)} {sizes}"
