"""Name the tasks of iterations apart, and let those that run the same thing name one component.

The run page finds the artifacts of a task by its name in the whole run: with equal names every
iteration would show those of the last one. The compiler of kfp 2.17 writes each use of a component
once more, so what ten iterations run would stand in the workflow object ten times. The back end
takes a component that many tasks name: it visits each once (kubeflow/pipelines,
backend/src/v2/compiler/visitor.go, `dfs`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

REFERENCES = ("producerTask", "producerSubtask", "dependentTasks")
"""Keys under which a graph names its tasks."""


def name_tasks_apart(spec: dict[str, Any]) -> None:
    """Put the number of the iteration behind the names of its tasks, in place.

    Args:
        spec: the pipeline document, in which each iteration has a component of its own.
    """
    components = spec["components"]
    for graph in (spec["root"], *components.values()):
        for name, task in graph.get("dag", {}).get("tasks", {}).items():
            before, _, number = name.rpartition("iteration-")
            if not before and number.isdecimal():
                dag = components[task["componentRef"]["name"]]["dag"]
                names = {old: f"{old}-i{number}" for old in dag["tasks"]}
                dag["tasks"] = {names[old]: inner for old, inner in dag["tasks"].items()}
                _rename(dag, names)


def _rename(node: Any, names: Mapping[str, str]) -> None:
    """Replace the names of tasks wherever something below a node refers to them."""
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in children:
        if key in REFERENCES:
            is_one = isinstance(value, str)
            node[key] = names[value] if is_one else [names[name] for name in value]
        elif isinstance(value, (dict, list)):
            _rename(value, names)


def share_components(spec: dict[str, Any], pods: dict[str, Any]) -> None:
    """Drop every executor and component that equals an earlier one, in place.

    Args:
        spec: the pipeline document.
        pods: Kubernetes settings of each executor by label, of the platform document.
    """
    executors, components = spec["deploymentSpec"]["executors"], spec["components"]
    labels = _first_equal(executors, lambda label: [executors[label], pods.get(label)])
    for label in [label for label, first in labels.items() if label != first]:
        executors.pop(label)
        pods.pop(label, None)
    for component in components.values():
        if "executorLabel" in component:
            component["executorLabel"] = labels[component["executorLabel"]]
    # Graphs are equal once what their tasks name is the same.
    while len(names := _first_equal(components, components.get)) > len({*names.values()}):
        for name in [name for name, first in names.items() if name != first]:
            components.pop(name)
        for graph in (spec["root"], *components.values()):
            for task in graph.get("dag", {}).get("tasks", {}).values():
                task["componentRef"]["name"] = names[task["componentRef"]["name"]]


def _first_equal(items: Mapping[str, Any], content: Callable[[str], Any]) -> dict[str, str]:
    """Return each key to the first one with equal content, shorter keys first."""
    firsts: dict[str, str] = {}
    return {
        key: firsts.setdefault(json.dumps(content(key), sort_keys=True), key)
        for key in sorted(items, key=lambda key: (len(key), key))
    }
