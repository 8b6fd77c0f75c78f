"""Pods, nodes and jobs as plain values, made from the JSON of the API server.

Knows no client and asks nobody. The identity of a machine is the name of its node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class PodInfo:
    """One pod that belongs to a job."""

    name: str
    namespace: str
    uid: str
    machine: str
    """Node name; empty before it is scheduled."""
    job: str
    """Value of the label that names its job."""
    phase: str
    """Pending, Running, Succeeded or Failed."""
    started: int = 0
    """Unix seconds of the last start of one of its containers."""
    role: str = ""
    pipeline_stage: str = ""
    run_id: str = ""
    stage: str = ""
    iteration: int = 0
    rank: int = -1
    """-1 where no label tells it."""
    workflow: str = ""
    run_root: str = ""
    is_driver: bool = False
    """Starts other pods of a Kubeflow run and computes nothing."""
    is_evictable: bool = True
    """Neither of a DaemonSet nor run by the kubelet itself."""
    is_exempt: bool = False
    is_terminating: bool = False
    """Its end has been asked for already."""
    is_observed_only: bool = False
    """Its label forbids any action on its machine."""
    requests: dict[str, float] = field(default_factory=dict)
    """Resource to amount."""
    selector: dict[str, str] = field(default_factory=dict)
    """Labels that its node must have."""
    tolerations: tuple[dict[str, str], ...] = ()


@dataclass(frozen=True)
class NodeInfo:
    """One node."""

    name: str
    uid: str
    version: str
    """resourceVersion, which a patch must still find."""
    is_unschedulable: bool = False
    is_ready: bool = True
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    taints: tuple[dict[str, str], ...] = ()
    allocatable: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class JobInfo:
    """Machines that are compared with each other: one job, or one role of it.

    Example:
        >>> JobInfo("pretrain", "team-a", ("n1", "n2"), role="actor").key
        'team-a/pretrain/actor'
    """

    name: str
    """Value of the label that names the job."""
    namespace: str
    machines: tuple[str, ...]
    """Nodes of its Running pods, sorted."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Machine to stage of pipeline parallelism, where a label tells it."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """Machine to role; one and the same for all, since each role is a group of its own."""
    started: int = 0
    """Unix seconds of the last (re)start of one of its pods."""
    run_id: str = ""
    stage: str = ""
    """Stage of the pipeline, as `train`."""
    iteration: int = 0
    run_root: str = ""
    """URI under which the run lives; empty where no pod tells it."""
    role: str = ""
    joined: Mapping[str, int] = field(default_factory=dict)
    """Machine to unix seconds at which its first pod of the job started."""
    pods: tuple[PodInfo, ...] = ()
    """Running pods."""
    is_observed_only: bool = False
    """A label of a pod forbids any action."""

    @property
    def key(self) -> str:
        """Identity in the whole cluster: namespace, name and, where it has one, role."""
        return "/".join(part for part in (self.namespace, self.name, self.role) if part)

    @property
    def full_name(self) -> str:
        """Namespace and name: all its roles together."""
        return f"{self.namespace}/{self.name}"
