"""Let tasks that run the same thing name the same component.

The compiler of kfp 2.17 writes each use of a component and of a nested pipeline once more, so ten
equal iterations stand in the workflow object ten times. The back end takes a component that many
tasks name: it visits each once (kubeflow/pipelines, backend/src/v2/compiler/visitor.go, `dfs`).
"""

import json
from collections.abc import Callable, Mapping
from typing import Any


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
