"""Pods, nodes and jobs as dataclasses, parsed from the JSON of the API server.

The name of a machine is its node's. Labels of a pod name its job. The API server has checked the
types of all fields, but people write what stands in a label.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from planish.minder.act.config import KubernetesConfig
from planish.minder.act.kube import names

Raw = Mapping[str, Any]

RUNNING = "Running"
ENDED = ("Succeeded", "Failed")
_GANGS = (names.TRAINING_LABEL, names.VOLCANO_LABEL)
_MAX_ROOT = 1024
"""Longest URI, in characters, that a pod may name."""


@dataclass(frozen=True)
class PodInfo:
    """One pod that belongs to a job."""

    name: str
    namespace: str
    uid: str
    machine: str
    """Node name; empty before the pod is scheduled."""
    job: str
    """Value of the label that names its job."""
    phase: str
    started: int = 0
    """Unix seconds of the last start of one of its containers."""
    role: str = ""
    pipeline_stage: str = ""
    run_id: str = ""
    stage: str = ""
    iteration: int = 0
    workflow: str = ""
    run_root: str = ""
    is_driver: bool = False
    """True if the pod starts other pods of a Kubeflow run and computes nothing."""
    is_evictable: bool = True
    """False for a pod of a DaemonSet and for a static pod of the kubelet."""
    is_exempt: bool = False
    is_terminating: bool = False
    """True if its deletion has been requested already."""
    is_observed_only: bool = False
    """True if its label forbids any action on its machine."""


@dataclass(frozen=True)
class NodeInfo:
    """One node."""

    name: str
    uid: str
    version: str
    """resourceVersion; a patch succeeds only if the node still has this version."""
    is_unschedulable: bool = False
    conditions: tuple[Raw, ...] = ()
    """Conditions as in the API server's JSON."""
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    taints: tuple[dict[str, str], ...] = ()
    allocatable: dict[str, str] = field(default_factory=dict)
    """Map from resource to quantity, as Kubernetes writes it."""

    @property
    def is_ready(self) -> bool:
        """True if its kubelet has reported within the grace period that the node works."""
        return self.condition("Ready").get("status") == "True"

    def condition(self, kind: str) -> Raw:
        """Return the condition of a type; empty if the node has none."""
        return next((one for one in self.conditions if one.get("type") == kind), {})

    @property
    def is_ours(self) -> bool:
        """True if an annotation says that the monitor cordoned the node."""
        return self.annotations.get(names.CORDONED_BY) == names.OWNER

    @property
    def was_uncordoned(self) -> bool:
        """True if a human has made the node schedulable again after the monitor cordoned it."""
        return self.is_ours and not self.is_unschedulable


@dataclass(frozen=True)
class JobInfo:
    """Machines that are compared with each other: one job, or one role of a job."""

    name: str
    namespace: str
    machines: tuple[str, ...]
    stages: Mapping[str, str] = field(default_factory=dict)
    """Pipeline-parallel stage by machine, for machines with a label of the stage."""
    started: int = 0
    """Unix seconds of the last (re)start of one of its pods."""
    run_id: str = ""
    stage: str = ""
    """Stage of the Kubeflow pipeline, e.g. `train`."""
    iteration: int = 0
    run_root: str = ""
    role: str = ""
    pods: tuple[PodInfo, ...] = ()
    """The job's Running pods."""
    is_observed_only: bool = False
    """True if a label of a pod forbids any action."""

    @property
    def key(self) -> str:
        """Identity in the cluster: namespace, name and, if there are roles, role."""
        return "/".join(part for part in (self.namespace, self.name, self.role) if part)

    @property
    def full_name(self) -> str:
        """Namespace and name, the same for all roles of the job."""
        return f"{self.namespace}/{self.name}"


def group_jobs(pods: Iterable[PodInfo]) -> list[JobInfo]:
    """Return one job for each (namespace, name, role) of the Running pods, sorted by key."""
    groups: dict[tuple[str, str, str], list[PodInfo]] = defaultdict(list)
    for pod in pods:
        if pod.phase == RUNNING and pod.machine and not pod.is_driver:
            groups[pod.namespace, pod.job, pod.role].append(pod)
    jobs = []
    for (namespace, name, role), members in sorted(groups.items()):
        pods = sorted(members, key=lambda pod: (pod.machine, pod.name))
        # Stages of one workflow run one after the other; the stage that started last is running.
        newest = max(pods, key=lambda pod: (pod.started, pod.iteration, pod.stage))
        job = JobInfo(
            name=name,
            namespace=namespace,
            machines=tuple(sorted({pod.machine for pod in pods})),
            stages={pod.machine: pod.pipeline_stage for pod in pods if pod.pipeline_stage},
            started=newest.started,
            run_id=newest.run_id,
            stage=newest.stage,
            iteration=newest.iteration,
            run_root=newest.run_root or next((p.run_root for p in pods if p.run_root), ""),
            role=role,
            pods=tuple(pods),
            is_observed_only=any(pod.is_observed_only for pod in pods),
        )
        jobs.append(job)
    return jobs


def pods_on(pods: Iterable[PodInfo], job: JobInfo, machine: str) -> tuple[PodInfo, ...]:
    """Return the pods of a job on one machine that have not ended, whatever their role."""
    place = (job.namespace, job.name, machine)
    live = [pod for pod in pods if pod.phase not in ENDED]
    return tuple(pod for pod in live if (pod.namespace, pod.job, pod.machine) == place)


def job_selector(label: str) -> str:
    """Return the label selector for pods whose job is named by a label."""
    return f"{label},{names.RANK_LABEL}" if label == names.BATCH_LABEL else label


def parse_pod(raw: Raw, config: KubernetesConfig) -> PodInfo | None:
    """Return a pod; None if it belongs to no job."""
    metadata, spec, status = _part(raw, "metadata"), _part(raw, "spec"), _part(raw, "status")
    labels, annotations = _part(metadata, "labels"), _part(metadata, "annotations")
    # A Kubernetes Job counts only if it is Indexed: its pods are ranks.
    is_ranked = names.RANK_LABEL in labels
    keys = (key for key in config.job_labels if key != names.BATCH_LABEL or is_ranked)
    job_label = next((key for key in keys if labels.get(key)), "")
    if not job_label:
        return None
    role = _role(job_label, labels, annotations)
    is_launcher = job_label in _GANGS and role in names.LAUNCHER_ROLES
    # Engines of a LeaderWorkerSet serve the requests that arrive, so their load may differ.
    default = "observe" if job_label == names.LEADER_WORKER_LABEL else ""
    owners = [owner.get("kind") for owner in metadata.get("ownerReferences") or ()]
    starts = [unix_seconds(status.get("startTime"))]
    for container in status.get("containerStatuses") or ():
        running = _part(_part(container, "state"), "running")
        starts.append(unix_seconds(running.get("startedAt")))
    # Without a label of the iteration, the name of the surrounding graph contains it.
    graph = re.search(r"\.iteration-(\d{1,6})[.(]", annotations.get(names.NODE_NAME, ""))
    return PodInfo(
        name=metadata["name"],
        namespace=metadata["namespace"],
        uid=metadata.get("uid", ""),
        machine=spec.get("nodeName") or "",
        job=labels[job_label],
        phase=status.get("phase") or "Pending",
        started=max(starts),
        role=labels.get(names.ROLE_LABEL, role),
        pipeline_stage=labels.get(names.PIPELINE_STAGE_LABEL, ""),
        run_id=labels.get(names.RUN_ID_LABEL, ""),
        stage=labels.get(names.STAGE_LABEL, ""),
        iteration=_integer(labels.get(names.ITERATION_LABEL, graph and graph[1])),
        workflow=labels.get(names.WORKFLOW_LABEL, ""),
        run_root=_run_root(annotations, spec),
        is_driver=is_launcher or annotations.get(names.KFP_ROLE) == "driver",
        is_evictable="DaemonSet" not in owners and names.MIRROR not in annotations,
        is_exempt=is_set(labels, names.EXEMPT),
        is_terminating="deletionTimestamp" in metadata,
        is_observed_only=labels.get(names.OPT_IN_LABEL, default) == "observe",
    )


def _role(job_label: str, labels: Raw, annotations: Raw) -> str:
    """Return the role of a pod in its job, if its controller names one."""
    if job_label == names.LEADER_WORKER_LABEL:
        return "leader" if labels.get(names.WORKER_INDEX) == "0" else "worker"
    keys = names.ROLE_LABELS.get(job_label, ())
    role = next((labels[key] for key in keys if labels.get(key)), "")
    if not role and job_label == names.WORKFLOW_LABEL:
        return _task(annotations.get(names.NODE_NAME, ""))
    return "" if job_label in _GANGS and role in names.RANK_ROLES else role


def _task(node_name: str) -> str:
    """Return the task of a workflow's pod, which is the same in all iterations of a loop."""
    _, *path = re.sub(r"\([^)]*\)|\[\d+\]", "", node_name).split(".")
    return next((part for part in reversed(path) if part != "executor"), "")


def _run_root(annotations: Raw, spec: Raw) -> str:
    """Return the root URI that a pod names, by annotation or in its arguments."""
    root = annotations.get(names.RUN_ROOT) or str(next(_root_arguments(spec), ""))
    return root.rstrip("/") if "://" in root and len(root) <= _MAX_ROOT else ""


def _root_arguments(spec: Raw) -> Iterator[object]:
    """Yield the roots in the arguments of containers: Kubeflow's `--executor_input`, or
    `--root`.
    """
    for container in spec.get("containers") or ():
        words = [*(container.get("command") or ()), *(container.get("args") or ())]
        for word, following in zip(words, [*words[1:], ""], strict=False):
            if word == "--executor_input":
                try:
                    yield json.loads(following)["inputs"]["parameterValues"]["root"]
                except (ValueError, KeyError, TypeError):
                    continue
            elif word == "--root":
                yield following
            elif word.startswith("--root="):
                yield word.partition("=")[2]


def parse_node(raw: Raw) -> NodeInfo:
    """Return a node as a dataclass."""
    metadata, spec, status = _part(raw, "metadata"), _part(raw, "spec"), _part(raw, "status")
    return NodeInfo(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        version=metadata.get("resourceVersion", ""),
        is_unschedulable=bool(spec.get("unschedulable")),
        conditions=tuple(status.get("conditions") or ()),
        labels=_part(metadata, "labels"),
        annotations=_part(metadata, "annotations"),
        taints=tuple(spec.get("taints") or ()),
        allocatable=_part(status, "allocatable"),
    )


def is_set(labels: Raw, key: str) -> bool:
    """Return whether a label is there and is not `false`, `0` or `no`."""
    return key in labels and str(labels[key]).lower() not in ("false", "0", "no")


def unix_seconds(text: object) -> int:
    """Return the unix seconds of a time from the API server; 0 if there is none."""
    try:
        return int(datetime.fromisoformat(text).timestamp()) if isinstance(text, str) else 0
    except ValueError:
        return 0


def timestamp(now: float) -> str:
    """Return unix seconds in the API server's format, in whole seconds."""
    return datetime.fromtimestamp(int(now), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _part(raw: Raw, key: str) -> dict[str, Any]:
    return raw.get(key) or {}


def _integer(text: object) -> int:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 10 else 0
