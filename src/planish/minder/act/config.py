"""Configuration of what the monitor may do to machines; it does nothing unless told to."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from planish.base.config import Section

Mode = Literal["observe", "cordon", "evict"]


class ActConfig(Section):
    """Modes, guards, breaker. A namespace must opt in besides, by the label `minder/action`."""

    mode: Mode = "observe"
    """The most that is done anywhere."""
    dry_run: bool | Literal["server"] = True
    """True: say what would be done; "server": let the API server check it too; False: do it."""
    owner: str = Field(default="minder", min_length=1, max_length=63)
    """Marks nodes that this monitor cordoned; the same before and after a restart."""
    fresh_seconds: int = Field(default=180, ge=1)
    """A result whose last second is older proves nothing."""
    recheck: bool = True
    """A second call must confirm the machine before anything is done."""
    allow_without_spare: bool = False
    """Act although no other node could take the pods."""
    nodes_per_job: int = Field(default=1, ge=1)
    """At most so many in `job_seconds`."""
    job_seconds: int = Field(default=1800, ge=1)
    """See `nodes_per_job`."""
    nodes_per_cluster: int = Field(default=3, ge=1)
    """At most so many in `cluster_seconds`."""
    cluster_seconds: int = Field(default=3600, ge=1)
    """See `nodes_per_cluster`."""
    spacing_seconds: int = Field(default=600, ge=0)
    """Between two nodes anywhere."""
    max_nodes: int = Field(default=3, ge=1)
    """Cap in `cap_seconds`; using it up and wanting more opens the breaker."""
    max_node_share: float = Field(default=0.1, gt=0.0, le=1.0)
    """The same as a share of all GPU nodes, rounded up; the smaller cap holds."""
    cap_seconds: int = Field(default=3600, ge=1)
    """Window of both caps."""
    gpu_resource: str = "nvidia.com/gpu"
    """What a node must have to count for the share; empty for every node."""
    breaker_error_share: float = Field(default=0.5, gt=0.0, le=1.0)
    """More failed requests to the API server than this open the breaker."""
    breaker_seconds: int = Field(default=300, ge=1)
    """Window of that share."""
    breaker_min_requests: int = Field(default=5, ge=1)
    """Fewer requests in the window say nothing."""
    discard_seconds: int = Field(default=900, ge=0)
    """When the breaker is closed, older alerts are never acted upon."""
    backoff_seconds: float = Field(default=5.0, gt=0.0)
    """Before the first repetition of an eviction that a disruption budget refused; doubles."""
    max_backoff_seconds: float = Field(default=60.0, gt=0.0)
    """Longest of those pauses."""
    give_up_seconds: float = Field(default=900.0, gt=0.0)
    """After so long the eviction is given up and said to be blocked."""
    no_execute_taint: bool = False
    """Consent to a taint that ends every pod of the node, whatever its budget."""
    auto_uncordon_after_validation: str = ""
    """Label `key=value` that an external validator sets on a node that may serve again."""
    event_seconds: int = Field(default=600, ge=1)
    """At most one Event for each object and reason in this time."""

    @model_validator(mode="after")
    def _label(self) -> ActConfig:
        label = self.auto_uncordon_after_validation
        if label and not all(label.partition("=")):
            raise ValueError(f"`auto_uncordon_after_validation` must read key=value, got {label!r}")
        return self
