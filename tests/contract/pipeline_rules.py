"""What must hold of any compiled pipeline, also with replaced images."""

import json
import re
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from typing import Any, NamedTuple

import yaml

from components.images import (
    GPU,
    GPU_NODE_LABEL,
    ITERATION_STAGES,
    STAGE_IMAGES,
    resolve_images,
)
from components.pod_settings import FIELD_ENV, SECRET_ENV, STAGE_LABEL
from pipelines.compiled import Compiled, size_faults

RESHARD_STAGES = ("reshard",)
"""Stages of the pipeline `reshard`; all others are those of `post-train`."""

OPTIONAL_STAGES = ("monitor_check", "iterate")
"""Stages of `post-train` that it has only when it is compiled with them."""

WITHOUT_RETRIES = ("prepare", "report")
"""Stages that end the run, or close it, at the first failure."""
_SECRET_NAME = re.compile(r"(^|_)(SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIALS?|KEY)(_|$)", re.I)
_SECRET_VALUE = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN|gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}"
    r"|://[^/\s:@]+:[^@\s]+@"
)


class Expected(NamedTuple):
    """One pipeline."""

    stages: set[str]
    """Stages that its pods are labelled with, all of them present."""
    first_task: str
    """Task that all others but the exit task come after."""
    exit_task: str
    """Task that runs whatever the others do, never retried; empty for none."""
    parameters: dict[str, str]
    """Parameters of the form and their types."""


def _form(*names: str, integers: tuple[str, ...]) -> dict[str, str]:
    return {name: "NUMBER_INTEGER" if name in integers else "STRING" for name in names}


PIPELINES = {
    "post-train": Expected(
        {*STAGE_IMAGES} - {*RESHARD_STAGES, *OPTIONAL_STAGES},
        "prepare",
        "report",
        _form(
            *("root", "preset", "config", "overrides", "model", "dataset", "seed", "chain"),
            integers=("seed",),
        ),
    ),
    "reshard": Expected(
        {*RESHARD_STAGES},
        "reshard",
        "",
        _form(
            *("root", "source", "layout", "target", "parts", "role", "policy", "retain_folder"),
            *("keep_last", "keep_every"),
            integers=("keep_last", "keep_every"),
        ),
    ),
}
"""By the name that a pipeline is compiled with."""


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


class Check:
    """A compiled pipeline, and what is wrong with it."""

    def __init__(self, compiled: Compiled) -> None:
        self.compiled, self.expected = compiled, PIPELINES[compiled.name]
        self.faults: list[str] = []

    def need(self, holds: object, where: str, fault: str) -> None:
        """Note a fault where something does not hold."""
        if not holds:
            self.faults.append(f"{where}: {fault}")

    def pod(self, task: Mapping[str, Any]) -> Mapping[str, Any]:
        return self.compiled.pods.get(self.compiled.executor_of(task), {})

    def stage_of(self, label: str) -> str:
        labels = self.compiled.pods.get(label, {}).get("podMetadata", {}).get("labels", {})
        return str(labels.get(STAGE_LABEL, ""))

    def graphs(self) -> None:
        """Tasks take from what their graph declares and from tasks before them; no stage lacks."""
        for name, component, task_name, task in self.compiled.tasks():
            # KFP 2.17 compiles requests from run parameters inside loops to dangling names.
            declared = component.get("inputDefinitions", {})
            for part, key in (("parameters", "Parameter"), ("artifacts", "Artifact")):
                wanted = {*walk([task, self.pod(task)], f"componentInput{key}")}
                left = wanted - {*declared.get(part, {})}
                self.need(not left, f"{name}.{task_name}", f"{part} {left} are no inputs of {name}")
        for name, component, tasks in self.compiled.dags():
            edges = {task: entry.get("dependentTasks", []) for task, entry in tasks.items()}
            for task_name, task in tasks.items():
                wanted = {*walk([task.get("inputs", {}), self.pod(task)], "producerTask")}
                left = wanted - ({*edges[task_name]} & {*tasks})
                self.need(not left, f"{name}.{task_name}", f"producers {left} do not come before")
            left = {*walk(component["dag"].get("outputs", {}), "producerSubtask")} - {*tasks}
            self.need(not left, name, f"its outputs come from {left}, no tasks of it")
            after = {self.expected.first_task}
            for task_name in TopologicalSorter(edges).static_order():
                if after & {*edges.get(task_name, ())}:
                    after.add(task_name)
            if self.expected.first_task in tasks:
                self.need({*tasks} <= after, name, f"{ {*tasks} - after } do not follow the first")
        stages = {self.stage_of(self.compiled.executor_of(t)) for *_, t in self.compiled.tasks()}
        stages |= {*ITERATION_STAGES} if "comp-iterate" in self.compiled.components else set()
        self.need(self.expected.stages <= stages, "root", f"{self.expected.stages - stages} lack")

    def tasks(self) -> None:
        """No stage is cached; all but first and last are retried, also after long attempts."""
        for name, _, task_name, task in self.compiled.tasks():
            where, policy = f"{name}.{task_name}", task.get("retryPolicy")
            strategy = task.get("triggerPolicy", {}).get("strategy")
            is_exit = strategy == "ALL_UPSTREAM_TASKS_COMPLETED"
            self.need(is_exit == (task_name == self.expected.exit_task), where, "trigger policy")
            if "parameterIterator" in task:
                items = json.loads(task["parameterIterator"].get("items", {}).get("raw"))
                integers = isinstance(items, list) and {*map(type, items)} <= {int}
                self.need(integers, where, f"must loop over a list of integers, got {items!r}")
                limit = task.get("iteratorPolicy", {}).get("parallelismLimit", 0)
                self.need(limit >= 1, where, "must have a parallelism limit")
            self.need("artifactIterator" not in task, where, "the back end has no such loops")
            for key, source in task.get("inputs", {}).get("parameters", {}).items():
                constant = str(source.get("runtimeValue", {}).get("constant", ""))
                self.need(not _SECRET_VALUE.search(constant), where, f"`{key}` looks like a secret")
            label = self.compiled.executor_of(task)
            if not label:
                self.need(policy is None, where, "a graph must not be retried: its tasks are")
                continue
            self.need(not task.get("cachingOptions", {"enableCache": True}), where, "is cached")
            retries = int((policy or {}).get("maxRetryCount", 0))
            if self.stage_of(label) in WITHOUT_RETRIES:
                self.need(not retries, where, "must not be retried")
                is_said = policy or task_name != self.expected.first_task
                self.need(is_said, where, "must say so, or the installation retries it")
                continue
            timeout = int(self.pod(task).get("activeDeadlineSeconds", 0))
            limit = float(str((policy or {}).get("backoffMaxDuration", "3600s")).removesuffix("s"))
            self.need(retries >= 1, where, "must have retries")
            self.need(limit > (retries + 1) * timeout, where, "is not retried after long attempts")

    def pods(self, images: Mapping[str, str], release: bool) -> None:
        """Each pod has limits, a known image, our settings, and nothing like a secret."""
        for label, container in self.compiled.executors.items():
            pod, image = self.compiled.pods.get(label, {}), str(container.get("image", ""))
            resources = container.get("resources", {})
            mounts = [mount.get("mountPath") for mount in pod.get("emptyDirMounts", [])]
            of_gpus = {
                resources.get("accelerator", {}).get("resourceType") == GPU,
                any(t.get("key") == GPU for t in pod.get("tolerations", [])),
                GPU_NODE_LABEL[0] in pod.get("nodeSelector", {}).get("labels", {}),
                "/dev/shm" in mounts,
            }
            self.need(len(of_gpus) == 1, label, "must have all that a pod with GPUs has, or none")
            self.need(resources.get("resourceMemoryLimit"), label, "must have a memory limit")
            self.need(int(pod.get("activeDeadlineSeconds", 0)) > 0, label, "must have a timeout")
            is_known = image in images.values() and not image.endswith(":latest")
            self.need(is_known, label, f"image must be of the table and stand still, got {image}")
            is_pinned = not release or re.search("@sha256:[0-9a-f]{64}$", image)
            self.need(is_pinned, label, f"image of a release must be pinned, got {image}")
            self.need(pod.get("imagePullPolicy") == "IfNotPresent", label, "image pull policy")
            fields = {e.get("name"): e.get("fieldPath") for e in pod.get("fieldPathAsEnv", [])}
            self.need(FIELD_ENV.items() <= fields.items(), label, f"must have {FIELD_ENV}")
            self.need(self.stage_of(label), label, f"must have the label {STAGE_LABEL}")
            secrets = {one.get("envVar") for key in walk(pod, "keyToEnv") for one in key}
            self.need({*SECRET_ENV.values()} <= secrets, label, f"must have {SECRET_ENV}")
            for entry in container.get("env", []):
                name, value = str(entry.get("name")), str(entry.get("value", ""))
                is_secret = (_SECRET_NAME.search(name) and value) or _SECRET_VALUE.search(value)
                self.need(not is_secret, label, f"`{name}` looks like a secret in plain text")

    def affinity(self) -> None:
        """All pods between first and exit task keep away from faulty machines, or none.

        One term each, from the first task's output: terms are alternatives, a second one lets a pod
        back to where the first keeps it away from.
        """
        terms = {
            f"{name}.{task_name}": (task_name, self.pod(task).get("nodeAffinity", []))
            for name, _, task_name, task in self.compiled.tasks()
            if self.compiled.executor_of(task)
        }
        some = any(own for _, own in terms.values())
        for where, (task_name, own) in terms.items():
            is_free = task_name in (self.expected.first_task, self.expected.exit_task)
            self.need(bool(own) == (some and not is_free), where, "keeps away unlike the others")
            sources = [term.get("nodeAffinityJson", {}) for term in own]
            names = [
                source.get("componentInputParameter", "")
                or source.get("taskOutputParameter", {}).get("outputParameterKey", "")
                for source in sources
            ]
            is_one = not own or (len(names) == 1 and names[0].endswith("node_affinity"))
            self.need(is_one, where, f"must have one term of the first task, got {own}")

    def form(self) -> None:
        """The run form has exactly the public parameters, each described."""
        given = self.compiled.components["root"].get("inputDefinitions", {}).get("parameters", {})
        kinds = {name: one.get("parameterType") for name, one in given.items()}
        self.need(kinds == self.expected.parameters, "root", f"the form has {kinds}")
        described = all(one.get("description", "").strip() for one in given.values())
        self.need(described, "root", "each parameter must have a description")


def lint(text: str, *, images: Mapping[str, str] | None = None, release: bool = False) -> list[str]:
    """Return every fault of a compiled pipeline; images of a `release` are pinned by digest."""
    documents = [one for one in yaml.load_all(text, yaml.CSafeLoader) if one]
    check = Check(Compiled.from_documents(documents))
    check.graphs()
    check.tasks()
    check.pods(resolve_images(images), release)
    check.affinity()
    check.form()
    return check.faults + size_faults(check.compiled)
