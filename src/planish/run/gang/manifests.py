"""What a gang is as objects of Kubernetes: an Indexed Job of one pod per machine, and a Service.

The pods are cast from the pod of the stage that submits them: its image, variables, volumes,
tolerations, and the nodes that it keeps away from. It deliberately asks no API server.
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
"""Of every pod of a run, by Kubeflow, and of every job of one, by us."""
STAGE_LABEL = "planish/stage"
"""Of every pod and job of ours."""
GANG_LABEL = "planish/gang"
"""Of the job, its service and its pods: digest of what only one gang may do at a time."""
WORK_ANNOTATION = "planish/work"
"""Of the job: digest of all that the gang does."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"

KEEP_SECONDS = 3600
"""A gang that has ended, and that nobody reads, is deleted after so long."""
GRACE_SECONDS = 60
"""Time of a pod between the request to end and its end."""
LONGEST_SECONDS = 86_400
"""Deadline of a gang whose stage has none."""
CONTAINER_FIELDS = ("image", "imagePullPolicy", "envFrom", "resources", "securityContext")
POD_FIELDS = (
    *("affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "runtimeClassName"),
    *("schedulerName", "securityContext", "serviceAccountName", "tolerations"),
)
"""What a pod of a gang has from the pod of its stage."""
NOT_COPIED = ("ARGO_", "KFP_", GANG_ENV)
"""First letters of variables that are about the pod of the stage itself."""


class Network(Section):
    """How the pods of a gang reach each other beside the network of pods; none of it by default."""

    resources: dict[str, str] = Field(default_factory=dict)
    """Devices of each pod, such as `rdma/hca_shared_devices_a = "1"`."""
    capabilities: list[str] = Field(default_factory=list)
    """Of Linux, such as `IPC_LOCK`, by which a process may register memory for RDMA."""
    host_network: bool = False
    """The pods have the addresses of their nodes."""
    env: dict[str, str] = Field(default_factory=dict)
    """Variables, such as `NCCL_IB_HCA`."""

    def join(self, pods: dict[str, Any]) -> None:
        """Add this to the JSON of a `GangPods`, in place.

        A TrainJob takes resources and variables alone; for it the rest stands in its runtime.
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
    """How many pods a gang of the profile has, and what of each differs from the stage's pod.

    Example:
        >>> GangPods.parse('{"num_nodes": 4, "container": {"resources": {}}}').num_nodes
        4
    """

    num_nodes: int = 1
    """Machines that the profile was made for."""
    gpus: int = 0
    """GPUs of one pod."""
    container: Raw = field(default_factory=dict)
    """Fields of the container that replace those of the stage's; mounts and capabilities are added
    to its own, and variables where it lacks them."""
    spec: Raw = field(default_factory=dict)
    """The same of the pod; volumes, tolerations and labels of nodes are added to its own."""

    @classmethod
    def parse(cls, text: str) -> GangPods:
        """Read the value of `GANG_ENV`; empty for pods like that of the stage.

        Raises:
            ConfigError: another release has compiled the pipeline, with other fields.
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
        """Return those that this pod's profile names; None for a profile that trains in one pod."""
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
    """sha256 of what only one gang may do at a time: all of them have one name, whoever submits
    them."""
    num_nodes: int
    """Pods, each on a machine of its own where it takes all GPUs of one."""
    num_processes: int
    """Ranks of each pod."""
    words: Sequence[str]
    """Module and arguments of each rank."""
    work: str = ""
    """sha256 of all that it does; one of the same digest and other work makes way for it."""
    pods: GangPods = field(default_factory=GangPods)
    """How its pods differ from that of the stage."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of all objects, beside those that every gang has."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """Of its pods."""
    queue: str = ""
    """Queue of Kueue that lets it start; empty starts it at once."""
    launcher: Launcher = "job"
    """What it is as an object."""

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

    One pod that ends badly, or is taken away, ends the whole gang: the retry of the stage starts
    the next one. No pod is replaced.

    `pod` is that of the stage, as the API server gives it; it owns the job.
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
    """Return name, labels, work and owner of the job of a gang, whatever its kind."""
    queued = {QUEUE_LABEL: gang.queue} if gang.queue else {}
    return {
        "name": gang.name,
        "labels": {**gang.own_labels, **queued},
        "annotations": {WORK_ANNOTATION: gang.work},
        "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", **owned_by(pod)}],
    }


def deadline_of(pod: Raw) -> int:
    """Return the seconds that a gang has: those of the pod of its stage."""
    return int(pod["spec"].get("activeDeadlineSeconds", LONGEST_SECONDS))


def train_job_manifest(gang: Gang, pod: Raw, metadata: Raw) -> dict[str, Any]:
    """Return the TrainJob of a gang.

    What a TrainJob can not say stands in the runtime: no pod is replaced, none asks the API server,
    and there is a deadline. A priority class may stand there too.
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
    """Return the headless Service that gives pods their host names; it goes with its job.

    Of a run it has no label: another run may take over the job.
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
            # Ranks look for each other before any of them is ready.
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": gang.name},
            "ports": [{"name": "rendezvous", "port": gang.port}],
        },
    }


def owned_by(owner: Raw) -> dict[str, str]:
    """Return name and uid of an owner as an ownerReference has them."""
    return {"name": owner["metadata"]["name"], "uid": owner["metadata"]["uid"]}


def pod_spec(gang: Gang, own: Raw) -> dict[str, Any]:
    """Return the spec of a gang's pod: that of the stage's pod, with what the profile replaces."""
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
        # Ranks ask the store, and never the API server.
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
