"""A compiled pipeline as plain dictionaries behind a few names, and what each one must hold.

A task is an entry of a graph, a component is what a task runs, and an executor is the pod of a
component that is no graph itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from components.images import OPTIONAL_STAGES, RESHARD_STAGES, STAGE_IMAGES
from components.pod_settings import STAGE_LABEL

Node = Mapping[str, Any]

PARAMETERS: dict[str, str] = {
    "root": "STRING",
    "preset": "STRING",
    "config": "STRING",
    "overrides": "STRING",
    "model": "STRING",
    "dataset": "STRING",
    "seed": "NUMBER_INTEGER",
    "chain": "STRING",
}
"""Public parameters of `post-train` and their types: a short form that a person reads."""

RESHARD_PARAMETERS: dict[str, str] = {
    "root": "STRING",
    "source": "STRING",
    "layout": "STRING",
    "target": "STRING",
    "parts": "STRING",
    "role": "STRING",
    "policy": "STRING",
    "retain_folder": "STRING",
    "keep_last": "NUMBER_INTEGER",
    "keep_every": "NUMBER_INTEGER",
}
"""The same of `reshard`."""


@dataclass(frozen=True)
class Expected:
    """One pipeline."""

    stages: frozenset[str]
    """Stages that its pods are labelled with, all of them present."""
    first_task: str
    """Task that all others but the exit task come after; never retried."""
    exit_task: str
    """Task that runs whatever the others do; never retried."""
    parameters: Mapping[str, str]
    """Public parameters and their types."""


PIPELINES: dict[str, Expected] = {
    "post-train": Expected(
        frozenset({*STAGE_IMAGES} - {*RESHARD_STAGES, *OPTIONAL_STAGES}),
        "prepare",
        "report",
        PARAMETERS,
    ),
    "reshard": Expected(
        frozenset(RESHARD_STAGES), "reshard-prepare", "checkpoint-retain", RESHARD_PARAMETERS
    ),
}
"""By the name that a pipeline is compiled with."""


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
    images: Mapping[str, str]
    """Image references that are allowed, by name."""
    release: bool
    """Images must be pinned by digest."""

    @classmethod
    def from_documents(
        cls, documents: Sequence[Node], *, images: Mapping[str, str], release: bool
    ) -> "Compiled":
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
            images=images,
            release=release,
        )

    @property
    def expected(self) -> Expected:
        """What this pipeline must consist of; of an unknown one, what a run of training must."""
        return PIPELINES.get(self.name, PIPELINES["post-train"])

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

    def stage_of(self, label: str) -> str:
        """Return the stage that an executor's pod is labelled with, or an empty text."""
        labels = self.pods.get(label, {}).get("podMetadata", {}).get("labels", {})
        return str(labels.get(STAGE_LABEL, ""))


def walk(node: Any, key: str) -> Iterator[Any]:
    """Yield every value under `key`, at any depth."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            if name == key:
                yield value
            yield from walk(value, key)
    elif isinstance(node, list):
        for value in node:
            yield from walk(value, key)


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
