"""The tasks of a run in the order of its graph.

Kubeflow Pipelines 2.17 lists every node of the workflow, without an order: a driver and an executor
for each task. An unfinished node has an end time in the year 1.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any

_OF_KUBEFLOW = re.compile(r"root|(.*-)?driver(\(\d+\))?|executor(\(\d+\))?")
_INSIDE = re.compile(r"-i\d+$")


def task_names(spec: Mapping[str, Any], component: str = "") -> Iterator[tuple[str, str]]:
    """Yield the tasks of a compiled graph, each after its predecessors.

    Returns:
        The name of a task in the API, and its name in the UI.
    """
    graph = spec["components"][component] if component else spec["root"]
    tasks = graph["dag"]["tasks"]
    upstream = {name: tasks[name].get("dependentTasks", []) for name in tasks}
    for name in TopologicalSorter(upstream).static_order():
        yield name, tasks[name].get("taskInfo", {}).get("name", name)
        inner = tasks[name]["componentRef"]["name"]
        if "dag" in spec["components"][inner]:
            yield from task_names(spec, inner)


def task_rows(run: Any) -> list[list[str]]:
    """Return name, state, start, end and error of each task of a run that has started.

    Tasks inside an iteration keep the names of the graph, which contain the iteration.
    """
    given = run.pipeline_spec or {}
    spec = given.get("pipeline_spec", given)
    order = {name: place for place, name in enumerate(task_names(spec))} if spec else {}
    places = {name: (place, shown) for (name, shown), place in order.items()}
    rows = []
    for task in (run.run_details and run.run_details.task_details) or []:
        name = str(task.display_name or "-")
        if name in places or not (places or _OF_KUBEFLOW.fullmatch(name)):
            place, shown = places.get(name, (0, name))
            if _INSIDE.search(name):
                shown = name
            begin, end = _moment(task.start_time), _moment(task.end_time)
            error = (task.error.message if task.error else "") or ""
            rows.append((place, [shown, str(task.state or "-"), begin, end, error]))
    return [row for _, row in sorted(rows, key=lambda each: (each[0], each[1][2]))]


def _moment(time: datetime.datetime | None) -> str:
    return f"{time:%Y-%m-%d %H:%M:%S}" if time and time.year > 1 else "-"
