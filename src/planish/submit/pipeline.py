"""Compiled pipelines that come with the package, and the changes that a submission can make.

All other properties, such as the number of shards, are fixed when a pipeline is compiled.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from planish import __version__
from planish.base.config import nearest, parse_section, read_toml
from planish.base.errors import ConfigError
from planish.run.gang.manifests import GANG_ENV, Network

NAMES = ("post-train", "reshard")

IMAGES = ("core", "monitor", "rollout", "train")
"""Names of the pods' images; a reference ends with the name of its image."""

HUB_VARIABLE = "HF_TOKEN"
"""Environment variable that the hub secret sets, in the pods that download models and data sets."""

VLLM_VARIABLE = "VLLM_CACHE_ROOT"
"""Environment variable with the folder of vLLM's compiled kernels, in the pods with GPUs."""

EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")

GPU = "nvidia.com/gpu"
"""Resource that pods with GPUs request."""

CACHE = "/cache"
"""Mount path of the volume claim for models and data sets; `model.path` may name a folder in it."""

MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class CompiledPipeline:
    """A compiled pipeline; the functions that change it work in place."""

    heading: str
    """Comment lines before the YAML documents."""
    spec: dict[str, Any]
    platform: dict[str, Any]
    """The YAML document of Kubernetes settings."""

    def text(self) -> str:
        """Return the YAML; without changes it equals the file."""
        documents = [self.spec, self.platform]
        return self.heading + yaml.dump_all(documents, Dumper=yaml.CSafeDumper, sort_keys=True)

    @property
    def name(self) -> str:
        """Name with which the pipeline was compiled."""
        return str(self.spec["pipelineInfo"]["name"])

    @property
    def inputs(self) -> Mapping[str, Mapping[str, Any]]:
        """Public parameters: name to a table with `parameterType` and `defaultValue`."""
        inputs: Mapping[str, Mapping[str, Any]] = self.spec["root"]["inputDefinitions"]
        return inputs["parameters"]

    def tasks(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Yield the tasks of every graph by name."""
        for component in (self.spec["root"], *self.spec["components"].values()):
            yield component.get("dag", {}).get("tasks", {})

    def constants(self, task: str) -> dict[str, Any]:
        """Return the inputs of a task with constant values, by name; callers may replace the
        constants.
        """
        (found,) = (tasks[task] for tasks in self.tasks() if task in tasks)
        inputs: dict[str, Any] = found["inputs"]["parameters"]
        return {
            name: each["runtimeValue"] for name, each in inputs.items() if "runtimeValue" in each
        }

    def pods(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yield container and Kubernetes settings of every pod."""
        settings = self.platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        for label, executor in self.spec["deploymentSpec"]["executors"].items():
            yield executor["container"], settings[label]


def profiles() -> list[str]:
    """Return the names of the profiles for which the package has pipelines."""
    names = (file.name for file in _folder().iterdir())
    start, end = f"{NAMES[0]}-", ".yaml"
    return sorted(n[len(start) : -len(end)] for n in names if n.startswith(start))


def _folder() -> Any:
    """Return the folder of the files, which may be inside an archive and is therefore no `Path`."""
    return resources.files("planish.submit") / "compiled"


def shipped(name: str, profile: str) -> CompiledPipeline:
    """Return a pipeline of the package."""
    known = profiles()
    if profile not in known:
        raise ConfigError(
            f"a profile must be one of {known}, got {profile!r}{nearest(profile, known)}"
        )
    return parse(_folder().joinpath(f"{name}-{profile}.yaml").read_text("utf-8"))


def opened(path: Path) -> CompiledPipeline:
    """Return the pipeline in a file that `python -m pipelines.compile` wrote."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"`{path}` must hold at most {MAX_FILE_BYTES} bytes, got more")
        return parse(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"`{path}` must hold a pipeline of `python -m pipelines.compile`, got {cause:.200}"
        ) from None


def parse(text: str) -> CompiledPipeline:
    """Return the pipeline of a YAML text."""
    documents = list(yaml.load_all(text, yaml.CSafeLoader))
    if len(documents) != 2:
        raise ConfigError(
            "a compiled pipeline must have the document of the pipeline and that of the platform, "
            f"got {len(documents)} documents"
        )
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines(True))
    pipeline = CompiledPipeline("".join(comments), *documents)
    if pipeline.name not in NAMES or not list(pipeline.pods()):
        raise ConfigError(f"a pipeline must be one of {NAMES}, got {pipeline.name!r}")
    return pipeline


def parse_images(words: Sequence[str]) -> dict[str, str]:
    """Return image name to reference, from `name=reference` or from a common prefix.

    The prefix is a folder of a registry. The tag is the version of this package, unless the prefix
    has a tag after a colon.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, reference = word.partition("=")
        place, slash, last = name.rpartition("/")
        repository, _, tag = last.partition(":")
        if not equals and repository.strip() and repository not in IMAGES:
            # A colon before the last slash belongs to a port.
            folder, tag = f"{place}{slash}{repository}", tag or __version__
            found.update({each: f"{folder}/{each}:{tag}" for each in IMAGES})
        elif name in IMAGES and reference.strip():
            found[name] = reference
        else:
            raise ConfigError(
                "`--image` must be REGISTRY/FOLDER of all images or NAME=REFERENCE with one of "
                f"{list(IMAGES)}, got {word!r}"
            )
    return found


def set_images(pipeline: CompiledPipeline, references: Mapping[str, str]) -> None:
    """Replace the images of pods; `references` maps an image's name to its new reference."""
    for container, _ in pipeline.pods():
        name = container["image"].partition("@")[0].rpartition("/")[2].partition(":")[0]
        container["image"] = references.get(name, container["image"])


def set_secrets(pipeline: CompiledPipeline, *, store: str = "", hub: str = "") -> None:
    """Set the names of the secrets for store and hub; an empty name changes nothing."""
    for _, pod in pipeline.pods():
        for secret in pod.get("secretAsEnv", []):
            variables = {key["envVar"] for key in secret["keyToEnv"]}
            name = hub if HUB_VARIABLE in variables else store
            if name:
                secret["secretName"] = name
                secret["secretNameParameter"] = {"runtimeValue": {"constant": name}}


def set_cache(pipeline: CompiledPipeline, claim: str) -> None:
    """Mount a volume claim for downloads in pods, and for vLLM's compiled kernels in pods with
    GPUs.

    Later pods reuse both. An empty claim changes nothing.
    """
    for container, pod in pipeline.pods() if claim else ():
        variables = {
            key["envVar"] for secret in pod.get("secretAsEnv", []) for key in secret["keyToEnv"]
        }
        environment = {each["name"]: each["value"] for each in container.get("env", [])}
        folders = {"HF_HOME": "huggingface"} if HUB_VARIABLE in variables else {}
        folders |= {VLLM_VARIABLE: "vllm"} if VLLM_VARIABLE in environment else {}
        if not folders:
            continue
        name = {"runtimeValue": {"constant": claim}}
        mount = {"constant": claim, "mountPath": CACHE, "pvcNameParameter": name}
        mounts = pod.setdefault("pvcMount", [])
        mounts[:] = [each for each in mounts if each["mountPath"] != CACHE] + [mount]
        environment |= {key: f"{CACHE}/{folder}" for key, folder in folders.items()}
        container["env"] = [{"name": k, "value": v} for k, v in environment.items()]


def parse_toleration(text: str) -> dict[str, str]:
    """Return the toleration for `KEY[=VALUE][:EFFECT]`, the form of taints in `kubectl taint`."""
    taint, _, effect = text.partition(":")
    key, equals, value = taint.partition("=")
    if not key or effect not in ("", *EFFECTS):
        raise ConfigError(
            f"`--toleration` must be KEY[=VALUE][:EFFECT] with an effect of {list(EFFECTS)}, got "
            f"{text!r}"
        )
    found = {"key": key, "operator": "Equal" if equals else "Exists"}
    return found | ({"value": value} if equals else {}) | ({"effect": effect} if effect else {})


def set_placement(
    pipeline: CompiledPipeline,
    *,
    pull_secrets: Sequence[str] = (),
    tolerations: Sequence[str] = (),
    node_selectors: Sequence[str] = (),
) -> None:
    """Set the placement of every pod of a run, and the pull secrets of its image.

    `tolerations` are texts for `parse_toleration`, `node_selectors` are labels `KEY=VALUE`.
    """
    labels = {}
    for word in node_selectors:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"`--node-selector` must be KEY=VALUE, got {word!r}")
        labels[key] = value
    tolerated = [parse_toleration(word) for word in tolerations]
    secrets = [
        {"secretName": name, "secretNameParameter": {"runtimeValue": {"constant": name}}}
        for name in pull_secrets
    ]
    for _, pod in pipeline.pods():
        for key, more in (("imagePullSecret", secrets), ("tolerations", tolerated)):
            if more:
                pod[key] = [*pod.get(key, []), *(dict(each) for each in more)]
        if labels:
            pod.setdefault("nodeSelector", {}).setdefault("labels", {}).update(labels)
    if labels and pipeline.name == "post-train":
        _set_requests(pipeline, labels=labels)


def set_network(pipeline: CompiledPipeline, path: Path | None) -> None:
    """Set the network of a gang's pods from a TOML file; None changes nothing.

    Raises:
        ConfigError: the file is not a `Network`, or no pods of the pipeline train together.
    """
    if path is None:
        return
    network = parse_section(Network, read_toml(path), section="network")
    gangs = _gangs(pipeline)
    if not gangs:
        raise ConfigError(
            f"`--network` must be left out for a pipeline without pods that train together, got "
            f"{str(path)!r}; profiles of several machines have such"
        )
    for variable, pods in gangs:
        network.join(pods)
        variable["value"] = json.dumps(pods, sort_keys=True)


def set_gpu_nodes(
    pipeline: CompiledPipeline, *, gpus: int = 0, cpus: int = 0, gibibytes: int = 0, label: str = ""
) -> None:
    """Set the size of a GPU machine, from which pods take their resources; 0 and "" keep the
    profile's.

    A pod with all GPUs of the machine requests all of its resources, a pod with fewer GPUs its
    share.

    Args:
        gpus: GPUs of a machine.
        cpus: cores for pods.
        gibibytes: host memory for pods, GiB.
        label: `KEY=VALUE`, the label of the nodes for pods with GPUs.

    Raises:
        ConfigError: no pod of the pipeline has GPUs, or the label is malformed.
    """
    if pipeline.name != "post-train" or not (gpus or cpus or gibibytes or label):
        return
    table = json.loads(pipeline.constants("prepare")["requests"]["constant"])
    key, equals, value = label.partition("=")
    if (
        GPU not in table["pod"]
        or min(gpus, cpus, gibibytes) < 0
        or (label and not (key and equals))
    ):
        raise ConfigError(
            "`--node-gpus`, `--node-cpus`, `--node-memory` must be above 0 and `--gpu-label` "
            f"KEY=VALUE, for a profile with GPUs, got {gpus}, {cpus}, {gibibytes} and {label!r}"
        )
    before = int(table["pod"][GPU])
    gpus, cpus = gpus or before, cpus or int(table["pod"]["cpu"])
    gibibytes = gibibytes or int(table["pod"]["memory"].removesuffix("Gi"))
    labels = {key: value} if label else table["gpu_labels"]

    def share(count: str | int) -> dict[str, str]:
        own = gpus if int(count) == before else min(int(count), gpus)
        memory = f"{gibibytes * own // gpus}Gi"
        return {"cpu": str(cpus * own // gpus), "memory": memory, GPU: str(own)}

    for container, pod in pipeline.pods():
        resources = container.get("resources", {})
        if accelerator := resources.get("accelerator"):
            own = share(accelerator["count"])
            resources |= _as_compiled(own)
            accelerator |= {"count": own[GPU], "resourceCount": own[GPU]}
            selected = pod["nodeSelector"]["labels"]
            for name in table["gpu_labels"]:
                del selected[name]
            selected |= labels
    for variable, pods in _gangs(pipeline):
        own = share(pods["gpus"])
        pods["gpus"], pods["spec"]["nodeSelector"] = int(own[GPU]), labels
        given = pods["container"]["resources"]
        given["requests"] |= own
        given["limits"] |= {name: own[name] for name in ("memory", GPU)}
        variable["value"] = json.dumps(pods, sort_keys=True)
    table["pod"] = table["rank"] = share(before)
    table["moments"] = {
        stage: (count, share(each[GPU])) for stage, (count, each) in table["moments"].items()
    }
    for stage in table["stages"].values():
        if stage["gpus"]:
            own = share(stage["gpus"])
            stage |= {"gpus": int(own[GPU]), "memory": own["memory"]}
    most = [(table["num_nodes"], table["rank"]), *table["moments"].values()]
    table["total"] = {
        "cpu": str(max(count * int(each["cpu"]) for count, each in most)),
        "memory": f"{max(count * int(each['memory'][:-2]) for count, each in most)}Gi",
        GPU: str(max(count * int(each[GPU]) for count, each in most)),
    }
    _set_requests(pipeline, **{**table, "gpu_labels": labels})


def _as_compiled(own: Mapping[str, str]) -> dict[str, Any]:
    """Return a pod's requests in kfp's form: as text, and as numbers in cores and 10**9 bytes."""
    size = int(own["memory"].removesuffix("Gi")) * 2**30 / 10**9
    return {
        "cpuRequest": float(own["cpu"]),
        "resourceCpuRequest": own["cpu"],
        **dict.fromkeys(("memoryLimit", "memoryRequest"), size),
        **dict.fromkeys(("resourceMemoryLimit", "resourceMemoryRequest"), own["memory"]),
    }


def _gangs(pipeline: CompiledPipeline) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return the environment variables that describe gangs, with their parsed values."""
    return [
        (each, json.loads(each["value"]))
        for container, _ in pipeline.pods()
        for each in container.get("env", [])
        if each["name"] == GANG_ENV
    ]


def set_gpu_memory(pipeline: CompiledPipeline, gigabytes: int) -> None:
    """Set the memory of one GPU of the cluster, in 10**9 bytes."""
    if not 1 <= gigabytes <= 10_000:
        raise ConfigError(f"`--gpu-memory` must be 1 to 10000 GB, got {gigabytes}; 80 is usual")
    _set_requests(pipeline, gpu_bytes=gigabytes * 10**9)


def _set_requests(pipeline: CompiledPipeline, **changes: Any) -> None:
    """Change entries of the description of pods that `prepare` gets."""
    requests = pipeline.constants("prepare")["requests"]
    table = {**json.loads(requests["constant"]), **changes}
    requests["constant"] = json.dumps(table, sort_keys=True)


def iterations_text(first: int, last: int) -> str:
    """Return the name of a box of iterations in Kubeflow's graph.

    Example:
        >>> iterations_text(5, 5)
        'iteration 5'
    """
    return f"iterations {first}\u2013{last}" if last > first else f"iteration {first}"


def _inputs(task: Mapping[str, Any]) -> dict[str, Any]:
    parameters: dict[str, Any] = task.get("inputs", {}).get("parameters", {})
    return parameters


def _first_iteration(task: Mapping[str, Any]) -> int:
    """Return the iteration to which a task belongs or with which it begins; 0 for other tasks."""
    return int(_inputs(task).get("number", {}).get("runtimeValue", {}).get("constant", 0))


def cut(pipeline: CompiledPipeline, iterations: int) -> None:
    """Remove all but the first iterations of a run."""
    number = pipeline.constants("prepare")["num_iterations"]
    compiled = int(number["constant"])
    if not 1 <= iterations <= compiled:
        raise ConfigError(
            f"`--iterations` must be 1 to {compiled}, got {iterations}; longer training is a chain "
            "of runs (`-p chain.runs=4`), or a pipeline of your own (`python -m pipelines.compile "
            "--iterations N --out FOLDER` in a checkout, then `--pipeline FILE`)"
        )
    number["constant"] = float(iterations)
    (tasks,) = (tasks for tasks in pipeline.tasks() if any(map(_first_iteration, tasks.values())))
    firsts = {name: _first_iteration(task) for name, task in tasks.items()}
    hands_on = {n: name for name, n in firsts.items() if n and "policy_pin" in _inputs(tasks[name])}
    first = max(n for n in hands_on if n <= iterations)
    last, kept = hands_on[max(hands_on)], hands_on[first]
    if count := _inputs(tasks[kept]).get("count"):
        count["runtimeValue"]["constant"] = float(
            min(count["runtimeValue"]["constant"], iterations + 1 - first)
        )
        tasks[kept]["taskInfo"]["name"] = iterations_text(first, iterations)
    for name in [name for name, n in firsts.items() if n > iterations]:
        del tasks[name]
    for task in tasks.values():
        if last in task.get("dependentTasks", []):
            names = [kept if name == last else name for name in task["dependentTasks"]]
            task["dependentTasks"] = sorted(names)
        for source in task.get("inputs", {}).get("parameters", {}).values():
            output = source.get("taskOutputParameter", {})
            if output.get("producerTask") == last:
                output["producerTask"] = kept
    used = {task["componentRef"]["name"] for tasks in pipeline.tasks() for task in tasks.values()}
    for name in {*pipeline.spec["components"]} - used:
        del pipeline.spec["components"][name]
