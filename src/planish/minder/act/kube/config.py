"""Configuration of what the monitor reads from Kubernetes and where it leaves its traces."""

from __future__ import annotations

from pydantic import Field

from planish.base.config import Section
from planish.minder.act.kube import names


class KubernetesConfig(Section):
    """Discovery of jobs, links to runs, election, state."""

    kubeconfig: str = ""
    """File to connect by; empty for the service account of this pod."""
    namespaces: tuple[str, ...] = Field(default=(), strict=False)
    """Where jobs are looked for; empty for everywhere."""
    job_labels: tuple[str, ...] = Field(default=names.JOB_LABELS, min_length=1, strict=False)
    """Label keys that name the job of a pod; the first one that a pod has counts."""
    role_label: str = names.ROLE_LABEL
    """Machines of one role are compared with each other only."""
    pipeline_stage_label: str = names.PIPELINE_STAGE_LABEL
    """Machines of one stage of pipeline parallelism are compared where there are enough."""
    own_namespace: str = ""
    """Namespace of lease and state; empty for that of this pod."""
    lease: str = "minder"
    """Name of the Lease by which several replicas choose one that acts."""
    lease_seconds: int = Field(default=15, ge=3)
    """A leader that has not renewed for so long has lost its place."""
    state_config_map: str = "minder-state"
    """ConfigMap that holds the state of the jobs between restarts."""
    actor_config_map: str = "minder-actor"
    """ConfigMap that holds what was done to machines, and the breaker."""
    request_timeout_seconds: float = Field(default=10.0, gt=0.0)
    """For one request to the API server."""
    page_size: int = Field(default=500, ge=1)
    """Objects of one page of a list."""
    link_runs: bool = True
    """Leave an Event on the pods, an annotation on the workflow and an object under the root."""
    run_roots: tuple[str, ...] = Field(default=(), strict=False)
    """URIs below which alerts may be written; pods name their root themselves, so none by
    default."""
    history_seconds: int = Field(default=86_400, ge=0)
    """How long pods that have ended stay in the table of machines and runs."""
