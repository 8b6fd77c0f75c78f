"""Kubernetes objects of a gang: an Indexed Job with one pod per machine, and a Service.

The pods copy the pod of the stage that submits them: its image, variables, volumes,
tolerations, and the nodes to avoid. This module calls no API server.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from planish.base.config import Section
from planish.base.errors import ConfigError

Raw = Mapping[str, Any]

Launcher = Literal["job", "trainjob"]
"""An Indexed Job with a Service, or a TrainJob of Kubeflow Trainer, which makes both."""

RUNTIME = "planish-torch"
"""The ClusterTrainingRuntime of `manifests/trainer`."""

GANG_ENV = "PLANISH_GANG"
"""Variable of a pod that submits gangs: `GangPods` as JSON, written when a pipeline is compiled."""

RUN_LABEL = "pipeline/runid"
"""Label of a run: Kubeflow sets it on pods, this program sets it on jobs."""
STAGE_LABEL = "planish/stage"
"""Label with the stage, on all pods and jobs of this program."""
GANG_LABEL = "planish/gang"
"""Label of job, service and pods: digest of the work that only one gang may do at a time."""
WORK_ANNOTATION = "planish/work"
"""Annotation of the job: digest of the gang's whole work."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

KEEP_SECONDS = 3600
"""Seconds after which an ended gang that no stage has read is deleted."""
GRACE_SECONDS = 60
"""Seconds of a pod between SIGTERM and SIGKILL."""
LONGEST_SECONDS = 86_400
"""Deadline of a gang whose stage has none."""
CONTAINER_FIELDS = ("image", "imagePullPolicy", "envFrom", "resources", "securityContext")
POD_FIELDS = (
    *("affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName"),
    *("schedulerName", "securityContext", "serviceAccountName", "tolerations"),
)
"""Fields that a pod of a gang copies from the pod of its stage."""
NOT_COPIED = ("ARGO_", "KFP_", GANG_ENV)
"""Prefixes of variables that describe the pod of the stage itself and are not copied."""


class Network(Section):
    """Network of a gang's pods beside the pod network; empty by default."""

    resources: dict[str, str] = Field(default_factory=dict)
    """Devices of each pod, such as `rdma/hca_shared_devices_a = "1"`."""
    capabilities: list[str] = Field(default_factory=list)
    """Linux capabilities such as `IPC_LOCK`, by which a process may register memory for RDMA."""
    host_network: bool = False
    """The pods have the addresses of their nodes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables, such as `NCCL_IB_HCA`."""

    def join(self, pods: dict[str, Any]) -> None:
        """Add this to the JSON of a `GangPods`, in place.

        A TrainJob takes only resources and variables; put the rest into its runtime.
        """
        container = pods["container"]
        for kind in ("requests", "limits"):
            container["resources"][kind] |= self.resources
        container["env"] = [
            *container.get("env", ()),
            *({"name": name, "value": value} for name, value in self.env.items()),
        ]
        if self.capabilities:
            container["securityContext"] = {"capabilities": {"add": self.capabilities}}
        if self.host_network:
            known = {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
            pods["spec"] = {**pods.get("spec", {}), **known}


@dataclass(frozen=True)
class GangPods:
    """Number of pods in a gang of the profile, and their differences from the stage's pod.

    Example:
        >>> GangPods.parse('{"num_nodes": 4, "container": {"resources": {}}}').num_nodes
        4
    """

    num_nodes: int = 1
    """Number of machines of the profile."""
    gpus: int = 0
    """GPUs of one pod."""
    container: Raw = field(default_factory=dict)
    """Fields that replace those of the stage's container; mounts and capabilities are added to
    its own, and variables that it lacks."""
    spec: Raw = field(default_factory=dict)
    """Fields that replace those of the pod; volumes, tolerations and node labels are added to its
    own."""

    @classmethod
    def parse(cls, text: str) -> GangPods:
        """Read the value of `GANG_ENV`; empty means pods like that of the stage.

        Raises:
            ConfigError: another release with other fields has compiled the pipeline.
        """
        try:
            return cls(**json.loads(text or "{}"))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"`{GANG_ENV}` must be JSON with {sorted(cls.__dataclass_fields__)}, got "
                f"{text!r:.200} ({error}); compile the pipeline with the release of the image"
            ) from None

    @classmethod
    def of_this_pod(cls) -> GangPods | None:
        """Return those of this pod's profile; None for a profile that trains in one pod."""
        text = os.environ.get(GANG_ENV, "")
        return cls.parse(text) if text else None


@dataclass(frozen=True)
class Gang:
    """Several pods that run one module under torchrun.

    Example:
        >>> gang = Gang("ab" * 32, 3, 2, ("planish.stages.train.ranks.worker",))
        >>> gang.name, gang.address
        ('planish-abababababababab', 'planish-abababababababab-0.planish-abababababababab')
    """

    digest: str
    """sha256 of the work that only one gang may do at a time; it makes the name of the gang."""
    num_nodes: int
    """Number of pods; pods that take all GPUs of a machine run on separate machines."""
    num_processes: int
    """Ranks of each pod."""
    words: Sequence[str]
    """Module and arguments of each rank."""
    work: str = ""
    """sha256 of the whole work; a gang with the same name and other work is deleted."""
    pods: GangPods = field(default_factory=GangPods)
    """Differences of its pods from the pod of the stage."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of all objects, beside those of every gang."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Annotations of its pods."""
    queue: str = ""
    """Queue of Kueue that admits it; empty starts it at once."""
    launcher: Launcher = "job"
    """Kind of its job."""

    @property
    def name(self) -> str:
        """Name of the job, of its service and of the rendezvous."""
        return f"planish-{self.digest[:16]}"

    @property
    def address(self) -> str:
        """Host name of its first pod."""
        pod = f"{self.name}-node-0-0" if self.launcher == "trainjob" else f"{self.name}-0"
        return f"{pod}.{self.name}"

    @property
    def port(self) -> int:
        """TCP port of the rendezvous; two gangs that share a network rarely share it."""
        return 20_000 + int(self.digest[:8], 16) % 10_000

    @property
    def own_labels(self) -> dict[str, str]:
        """Labels of every object of this gang."""
        # A value has at most 63 characters.
        return {**self.labels, GANG_LABEL: self.digest[:63]}


def job_manifest(gang: Gang, pod: Raw) -> dict[str, Any]:
    """Return the Indexed Job of a gang, or its TrainJob.

    If one pod fails or is evicted, the whole gang ends, and the retry of the stage starts the next
    gang. No pod is replaced.

    `pod` is the stage's pod from the API server; it owns the job.
    """
    metadata = job_metadata(gang, pod)
    if gang.launcher == "trainjob":
        return train_job_manifest(gang, pod, metadata)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "completionMode": "Indexed",
            "completions": gang.num_nodes,
            "parallelism": gang.num_nodes,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": deadline_of(pod),
            "ttlSecondsAfterFinished": KEEP_SECONDS,
            "suspend": bool(gang.queue),
            "template": {
                "metadata": {
                    "labels": gang.own_labels,
                    "annotations": dict(gang.annotations),
                },
                "spec": pod_spec(gang, pod["spec"]),
            },
        },
    }


def job_metadata(gang: Gang, pod: Raw) -> dict[str, Any]:
    """Return name, labels, work and owner of the job of a gang, for both launchers."""
    queued = {QUEUE_LABEL: gang.queue} if gang.queue else {}
    return {
        "name": gang.name,
        "labels": {**gang.own_labels, **queued},
        "annotations": {WORK_ANNOTATION: gang.work},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", **owned_by(pod)}],
    }


def deadline_of(pod: Raw) -> int:
    """Return the deadline of a gang in seconds: that of its stage's pod."""
    return int(pod["spec"].get("activeDeadlineSeconds", LONGEST_SECONDS))


def train_job_manifest(gang: Gang, pod: Raw, metadata: Raw) -> dict[str, Any]:
    """Return the TrainJob of a gang.

    The runtime sets what a TrainJob cannot: pods are not replaced, do not call the API server, and
    have a deadline. It may set a priority class too.
    """
    spec = pod_spec(gang, pod["spec"])
    (container,) = spec["containers"]
    mounts = {"name": "node", "volumeMounts": container["volumeMounts"]}
    fields = ("affinity", "imagePullSecrets", "nodeSelector", "serviceAccountName", "tolerations")
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata,
        "spec": {
            "runtimeRef": {"name": RUNTIME, "kind": "ClusterTrainingRuntime"},
            "suspend": bool(gang.queue),
            "trainer": {
                "image": container["image"],
                "command": container["command"],
                "args": container["args"],
                "env": container["env"],
                "numNodes": gang.num_nodes,
                "numProcPerNode": gang.num_processes,
                "resourcesPerNode": container.get("resources", {}),
            },
            "podTemplateOverrides": [
                {
                    "targetJobs": [{"name": "node"}],
                    "metadata": {
                        "labels": gang.own_labels,
                        "annotations": dict(gang.annotations),
                    },
                    "spec": {
                        **{name: spec[name] for name in fields if spec.get(name)},
                        "volumes": spec["volumes"],
                        "containers": [mounts],
                    },
                }
            ],
        },
    }


def service_manifest(gang: Gang, job: Raw) -> dict[str, Any]:
    """Return the headless Service that gives pods their host names; it is deleted with its job.

    It has no label of a run, because another run may take over the job.
    """
    labels = {name: value for name, value in gang.own_labels.items() if name != RUN_LABEL}
    owner = {"apiVersion": "batch/v1", "kind": "Job", **owned_by(job)}
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": gang.name,
            "labels": labels,
            "ownerReferences": [owner],
        },
        "spec": {
            "clusterIP": "None",
            # Ranks resolve each other's names before any pod is ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": gang.name},
            "ports": [{"name": "rendezvous", "port": gang.port}],
        },
    }


def owned_by(owner: Raw) -> dict[str, str]:
    """Return an ownerReference with name and uid of an owner."""
    return {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}


def pod_spec(gang: Gang, own: Raw) -> dict[str, Any]:
    """Return the spec of a gang's pod: the stage's pod with the fields of the profile."""
    named = [each for each in own["containers"] if each["name"] == "main"]
    container = (named or own["containers"])[0]
    projected = {each["name"] for each in own.get("volumes", ()) if "projected" in each}
    volumes = [each for each in own.get("volumes", ()) if each["name"] not in projected]
    mounts = [each for each in container.get("volumeMounts", ()) if each["name"] not in projected]
    changed = gang.pods.container
    variables = {
        each["name"]: each
        for each in (*changed.get("env", ()), *container.get("env", ()))
        if not each["name"].startswith(NOT_COPIED)
    }
    of_pod = {"fieldRef": {"fieldPath": "status.podIP"}}
    variables["POD_IP"] = {"name": "POD_IP", "valueFrom": of_pod}
    of_index = "metadata.labels['batch.kubernetes.io/job-completion-index']"
    variables["GANG_INDEX"] = {
        "name": "GANG_INDEX",
        "valueFrom": {"fieldRef": {"fieldPath": of_index}},
    }
    more = gang.pods.spec
    return {
        **{name: own[name] for name in POD_FIELDS if name in own},
        **more,
        "nodeSelector": {**own.get("nodeSelector", {}), **more.get("nodeSelector", {})},
        "tolerations": [*own.get("tolerations", ()), *more.get("tolerations", ())],
        "restartPolicy": "Never",
        "subdomain": gang.name,
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        # Ranks send requests to the store, never to the API server.
        "automountServiceAccountToken": False,
        "volumes": [*volumes, *more.get("volumes", ())],
        "containers": [
            {
                **{name: container[name] for name in CONTAINER_FIELDS if name in container},
                **changed,
                "securityContext": _joined(container, changed),
                "name": "main",
                "command": ["python", "-m", "planish.run.gang.node"],
                "args": node_arguments(gang),
                "env": list(variables.values()),
                "volumeMounts": [*mounts, *changed.get("volumeMounts", ())],
            }
        ],
    }


def _joined(own: Raw, changed: Raw) -> dict[str, Any]:
    """Return the security context of a container with the capabilities of another."""
    mine, more = (each.get("securityContext", {}) for each in (own, changed))
    kept = {**mine.get("capabilities", {}), **more.get("capabilities", {})}
    return {**mine, **({"capabilities": kept} if kept else {})}


def node_arguments(gang: Gang) -> list[str]:
    """Return the arguments of `planish.run.gang.node`; Kubernetes fills in `$(...)`."""
    return [
        f"--name={gang.name}",
        f"--nodes={gang.num_nodes}",
        f"--processes={gang.num_processes}",
        f"--rendezvous={gang.address}:{gang.port}",
        "--index=$(GANG_INDEX)",
        "--address=$(POD_IP)",
        *gang.words,
    ]
