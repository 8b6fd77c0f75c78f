"""Lint rules about pods: 4, 5, 6, 7, 8, 12 and 14."""

import re
from collections.abc import Iterator

from components.dressing import FIELD_ENV, SECRET_ENV
from components.images import GPU
from pipelines.lint_model import ITERATION_LABEL, STAGE_LABEL, Compiled, Fault

_DIGEST = re.compile(r".+@sha256:[0-9a-f]{64}$")
_SECRET_NAME = re.compile(r"(^|_)(SECRET|PASSWORD|PASSWD|TOKEN|CREDENTIALS?|KEY)(_|$)", re.I)
_SECRET_VALUE = re.compile(
    r"AKIA[0-9A-Z]{16}|-----BEGIN|gh[pousr]_[A-Za-z0-9]{30,}|hf_[A-Za-z0-9]{30,}|://[^/\s:@]+:[^@\s]+@"
)

WITHOUT_RETRIES = ("prepare", "report", "reshard_prepare", "checkpoint_retain")
"""Stages that end the run, or close it, at the first failure."""

AFFINITY = "node_affinity"
"""Output of the first task that keeps pods away from nodes."""

EXIT_TRIGGER = "ALL_UPSTREAM_TASKS_COMPLETED"


def caching_is_off(compiled: Compiled) -> Iterator[Fault]:
    """Rule 4: no stage is cached, since each reads or writes the run root."""
    for name, _, task_name, task in compiled.tasks():
        if compiled.executor_of(task) and task.get("cachingOptions", {"enableCache": True}):
            yield Fault(4, f"{name}.{task_name}", "caching must be off, but is on")


def gpu_pods_are_complete(compiled: Compiled) -> Iterator[Fault]:
    """Rule 5: a GPU pod has all that it needs, a CPU pod none of it, both have limits."""
    for label, container in sorted(compiled.executors.items()):
        pod = compiled.pods.get(label, {})
        resources = container.get("resources", {})
        mounts = [mount.get("mountPath") for mount in pod.get("emptyDirMounts", [])]
        parts = {
            "accelerator": resources.get("accelerator", {}).get("resourceType") == GPU,
            "toleration": any(t.get("key") == GPU for t in pod.get("tolerations", [])),
            "node selector": bool(pod.get("nodeSelector", {}).get("labels")),
            "/dev/shm": "/dev/shm" in mounts,
        }
        if any(parts.values()):
            for part in sorted(name for name, present in parts.items() if not present):
                yield Fault(5, label, f"a GPU pod must have {part}, but has none")
        if not resources.get("resourceMemoryLimit"):
            yield Fault(5, label, "must have a memory limit, but has none")
        if int(pod.get("activeDeadlineSeconds", 0)) <= 0:
            yield Fault(5, label, "must have a timeout, but has none")


def images_are_known(compiled: Compiled) -> Iterator[Fault]:
    """Rule 6: images come from the table; a release pins them by digest; never `latest`."""
    for label, container in sorted(compiled.executors.items()):
        image = str(container.get("image", ""))
        if image not in compiled.images.values():
            yield Fault(6, label, f"image must be one of the table, got {image!r}")
        if image.endswith(":latest"):
            yield Fault(6, label, f"image must not be a moving tag, got {image!r}")
        if compiled.release and not _DIGEST.match(image):
            yield Fault(6, label, f"image of a release must end with @sha256:..., got {image!r}")


def pods_wear_the_standard(compiled: Compiled) -> Iterator[Fault]:
    """Rule 7: standard environment, labels and secret; nothing that looks like a secret."""
    for label, container in sorted(compiled.executors.items()):
        pod = compiled.pods.get(label, {})
        fields = {e.get("name"): e.get("fieldPath") for e in pod.get("fieldPathAsEnv", [])}
        for name in sorted(n for n, path in FIELD_ENV.items() if fields.get(n) != path):
            yield Fault(7, label, f"environment `{name}` must come from `{FIELD_ENV[name]}`")
        labels = pod.get("podMetadata", {}).get("labels", {})
        for name in sorted({STAGE_LABEL, ITERATION_LABEL} - set(labels)):
            yield Fault(7, label, f"label `{name}` is missing")
        secrets = {
            entry.get("envVar")
            for secret in pod.get("secretAsEnv", [])
            for entry in secret.get("keyToEnv", [])
        }
        for name in sorted(set(SECRET_ENV.values()) - secrets):
            yield Fault(7, label, f"environment `{name}` must come from the store secret")
        for entry in container.get("env", []):
            name, value = str(entry.get("name")), str(entry.get("value", ""))
            if (_SECRET_NAME.search(name) and value) or _SECRET_VALUE.search(value):
                yield Fault(7, label, f"environment `{name}` looks like a secret in plain text")
    yield from _iterations_are_labelled(compiled)
    for name, _, task_name, task in compiled.tasks():
        for key, source in task.get("inputs", {}).get("parameters", {}).items():
            constant = str(source.get("runtimeValue", {}).get("constant", ""))
            if _SECRET_VALUE.search(constant):
                yield Fault(7, f"{name}.{task_name}", f"input `{key}` looks like a secret")


def _iterations_are_labelled(compiled: Compiled) -> Iterator[Fault]:
    """Where a graph is given its iteration, all pods inside carry that number."""
    for _, _, _, task in compiled.tasks():
        number = task.get("inputs", {}).get("parameters", {}).get("number", {})
        constant = number.get("runtimeValue", {}).get("constant")
        if constant is None:
            continue
        for label in compiled.executors_inside(task["componentRef"]["name"]):
            labels = compiled.pods.get(label, {}).get("podMetadata", {}).get("labels", {})
            seen = labels.get(ITERATION_LABEL)
            if seen != str(int(constant)):
                yield Fault(
                    *(7, label),
                    f"label `{ITERATION_LABEL}` must be '{int(constant)}', got {seen!r}",
                )


def retries_outlast_timeouts(compiled: Compiled) -> Iterator[Fault]:
    """Rule 8: all stages but the first and last retry, and go on doing so after long attempts."""
    for name, _, task_name, task in compiled.tasks():
        where = f"{name}.{task_name}"
        if (task.get("triggerPolicy", {}).get("strategy") == EXIT_TRIGGER) != (
            task_name == compiled.expected.exit_task
        ):
            yield Fault(8, where, "exactly the exit task runs whatever the others do")
        label = compiled.executor_of(task)
        if not label:
            continue
        stage = compiled.stage_of(label)
        policy = task.get("retryPolicy", {})
        retries = int(policy.get("maxRetryCount", 0))
        if stage in WITHOUT_RETRIES:
            if retries:
                yield Fault(8, where, f"`{stage}` must not be retried, got {retries}")
            continue
        if retries < 1:
            yield Fault(8, where, "must have retries, but has none")
            continue
        timeout = int(compiled.pods.get(label, {}).get("activeDeadlineSeconds", 0))
        limit = float(str(policy.get("backoffMaxDuration", "3600s")).removesuffix("s"))
        if limit <= (retries + 1) * timeout:
            yield Fault(
                *(8, where),
                f"backoffMaxDuration must exceed {(retries + 1) * timeout}s, got {limit:g}s; "
                "a long attempt would never be retried",
            )


def platform_names_executors(compiled: Compiled) -> Iterator[Fault]:
    """Rule 12: both documents name the same executors."""
    for label in sorted(set(compiled.pods) - set(compiled.executors)):
        yield Fault(12, label, "is in the platform document only")
    for label in sorted(set(compiled.executors) - set(compiled.pods)):
        yield Fault(12, label, "has no settings in the platform document")


def pods_keep_away_together(compiled: Compiled) -> Iterator[Fault]:
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
            yield Fault(14, where, "the first and the exit task must be free to run anywhere")
        if terms:
            found[where] = terms
    for where in sorted(set(wanted) - set(found)) if found else ():
        yield Fault(14, where, "must keep away from nodes as other pods do, but does not")
    for where, terms in sorted(found.items()):
        sources = [term.get("nodeAffinityJson", {}) for term in terms]
        names = {
            str(source.get("componentInputParameter", ""))
            or str(source.get("taskOutputParameter", {}).get("outputParameterKey", ""))
            for source in sources
        }
        if len(terms) != 1 or not all(name.endswith(AFFINITY) for name in names):
            yield Fault(14, where, f"must have one term, from `{AFFINITY}`, got {terms}")
