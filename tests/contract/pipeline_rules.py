"""Semantic checks of a compiled pipeline: twelve rules that walk the YAML and nothing else.

The checks hold for any file that was compiled from these pipelines, also with replaced images.
They do not prove that a cluster accepts the file.
"""

import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

import yaml

from components.images import (
    GPU,
    GPU_NODE_LABEL,
    ITERATION_STAGES,
    OPTIONAL_STAGES,
    RESHARD_STAGES,
    STAGE_IMAGES,
    resolve_images,
)
from components.pod_settings import FIELD_ENV, SECRET_ENV, STAGE_LABEL
from pipelines.compiled import Compiled, size_faults

WITHOUT_RETRIES = ("prepare", "report", "reshard_prepare", "checkpoint_retain")
"""Stages that end the run, or close it, at the first failure."""

AFFINITY = "node_affinity"
"""Output of the first task that keeps pods away from nodes."""

EXIT_TRIGGER = "ALL_UPSTREAM_TASKS_COMPLETED"

_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}$")
_SECRET_NAME = re.compile(r"(^|_)(SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIALS?|KEY)(_|$)", re.I)
_SECRET_VALUE = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN|gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}|://[^/\s:@]+:[^@\s]+@"
)


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
class Checked(Compiled):
    """A compiled pipeline and what it may hold."""

    images: Mapping[str, str]
    """Image references that are allowed, by name."""
    release: bool
    """Images must be pinned by digest."""

    @property
    def expected(self) -> Expected:
        """What this pipeline must consist of; of an unknown one, what a run of training must."""
        return PIPELINES.get(self.name, PIPELINES["post-train"])

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


@dataclass(frozen=True)
class BrokenRule:
    """One fault of a compiled pipeline."""

    rule: int
    """1 to 14."""
    where: str
    """Component, task or executor."""
    message: str
    """What must be what, and the value seen."""

    def __str__(self) -> str:
        """Read `rule 5 exec-train: ...`."""
        return f"rule {self.rule} {self.where}: {self.message}"


def inputs_are_declared(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 1: what a task takes from its graph, the graph declares as an input.

    KFP 2.17 compiles resource requests from run parameters inside loops to dangling names.
    """
    for name, component, task_name, task in compiled.tasks():
        declared = component.get("inputDefinitions", {})
        where = f"{name}.{task_name}"
        wanted = list(walk(task, "componentInputParameter"))
        wanted += list(
            walk(compiled.pods.get(compiled.executor_of(task), {}), "componentInputParameter")
        )
        for parameter in sorted(set(wanted) - set(declared.get("parameters", {}))):
            yield BrokenRule(1, where, f"parameter `{parameter}` is not an input of `{name}`")
        artifacts = set(walk(task, "componentInputArtifact"))
        for artifact in sorted(artifacts - set(declared.get("artifacts", {}))):
            yield BrokenRule(1, where, f"artifact `{artifact}` is not an input of `{name}`")


def producers_are_upstream(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 2: a task that another one takes from is in the same graph and a dependency."""
    for name, component, tasks in compiled.dags():
        for task_name, task in tasks.items():
            wanted = set(walk(task.get("inputs", {}), "producerTask"))
            pod = compiled.pods.get(compiled.executor_of(task), {})
            for producer in sorted(wanted | set(walk(pod, "producerTask"))):
                where = f"{name}.{task_name}"
                if producer not in tasks:
                    yield BrokenRule(2, where, f"producer `{producer}` is not a task of `{name}`")
                elif producer not in task.get("dependentTasks", []):
                    yield BrokenRule(2, where, f"producer `{producer}` is not in dependentTasks")
        outputs = component["dag"].get("outputs", {})
        for producer in sorted(set(walk(outputs, "producerSubtask")) - set(tasks)):
            yield BrokenRule(2, name, f"output comes from `{producer}`, which is not a task of it")


def stages_follow_prepare(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 3: no cycles; all stages exist, and all but the exit task come after the first."""
    for name, _, tasks in compiled.dags():
        edges = {task: entry.get("dependentTasks", []) for task, entry in tasks.items()}
        try:
            order = list(TopologicalSorter(edges).static_order())
        except CycleError as error:
            rest = sorted(set(error.args[1]))
            yield BrokenRule(3, name, f"tasks must not depend on themselves, got a cycle in {rest}")
            continue
        if compiled.expected.first_task in tasks:
            after = {compiled.expected.first_task}
            for task in order:
                if after & set(edges.get(task, [])):
                    after.add(task)
            for task in sorted(set(tasks) - after):
                yield BrokenRule(
                    3, f"{name}.{task}", "must come after the first stage, but does not"
                )
    used = {compiled.executor_of(task) for _, _, _, task in compiled.tasks()}
    stages = {compiled.stage_of(label) for label in used}
    if "comp-update" in compiled.components:
        stages |= {"reward", "checkpoint"}
    if "comp-iterate" in compiled.components:
        stages |= {*ITERATION_STAGES}
    if compiled.name not in PIPELINES:
        known = sorted(PIPELINES)
        yield BrokenRule(3, "root", f"the pipeline must be one of {known}, got {compiled.name!r}")
    for stage in sorted(compiled.expected.stages - stages):
        yield BrokenRule(3, "root", f"stage `{stage}` must be part of the pipeline, but is not")


def caching_is_off(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 4: no stage is cached, since each reads or writes the run root."""
    for name, _, task_name, task in compiled.tasks():
        if compiled.executor_of(task) and task.get("cachingOptions", {"enableCache": True}):
            yield BrokenRule(4, f"{name}.{task_name}", "caching must be off, but is on")


def gpu_pods_are_complete(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 5: a GPU pod has all that it needs, a CPU pod none of it, both have limits."""
    for label, container in sorted(compiled.executors.items()):
        pod = compiled.pods.get(label, {})
        resources = container.get("resources", {})
        mounts = [mount.get("mountPath") for mount in pod.get("emptyDirMounts", [])]
        parts = {
            "accelerator": resources.get("accelerator", {}).get("resourceType") == GPU,
            "toleration": any(t.get("key") == GPU for t in pod.get("tolerations", [])),
            "node selector": GPU_NODE_LABEL[0] in pod.get("nodeSelector", {}).get("labels", {}),
            "/dev/shm": "/dev/shm" in mounts,
        }
        if any(parts.values()):
            for part in sorted(name for name, present in parts.items() if not present):
                yield BrokenRule(5, label, f"a GPU pod must have {part}, but has none")
        if not resources.get("resourceMemoryLimit"):
            yield BrokenRule(5, label, "must have a memory limit, but has none")
        if int(pod.get("activeDeadlineSeconds", 0)) <= 0:
            yield BrokenRule(5, label, "must have a timeout, but has none")


def images_are_known(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 6: images come from the table; a release pins them by digest; never `latest`."""
    for label, container in sorted(compiled.executors.items()):
        image = str(container.get("image", ""))
        if image not in compiled.images.values():
            yield BrokenRule(6, label, f"image must be one of the table, got {image!r}")
        if image.endswith(":latest"):
            yield BrokenRule(6, label, f"image must not be a moving tag, got {image!r}")
        if compiled.pods.get(label, {}).get("imagePullPolicy") != "IfNotPresent":
            yield BrokenRule(6, label, "an image must be pulled once a node (IfNotPresent)")
        if compiled.release and not _DIGEST.match(image):
            yield BrokenRule(
                6, label, f"image of a release must end with @sha256:..., got {image!r}"
            )


def pods_have_the_standard_settings(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 7: standard environment, labels and secret; nothing that looks like a secret."""
    for label, container in sorted(compiled.executors.items()):
        pod = compiled.pods.get(label, {})
        fields = {e.get("name"): e.get("fieldPath") for e in pod.get("fieldPathAsEnv", [])}
        for name in sorted(n for n, path in FIELD_ENV.items() if fields.get(n) != path):
            yield BrokenRule(7, label, f"environment `{name}` must come from `{FIELD_ENV[name]}`")
        labels = pod.get("podMetadata", {}).get("labels", {})
        if not labels.get(STAGE_LABEL):
            yield BrokenRule(7, label, f"label `{STAGE_LABEL}` is missing")
        secrets = {
            entry.get("envVar")
            for secret in pod.get("secretAsEnv", [])
            for entry in secret.get("keyToEnv", [])
        }
        for name in sorted(set(SECRET_ENV.values()) - secrets):
            yield BrokenRule(7, label, f"environment `{name}` must come from the store secret")
        for entry in container.get("env", []):
            name, value = str(entry.get("name")), str(entry.get("value", ""))
            if (_SECRET_NAME.search(name) and value) or _SECRET_VALUE.search(value):
                yield BrokenRule(
                    7, label, f"environment `{name}` looks like a secret in plain text"
                )
    for name, _, task_name, task in compiled.tasks():
        for key, source in task.get("inputs", {}).get("parameters", {}).items():
            constant = str(source.get("runtimeValue", {}).get("constant", ""))
            if _SECRET_VALUE.search(constant):
                yield BrokenRule(7, f"{name}.{task_name}", f"input `{key}` looks like a secret")


def retries_outlast_timeouts(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 8: tasks but the first and last retry, also after long attempts; graphs never."""
    for name, _, task_name, task in compiled.tasks():
        where = f"{name}.{task_name}"
        if (task.get("triggerPolicy", {}).get("strategy") == EXIT_TRIGGER) != (
            task_name == compiled.expected.exit_task
        ):
            yield BrokenRule(8, where, "exactly the exit task runs whatever the others do")
        label = compiled.executor_of(task)
        if not label:
            if "retryPolicy" in task:
                yield BrokenRule(8, where, "a graph must not be retried: its tasks are")
            continue
        stage = compiled.stage_of(label)
        policy = task.get("retryPolicy", {})
        retries = int(policy.get("maxRetryCount", 0))
        if stage in WITHOUT_RETRIES:
            if retries:
                yield BrokenRule(8, where, f"`{stage}` must not be retried, got {retries}")
            if task_name == compiled.expected.first_task and not policy:
                message = "must say that it is not retried, or the installation retries it"
                yield BrokenRule(8, where, message)
            continue
        if retries < 1:
            yield BrokenRule(8, where, "must have retries, but has none")
            continue
        timeout = int(compiled.pods.get(label, {}).get("activeDeadlineSeconds", 0))
        limit = float(str(policy.get("backoffMaxDuration", "3600s")).removesuffix("s"))
        if limit <= (retries + 1) * timeout:
            yield BrokenRule(
                8,
                where,
                f"backoffMaxDuration must exceed {(retries + 1) * timeout}s, got {limit:g}s; "
                "a long attempt would never be retried",
            )


def loops_run_over_integers(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 10: loops run over a list of integers, with a limit on parallel tasks."""
    for name, _, task_name, task in compiled.tasks():
        where = f"{name}.{task_name}"
        if "artifactIterator" in task:
            yield BrokenRule(10, where, "must not loop over artifacts, the back end cannot")
        if "parameterIterator" not in task:
            continue
        raw = task["parameterIterator"].get("items", {}).get("raw")
        try:
            items = json.loads(raw)
        except (TypeError, ValueError):
            items = None
        if not isinstance(items, list) or not all(type(item) is int for item in items):
            yield BrokenRule(10, where, f"must loop over a list of integers, got {raw!r}")
        limit = task.get("iteratorPolicy", {}).get("parallelismLimit", 0)
        if limit < 1:
            yield BrokenRule(10, where, f"must have a parallelism limit, got {limit}")


def size_is_within_limits(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 11: the workflow object at the end of the run and its pods are within limits."""
    # A graph that cannot be counted breaks rules 1, 2 or 10 already.
    with contextlib.suppress(KeyError, TypeError, ValueError, RecursionError):
        for message in size_faults(compiled):
            yield BrokenRule(11, "root", message)


def parameters_are_public(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 13: the run form has exactly the public parameters, each described."""
    given = compiled.components["root"].get("inputDefinitions", {}).get("parameters", {})
    public = compiled.expected.parameters
    for name in sorted(set(given) ^ set(public)):
        word = "is not public" if name in given else "is missing"
        yield BrokenRule(13, "root", f"parameter `{name}` {word}")
    for name in sorted(set(given) & set(public)):
        kind = given[name].get("parameterType")
        if kind != public[name]:
            yield BrokenRule(13, "root", f"`{name}` must be {public[name]}, got {kind}")
        if not given[name].get("description", "").strip():
            yield BrokenRule(13, "root", f"`{name}` must have a description, but has none")


def pods_keep_away_together(compiled: Checked) -> Iterator[BrokenRule]:
    """Rule 14: all pods between first and exit task keep away from faulty machines, or none.

    One term each, from the first task's output: terms are alternatives, a second one lets a pod
    back to where the first keeps it away from.
    """
    wanted, found = {}, {}
    for name, _, task_name, task in compiled.tasks():
        label = compiled.executor_of(task)
        if not label:
            continue
        terms = compiled.pods.get(label, {}).get("nodeAffinity", [])
        where = f"{name}.{task_name}"
        if task_name not in (compiled.expected.first_task, compiled.expected.exit_task):
            wanted[where] = terms
        elif terms:
            yield BrokenRule(14, where, "the first and the exit task must be free to run anywhere")
        if terms:
            found[where] = terms
    for where in sorted(set(wanted) - set(found)) if found else ():
        yield BrokenRule(14, where, "must keep away from nodes as other pods do, but does not")
    for where, terms in sorted(found.items()):
        sources = [term.get("nodeAffinityJson", {}) for term in terms]
        names = {
            str(source.get("componentInputParameter", ""))
            or str(source.get("taskOutputParameter", {}).get("outputParameterKey", ""))
            for source in sources
        }
        if len(terms) != 1 or not all(name.endswith(AFFINITY) for name in names):
            yield BrokenRule(14, where, f"must have one term, from `{AFFINITY}`, got {terms}")


RULES: dict[int, Callable[[Checked], Iterator[BrokenRule]]] = {
    1: inputs_are_declared,
    2: producers_are_upstream,
    3: stages_follow_prepare,
    4: caching_is_off,
    5: gpu_pods_are_complete,
    6: images_are_known,
    7: pods_have_the_standard_settings,
    8: retries_outlast_timeouts,
    10: loops_run_over_integers,
    11: size_is_within_limits,
    13: parameters_are_public,
    14: pods_keep_away_together,
}
"""Number of a rule to its check."""


def lint(
    text: str, *, images: Mapping[str, str] | None = None, release: bool = False
) -> list[BrokenRule]:
    """Return every fault of a compiled pipeline, in the order of the rules.

    Args:
        text: the compiled YAML.
        images: image name to reference where the compilation replaced some.
        release: images must be pinned by digest.
    """
    return lint_documents(
        list(yaml.load_all(text, yaml.CSafeLoader)), images=images, release=release
    )


def lint_documents(
    documents: Sequence[Mapping[str, Any]],
    *,
    images: Mapping[str, str] | None = None,
    release: bool = False,
) -> list[BrokenRule]:
    """Return every fault of the parsed documents of a compiled pipeline; as `lint`."""
    present = [document for document in documents if document]
    compiled = Checked.from_documents(present, images=resolve_images(images), release=release)
    return [fault for rule in RULES.values() for fault in rule(compiled)]
