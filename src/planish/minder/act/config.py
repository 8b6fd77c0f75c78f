"""Settings of what the monitor reads from Kubernetes and of the actions that it may take.

The defaults allow no action.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planish.base.config import Section
from planish.minder.act.kube import names

Mode = Literal["observe", "mark", "cordon", "evict"]


class ActConfig(Section):
    """Modes and limits of actions. A namespace must also opt in, by the label `minder/action`."""

    mode: Mode = "observe"
    """The strongest action that is allowed anywhere. `mark` sets a condition on the node, to which
    tools of the cluster that drain or repair nodes can react. `cordon` and `evict` set it too."""
    dry_run: bool = True
    """Only report the actions that would be taken."""
    nodes_per_job: int = Field(default=1, ge=1)
    """Most nodes that one job may lose within `job_seconds`."""
    job_seconds: int = Field(default=1800, ge=1)
    """Window of `nodes_per_job`."""
    nodes_per_cluster: int = Field(default=3, ge=1)
    """Most nodes that the cluster may lose within `cluster_seconds`."""
    cluster_seconds: int = Field(default=3600, ge=1)
    """Window of `nodes_per_cluster` and `max_node_share`."""
    max_node_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Largest share of all GPU nodes that the cluster may lose, rounded up to nodes. The smaller of
    this limit and `nodes_per_cluster` holds."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource that a node must have to count for the share; empty: every node counts."""


class KubernetesConfig(Section):
    """Connection to Kubernetes, discovery of jobs, places of lease, state and alerts."""

    kubeconfig: str = ""
    """Path of the kubeconfig; empty: the service account of this pod."""
    namespaces: tuple[str, ...] = Field(default=(), strict=False)
    """Namespaces in which the monitor looks for jobs; empty: all."""
    job_labels: tuple[str, ...] = Field(default=names.JOB_LABELS, min_length=1, strict=False)
    """Keys of the labels that name a pod's job; the first key that the pod has counts."""
    own_namespace: str = ""
    """Namespace of lease and state; empty: the namespace of this pod."""
    run_roots: tuple[str, ...] = Field(default=(), strict=False)
    """URIs below which the monitor may write alerts. Pods name their run root themselves, so the
    default allows none."""
