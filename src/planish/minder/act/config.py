"""Configuration of what the monitor reads from Kubernetes and what it may do to machines.

Without settings it changes nothing.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planish.base.config import Section
from planish.minder.act.kube import names

Mode = Literal["observe", "cordon", "evict"]


class ActConfig(Section):
    """Modes, guards, breaker. A namespace must also opt in, by the label `minder/action`."""

    mode: Mode = "observe"
    """The strongest action that is allowed anywhere."""
    dry_run: bool = True
    """Only report what would be done."""
    owner: str = Field(default="minder", min_length=1, max_length=63)
    """Marks the nodes that this monitor cordoned; keep it the same over restarts."""
    fresh_seconds: int = Field(default=180, ge=1)
    """A result whose last second is older leads to no action."""
    recheck: bool = True
    """A second call must confirm the machine before anything is done."""
    allow_without_spare: bool = False
    """Act although no other node could take the pods."""
    nodes_per_job: int = Field(default=1, ge=1)
    """Most nodes that one job loses in `job_seconds`."""
    job_seconds: int = Field(default=1800, ge=1)
    """Window of `nodes_per_job`."""
    nodes_per_cluster: int = Field(default=3, ge=1)
    """Most nodes that the cluster loses in `cluster_seconds`."""
    cluster_seconds: int = Field(default=3600, ge=1)
    """Window of `nodes_per_cluster`."""
    spacing_seconds: int = Field(default=600, ge=0)
    """Least seconds between two nodes anywhere."""
    max_nodes: int = Field(default=3, ge=1)
    """Cap of nodes in `cap_seconds`; a node beyond the cap opens the breaker."""
    max_node_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """The same cap as a share of all GPU nodes, rounded up; the smaller of the two holds."""
    cap_seconds: int = Field(default=3600, ge=1)
    """Window of both caps."""
    gpu_resource: str = "nvidia.com/gpu"
    """Resource that a node must have to count for the share; empty: every node counts."""
    breaker_error_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """A larger share of failed requests to the API server opens the breaker."""
    breaker_seconds: int = Field(default=300, ge=1)
    """Window of that share."""
    breaker_min_requests: int = Field(default=5, ge=1)
    """With fewer requests in the window the share is not looked at."""
    discard_seconds: int = Field(default=900, ge=0)
    """Alerts that are older than this when the breaker is closed are never acted upon."""
    backoff_seconds: float = Field(default=5.0, gt=0.0)
    """Pause after a disruption budget has refused an eviction; doubles each time."""
    max_backoff_seconds: float = Field(default=60.0, gt=0.0)
    """Longest of those pauses."""
    give_up_seconds: float = Field(default=900.0, gt=0.0)
    """An eviction that is refused for so long is given up and reported as blocked."""
    no_execute_taint: bool = False
    """Also set a taint that ends every pod of the node, whatever its budget."""
    event_seconds: int = Field(default=600, ge=1)
    """At most one Event for each object and reason in this time."""


class KubernetesConfig(Section):
    """Discovery of jobs, links to runs, election, state."""

    kubeconfig: str = ""
    """File to connect by; empty: the service account of this pod."""
    namespaces: tuple[str, ...] = Field(default=(), strict=False)
    """Namespaces in which jobs are looked for; empty: all."""
    job_labels: tuple[str, ...] = Field(default=names.JOB_LABELS, min_length=1, strict=False)
    """Keys of the labels that name the job of a pod; the first one that a pod has counts."""
    role_label: str = names.ROLE_LABEL
    """Only machines of one role are compared with each other."""
    pipeline_stage_label: str = names.PIPELINE_STAGE_LABEL
    """Machines of one pipeline-parallel stage are compared where the stage has enough of them."""
    own_namespace: str = ""
    """Namespace of lease and state; empty: that of this pod."""
    lease: str = "minder"
    """Name of the Lease by which several replicas choose the one that acts."""
    lease_seconds: int = Field(default=15, ge=3)
    """A leader that has not renewed the lease for so long has lost it."""
    state_config_map: str = "minder-state"
    """ConfigMap that keeps the state of the jobs between restarts."""
    actor_config_map: str = "minder-actor"
    """ConfigMap that keeps what was done to machines, and the breaker."""
    request_timeout_seconds: float = Field(default=10.0, gt=0.0)
    """Limit of one request to the API server."""
    page_size: int = Field(default=500, ge=1)
    """Objects in one page of a list."""
    link_runs: bool = True
    """Put an Event on the pods, an annotation on the workflow, an object under the run's root."""
    run_roots: tuple[str, ...] = Field(default=(), strict=False)
    """URIs below which alerts may be written. Pods name their root themselves, so the default
    allows none."""
    history_seconds: int = Field(default=86_400, ge=0)
    """How long ended pods stay in the table of machines and runs."""
