"""A compiled pipeline as the lint rules see it: plain dictionaries behind a few names."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipelines.lint_expected import PIPELINES, Expected

Node = Mapping[str, Any]

STAGE_LABEL = "planish/stage"
ITERATION_LABEL = "planish/iteration"


@dataclass(frozen=True)
class Fault:
    """One broken rule."""

    rule: int
    """1 to 14."""
    where: str
    """Component, task or executor."""
    message: str
    """What must be what, and the value seen."""

    def __str__(self) -> str:
        """Read `rule 5 exec-train: ...`."""
        return f"rule {self.rule} {self.where}: {self.message}"


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

    def executors_inside(self, name: str) -> Iterator[str]:
        """Yield the executor label of every task of a component, at any depth."""
        component = self.components.get(name, {})
        if "executorLabel" in component:
            yield str(component["executorLabel"])
        for task in component.get("dag", {}).get("tasks", {}).values():
            yield from self.executors_inside(task["componentRef"]["name"])

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
