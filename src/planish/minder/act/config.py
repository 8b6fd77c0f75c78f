"""Configuration of what the monitor reads from Kubernetes and what it may do to machines.

Without settings it changes nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planish.base.config import Section
from planish.minder.act.kube import names

Mode = Literal["observe", "mark", "cordon", "evict"]


class ActConfig(Section):
    """Modes and limits. A namespace must also opt in, by the label `minder/action`."""

    mode: Mode = "observe"
    """The strongest action that is allowed anywhere. `mark` sets a condition on the node, by which
    what drains and repairs nodes of the cluster acts; `cordon` and `evict` set it too."""
    dry_run: bool = True
    """Only report what would be done."""
    nodes_per_job: int = Field(default=1, ge=1)
    """Most nodes that one job loses in `job_seconds`."""
    job_seconds: int = Field(default=1800, ge=1)
    """Window of `nodes_per_job`."""
    nodes_per_cluster: int = Field(default=3, ge=1)
    """Most nodes that the cluster loses in `cluster_seconds`."""
    cluster_seconds: int = Field(default=3600, ge=1)
    """Window of `nodes_per_cluster` and `max_node_share`."""
    max_node_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """Most nodes as a share of all GPU nodes, rounded up; the smaller of the two limits holds."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource that a node must have to count for the share; empty: every node counts."""


class KubernetesConfig(Section):
    """Discovery of jobs, links to runs, place of lease and state."""

    kubeconfig: str = ""
    """File to connect by; empty: the service account of this pod."""
    namespaces: tuple[str, ...] = Field(default=(), strict=False)
    """Namespaces in which jobs are looked for; empty: all."""
    job_labels: tuple[str, ...] = Field(default=names.JOB_LABELS, min_length=1, strict=False)
    """Keys of the labels that name the job of a pod; the first one that a pod has counts."""
    own_namespace: str = ""
    """Namespace of lease and state; empty: that of this pod."""
    run_roots: tuple[str, ...] = Field(default=(), strict=False)
    """URIs below which alerts may be written. Pods name their root themselves, so the default
    allows none."""
