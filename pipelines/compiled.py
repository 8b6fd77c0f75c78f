"""A compiled pipeline as plain dictionaries behind a few names, and the size of its run.

A task is an entry of a graph, a component is what a task runs, and an executor is the pod of a
component that is no graph itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

Node = Mapping[str, Any]


@dataclass(frozen=True)
class Compiled:
    """Both documents of a compiled pipeline."""

    components: Mapping[str, Node]
    """Components by name; `root` is the outermost graph."""
    name: str
    """Name of the pipeline."""
    executors: Mapping[str, Node]
    """Container of each executor by label."""
    pods: Mapping[str, Node]
    """Kubernetes settings of each executor by label."""

    @classmethod
    def from_documents(cls, documents: Sequence[Node]) -> Self:
        """Take the pipeline document and, where present, the platform document.

        Raises:
            ValueError: no document has a `root`.
        """
        specs = [document for document in documents if "root" in document]
        if len(specs) != 1:
            raise ValueError(
                f"a compiled pipeline must have one document with `root`, got {len(specs)}; "
                "compile it with pipelines.compile"
            )
        spec = specs[0]
        pods: dict[str, Node] = {}
        for document in documents:
            kubernetes = document.get("platforms", {}).get("kubernetes", {})
            pods.update(kubernetes.get("deploymentSpec", {}).get("executors", {}))
        executors = spec.get("deploymentSpec", {}).get("executors", {})
        return cls(
            name=str(spec.get("pipelineInfo", {}).get("name", "")),
            components={**spec.get("components", {}), "root": spec["root"]},
            executors={label: entry.get("container", {}) for label, entry in executors.items()},
            pods=pods,
        )

    def dags(self) -> Iterator[tuple[str, Node, Node]]:
        """Yield (component name, component, its tasks) for every graph."""
        for name, component in self.components.items():
            if "dag" in component:
                yield name, component, component["dag"].get("tasks", {})

    def tasks(self) -> Iterator[tuple[str, Node, str, Node]]:
        """Yield (component name, component, task name, task) for every task of every graph."""
        for name, component, tasks in self.dags():
            for task_name, task in tasks.items():
                yield name, component, task_name, task

    def executor_of(self, task: Node) -> str:
        """Return the executor label of a task; empty for a task that is a graph."""
        component = self.components.get(task["componentRef"]["name"], {})
        return str(component.get("executorLabel", ""))


MAX_PODS = 1000
"""Half of the pods up to which one workflow behaves well."""


MAX_OBJECT_BYTES = 900_000
"""Argo refuses a workflow object over 1 MiB; the rest is for retries, about sixty pods."""

POD_STATUS_BYTES = 2_300
"""What the nodes of one pod add to the status, compressed: 398 kB for 182 pods, 32 kB for the 14 of
an iteration with two shards. Retries of the installation wrap every node, which is counted in."""

TASK_BYTES = 3_200
"""What a task of an iteration, or the iteration itself, adds to what `spec_bytes` counts."""

LEAF_BYTES, GRAPH_BYTES = 1_600, 1_000
"""What a task adds to the templates besides its own text: a container, a graph or loop."""

TEMPLATES_BYTES = 17_500
"""Templates of drivers and launchers, and the rest of an object without tasks."""


def spec_bytes(compiled: Compiled) -> int:
    """Return the size of the specification in the workflow object, in bytes.

    The back end writes components, container and Kubernetes settings as text into arguments of the
    workflow, those of equal containers once, and each task as text into the template of its graph,
    a loop twice. The constants are fitted to two measured objects (Kubeflow Pipelines 2.17, Argo
    4.0): 351 kB for 12 iterations of two shards and 777 kB for 30, both met within 1 percent.

    Source: kubeflow/pipelines, tag 2.17.0, backend/src/v2/compiler/argocompiler/argo.go and dag.go.
    """

    def text(node: Node) -> str:
        return json.dumps(json.dumps(node, separators=(",", ":"), sort_keys=True))

    arguments: dict[str, Node] = {}
    size = TEMPLATES_BYTES
    for name, component in compiled.components.items():
        label = component.get("executorLabel", "")
        container = text(compiled.executors.get(label, {})) if label else name
        arguments.setdefault(f"components {container}", component)
        if label:
            arguments[f"implementations {container}"] = compiled.executors.get(label, {})
            arguments[f"kubernetes {name}"] = compiled.pods.get(label, {})
    for _, _, _, task in compiled.tasks():
        times = 2 if "parameterIterator" in task else 1
        size += times * len(text(task))
        size += LEAF_BYTES if compiled.executor_of(task) else times * GRAPH_BYTES
    return size + sum(len(text(node)) for node in arguments.values())


def object_bytes(compiled: Compiled) -> int:
    """Return the size of the workflow object at the end of a run without failures, compressed."""
    return spec_bytes(compiled) + POD_STATUS_BYTES * pods_of(compiled)


def pods_of(compiled: Compiled, name: str = "root") -> int:
    """Return how many pods one attempt of a graph makes: two a task, one a graph or loop turn."""
    total = 1
    for task in compiled.components[name]["dag"].get("tasks", {}).values():
        child = task["componentRef"]["name"]
        turns = 1
        if "parameterIterator" in task:
            turns = len(json.loads(task["parameterIterator"]["items"]["raw"]))
            total += 1
        inner = pods_of(compiled, child) if "dag" in compiled.components[child] else 2
        total += turns * inner
    return total


def size_faults(compiled: Compiled) -> list[str]:
    """Return why a run is too large for one workflow; empty where it is not."""
    size, pods = object_bytes(compiled), pods_of(compiled)
    faults = []
    if size > MAX_OBJECT_BYTES:
        faults.append(
            f"the workflow object must end with at most {MAX_OBJECT_BYTES} bytes, got {size}; take "
            "fewer iterations a run and chain several runs, fewer shards, or --resident"
        )
    if pods > MAX_PODS:
        faults.append(f"a run must make at most {MAX_PODS} pods, got {pods}")
    return faults
