"""Checks of the cluster before a run: permissions, quotas, node sizes and drivers.

Outside a cluster `prepare` skips them. A cluster that autoscales may have no large node yet, so
faults of room can become warnings.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import yaml
from pydantic import TypeAdapter, ValidationError

from planish.base.config import document_faults
from planish.base.errors import ClusterError, ConfigError
from planish.base.parallel import MIN_DRIVER
from planish.run.gang.cluster import PERMISSIONS as GANG_PERMISSIONS
from planish.run.gang.cluster import TRAINER_PERMISSIONS
from planish.run.gang.manifests import RUNTIME
from planish.run.kube import Kube, in_pod

Nodes = Sequence[Mapping[str, str]]
"""Allocatable resources and labels of each schedulable node, in one mapping."""

ACTIVE_PHASES = ("", "Pending", "Running")

DRIVER_LABEL = "nvidia.com/cuda.driver.major"
"""Label, set by GPU feature discovery, with the major version of a node's driver."""


class Permission(NamedTuple):
    """One permission of a service account."""

    group: str
    """API group; empty for the core group."""
    resource: str
    verb: str

    def describe(self) -> str:
        """Return `list workflows.argoproj.io`."""
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''}"


PERMISSIONS: tuple[Permission, ...] = (
    Permission("", "resourcequotas", "list"),
    Permission("argoproj.io", "workflows", "list"),
)
"""Permissions that stages need in the namespace of the run; `manifests/runs` grants them."""

CLUSTER_PERMISSIONS: tuple[Permission, ...] = (Permission("", "nodes", "list"),)
"""Permissions that they need for the whole cluster."""
RUNTIME_PERMISSION = Permission("trainer.kubeflow.org", "clustertrainingruntimes", "get")
"""Permission for the whole cluster if Kubeflow Trainer starts the training."""
CONTROLLER = "workflow-controller-configmap"
"""ConfigMap of Argo's controller; with single-user Kubeflow it is in the run's namespace."""


class ClusterApi(Kube):
    """Requests of the checks to the API server."""

    def allowed(self, permission: Permission, *, namespaced: bool) -> bool:
        """Return whether this service account has a permission."""
        from kubernetes.client import AuthorizationV1Api

        attributes = permission._asdict()
        if namespaced:
            attributes["namespace"] = self.namespace
        review = self.call(
            AuthorizationV1Api(self.client).create_self_subject_access_review,
            {"spec": {"resourceAttributes": attributes}},
        )
        return bool(review["status"]["allowed"])

    def quotas(self) -> Sequence[Mapping[str, Mapping[str, str]]]:
        """Return `{"hard": {...}, "used": {...}}` of each ResourceQuota of the namespace."""
        listed = self.items(self.core.list_namespaced_resource_quota, self.namespace)
        states = [item.get("status", {}) for item in listed]
        return [{"hard": s.get("hard", {}), "used": s.get("used", {})} for s in states]

    def nodes(self) -> Nodes:
        """Return allocatable resources and labels of each schedulable node, in one mapping."""
        return [
            {**node["metadata"].get("labels", {}), **node["status"].get("allocatable", {})}
            for node in self.items(self.core.list_node)
            if not node["spec"].get("unschedulable")
        ]

    def run_is_active(self, run_id: str) -> bool:
        """Return whether the workflow of a run exists and has not ended."""
        return any(
            item.get("status", {}).get("phase", "") in ACTIVE_PHASES
            for item in self.workflows(run_id)
        )

    def has_runtime(self, name: str) -> bool:
        """Return whether Kubeflow Trainer has a ClusterTrainingRuntime of this name."""
        place = (RUNTIME_PERMISSION.group, "v1alpha1", RUNTIME_PERMISSION.resource)
        return self.find(self.custom.get_cluster_custom_object, *place, name) is not None

    def controller(self) -> Mapping[str, str] | None:
        """Return the settings of Argo's controller by key; None if missing or not readable."""
        try:
            read = self.core.read_namespaced_config_map
            found = self.find(read, CONTROLLER, self.namespace)
        except ClusterError as error:
            if error.status != 403:
                raise
            return None
        return None if found is None else found.get("data", {})


class Findings(NamedTuple):
    """Result of the checks: a fault ends the run, a warning goes into the plan."""

    faults: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    retries: str = ""
    """Text on retries of failed pods: by the cluster, or else by the pod itself."""


_SUFFIX = (
    {"": 1.0, "n": 1e-9, "u": 1e-6, "m": 1e-3}
    | {letter: 1000.0 ** (power + 1) for power, letter in enumerate("kMGTPE")}
    | {f"{letter}i": 1024.0 ** (power + 1) for power, letter in enumerate("KMGTPE")}
)


def amount(quantity: str) -> float:
    """Return a Kubernetes quantity as a number.

    Example:
        >>> amount("500m"), amount("4Gi")
        (0.5, 4294967296.0)
    """
    number = quantity.rstrip("EKMGTPikmnu")
    try:
        return float(number) * _SUFFIX[quantity[len(number) :]]
    except (KeyError, ValueError):
        raise ConfigError(
            f"a quantity must read like 500m, 2 or 4Gi, got {quantity!r:.80}"
        ) from None


@dataclass(frozen=True)
class Pod:
    """One pod of a stage."""

    gpus: int
    """Number of GPUs; with 0 the pod computes on the CPU."""
    memory: str
    """Limit of the host memory, as Kubernetes writes it."""

    @property
    def memory_bytes(self) -> int:
        """Limit of the host memory in bytes."""
        return int(amount(self.memory))

    def __str__(self) -> str:
        """Return `a pod of 8 GPUs`."""
        return f"a pod of {self.gpus or 'no'} GPU{'s' * (self.gpus != 1)}"


@dataclass(frozen=True)
class PodRequests:
    """Pods that the pipeline was compiled with."""

    pod: Mapping[str, str] = field(default_factory=dict)
    """Largest request of one pod by resource."""
    total: Mapping[str, str] = field(default_factory=dict)
    """Largest sum of requests of pods that run at the same time."""
    stages: Mapping[str, Pod] = field(default_factory=dict)
    gpu_bytes: int = 80 * 10**9
    num_nodes: int = 1
    """Number of pods that train together, each with the requests `rank`; 0 outside a cluster."""
    has_gang_pods: bool = False
    """True if the pod of `train` has no GPUs and only waits for the pods of its gang."""
    rank: Mapping[str, str] = field(default_factory=dict)
    launcher: str = "job"
    in_turn: bool = False
    """True if one task, in the pod of `iterate`, runs several iterations."""
    moments: Mapping[str, tuple[int, Mapping[str, str]]] = field(default_factory=dict)
    """Stage to the number of its pods that run at the same time, and the requests of each."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels of the nodes for all pods."""
    gpu_labels: Mapping[str, str] = field(default_factory=dict)
    """Further labels of the nodes for pods with GPUs."""

    @property
    def have_gpus(self) -> bool:
        """True if a stage has a pod with GPUs."""
        return any(pod.gpus for pod in self.stages.values())

    @classmethod
    def parse(cls, text: str) -> PodRequests:
        """Parse the JSON that the compiled pipeline passes; empty for none.

        Raises:
            ConfigError: another release has compiled the pipeline, with other fields.
        """
        try:
            found = TypeAdapter(cls).validate_json(text or "{}")
        except ValidationError as error:
            raise ConfigError(
                f"`requests` must be JSON with pod, total and stages, got {text!r:.200} "
                f"({document_faults(error)}); compile the pipeline with the release of the image"
            ) from None
        is_gang, in_turn = found.num_nodes > 1, "iterate" in found.stages
        return replace(found, has_gang_pods=is_gang, in_turn=in_turn)

    def pod_of(self, stage: str) -> Pod | None:
        """Return the pod of a stage; the pod of `iterate`, if any, runs `rollout` and `train`."""
        together = self.stages.get("iterate") if stage in ("rollout", "train") else None
        return together or self.stages.get(stage)

    def of_training(self, train: Mapping[str, Any]) -> PodRequests:
        """Return these requests adjusted to `num_nodes` and `launcher` of `[train]`."""
        num_nodes = train["num_nodes"] or self.num_nodes
        total = dict(self.total)
        for resource, each in self.rank.items():
            together = num_nodes * amount(each)
            if together > amount(total.get(resource, "0")):
                total[resource] = f"{together:g}"
        return replace(self, num_nodes=num_nodes, total=total, launcher=train["launcher"])


def inside_cluster() -> bool:
    """Return whether this process runs in a pod with a service account."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and in_pod()


def check_cluster(api: ClusterApi, requests: PodRequests, *, assume_autoscaling: bool) -> Findings:
    """Check permissions, quota, node sizes and drivers.

    With `assume_autoscaling`, faults of quota, nodes and drivers are only warnings.
    """
    faults: list[str] = []
    by_trainer = requests.num_nodes > 1 and requests.launcher == "trainjob"
    wanted, everywhere = list(PERMISSIONS), list(CLUSTER_PERMISSIONS)
    if requests.num_nodes > 1:
        of_gangs = TRAINER_PERMISSIONS if by_trainer else GANG_PERMISSIONS
        wanted += [Permission(*each) for each in of_gangs]
        everywhere += [RUNTIME_PERMISSION] * by_trainer
    missing = [p for p in wanted if not api.allowed(p, namespaced=True)]
    missing += [p for p in everywhere if not api.allowed(p, namespaced=False)]
    if by_trainer and RUNTIME_PERMISSION not in missing and not api.has_runtime(RUNTIME):
        faults.append(
            f"Kubeflow Trainer 2.1 must be installed with the ClusterTrainingRuntime `{RUNTIME}` "
            "for `train.launcher=trainjob`, but is not; apply manifests/trainer, or set "
            "`train.launcher=job`"
        )
    if missing:
        faults.append(
            "the service account of the run must be allowed to "
            f"{', '.join(p.describe() for p in missing)}, but is not; apply the overlay of "
            "manifests/ for this namespace (kfp-single-user, kfp-multi-user, or local or gpu "
            "without Kubeflow) and name its account, planish-runner"
        )
    may_list = {p.resource for p in (*wanted, *everywhere) if p not in missing}
    quotas = api.quotas() if "resourcequotas" in may_list else []
    nodes = api.nodes() if "nodes" in may_list else None
    room = list(_quota_faults(quotas, requests))
    waiting: list[str] = []
    if nodes is not None:
        room += [*_node_faults(nodes, requests), *_driver_faults(nodes, requests)]
        waiting = _waiting(nodes, requests)
    room = [f"{fault}, or set `chain.assume_autoscaling=true`" for fault in room]
    retries = retries_under(api.controller())
    if assume_autoscaling:
        return Findings(tuple(faults), (*room, *waiting), retries)
    return Findings((*faults, *room), tuple(waiting), retries)


def retries_under(settings: Mapping[str, str] | None) -> str:
    """Return a text on whether Argo's controller retries a pod after its program failed.

    A task of Kubeflow sets a number of retries but no policy. Argo takes the policy from the
    defaults of its controller (`settings`, None if unknown), else `OnFailure`.
    """
    if settings is None:
        return f"not known: `{CONTROLLER}` is not to be read in this namespace"
    try:
        whole = yaml.safe_load(settings.get("config", "")) or {}
        defaults = settings.get("workflowDefaults") or whole.get("workflowDefaults") or {}
        defaults = yaml.safe_load(defaults) if isinstance(defaults, str) else defaults
        strategy = defaults.get("spec", {}).get("templateDefaults", {}).get("retryStrategy", {})
        policy = str(strategy.get("retryPolicy", "OnFailure"))
    except (AttributeError, yaml.YAMLError):
        return f"not known: `{CONTROLLER}` has another form"
    if policy in ("Always", "OnFailure"):
        return f"on: `retryPolicy: {policy}`"
    return (
        f"off: `retryPolicy: {policy}` of the cluster tries no pod again whose program failed; "
        "each runs it once more by itself, unless its container dies as a whole "
        "(`manifests/overlays/kfp-patch` turns retries on)"
    )


def _driver_faults(nodes: Nodes, requests: PodRequests) -> Iterator[str]:
    """Yield a fault if nodes have a driver older than the CUDA wheels of our images need."""
    versions = {node.get(DRIVER_LABEL, "") for node in nodes}
    old = sorted(each for each in versions if each.isdecimal() and int(each) < MIN_DRIVER)
    if old and requests.have_gpus:
        yield (
            f"nodes with GPUs must have the NVIDIA driver {MIN_DRIVER} or newer for CUDA 13, got "
            f"`{DRIVER_LABEL}` = {', '.join(old)}; update their driver, cordon them"
        )


def _quota_faults(
    quotas: Sequence[Mapping[str, Mapping[str, str]]], requests: PodRequests
) -> Iterator[str]:
    # The quota names cores and memory with or without the prefix, other resources with it.
    names = {f"requests.{resource}": resource for resource in requests.total}
    names |= {resource: resource for resource in ("cpu", "memory") if resource in requests.total}
    for quota in quotas:
        for key in sorted(names.keys() & quota.get("hard", {})):
            wanted, limit = requests.total[names[key]], quota["hard"][key]
            free = amount(limit) - amount(quota.get("used", {}).get(key, "0"))
            if amount(wanted) > free:
                yield (
                    f"the quota of the namespace must leave {wanted} of `{names[key]}` for the "
                    f"largest stage, got {limit} in all and {free:g} free; raise the quota, wait"
                )


def _for_pods(nodes: Nodes, requests: PodRequests, wanted: Mapping[str, str]) -> Nodes:
    """Return the nodes whose labels match those of the pods with these requests."""
    has_gpus = not wanted.keys() <= {"cpu", "memory"}
    labels = {**requests.labels, **(requests.gpu_labels if has_gpus else {})}
    return [node for node in nodes if labels.items() <= node.items()]


def _places(nodes: Nodes, wanted: Mapping[str, str]) -> int:
    """Return the number of pods of this size that fit on the nodes if these are empty."""
    each = {name: amount(text) for name, text in wanted.items()}
    return sum(
        int(min(amount(node.get(name, "0")) // size for name, size in each.items()))
        for node in nodes
        if each
    )


def _waiting(nodes: Nodes, requests: PodRequests) -> list[str]:
    """Return a warning for each stage whose pods do not all fit at the same time."""
    found = []
    for stage, (count, wanted) in requests.moments.items():
        room = _places(_for_pods(nodes, requests, wanted), wanted)
        if room < count:
            found.append(
                f"`{stage}` runs {count} pods at the same time, each with {dict(wanted)}, and the "
                f"nodes hold {room} of them: the others wait for their turn"
            )
    return found


def _node_faults(nodes: Nodes, requests: PodRequests) -> Iterator[str]:
    ours = _for_pods(nodes, requests, requests.pod)
    if nodes and not ours:
        labels = {**requests.labels, **requests.gpu_labels}
        yield (
            f"a node with the labels {labels} must exist, but none of the {len(nodes)} nodes has "
            "them; label the nodes"
        )
        return
    is_small = False
    for resource, wanted in sorted(requests.pod.items()):
        largest = max((amount(node.get(resource, "0")) for node in ours), default=0.0)
        is_small |= amount(wanted) > largest
        if largest == 0 and resource not in ("cpu", "memory"):
            yield (
                f"a node with `{resource}` must exist, but none of the {len(ours)} nodes has it; "
                "add one, compile another profile"
            )
        elif amount(wanted) > largest:
            yield (
                f"a node must hold {wanted} of `{resource}` for the largest pod, but the largest "
                f"has {largest:g}; compile another profile"
            )
    at_once = _places(ours, requests.rank)
    if not is_small and requests.num_nodes > 1 and at_once < requests.num_nodes:
        yield (
            f"the nodes must hold the {requests.num_nodes} pods that train together, each with "
            f"{dict(requests.rank)}, but only {at_once} of them fit; add nodes, lower "
            "`train.num_nodes`"
        )
