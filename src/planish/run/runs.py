"""What is asked of a Kubeflow installation, and the names that keep a run from being twice."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class RunFacts:
    """What is needed to start the same pipeline again."""

    experiment_id: str
    """Experiment of the run."""
    parameters: Mapping[str, Any]
    """Its run parameters."""
    service_account: str
    """Service account of its pods; empty for the default."""
    pipeline_root: str
    """Where artifacts of KFP go; empty for the default."""
    pipeline: Mapping[str, Any] = field(default_factory=dict)
    """Either `pipeline_version_reference` or `pipeline_spec`, as the API gave it."""
    state: str = ""
    """State of the run now, in the words of the API."""


class Runs(Protocol):
    """The runs of one Kubeflow installation."""

    def facts(self, run_id: str) -> RunFacts:
        """Return how a run was started."""

    def find(self, name: str, experiment_id: str) -> str:
        """Return the id of the run of that name; empty when there is none."""

    def create(self, name: str, facts: RunFacts) -> str:
        """Start a run and return its id."""


def connect() -> Runs:
    """Return the runs of the installation that this pod belongs to; takes a second, for imports."""
    from planish.run.kfp_runs import KfpRuns

    return KfpRuns()


def run_name(root: str, chain_index: int) -> str:
    """Return the name that marks the `chain_index`-th run on a root.

    Example:
        >>> run_name("s3://runs/a", 3)
        'planish-0ec2680505c3-003'
    """
    return f"{_prefix(root)}-{chain_index:03d}"


def restart_name(root: str, counter: int) -> str:
    """Return the name that marks the `counter`-th restart on a root.

    Example:
        >>> restart_name("s3://runs/a", 1)
        'planish-0ec2680505c3-restart-001'
    """
    return f"{_prefix(root)}-restart-{counter:03d}"


def _prefix(root: str) -> str:
    return f"planish-{hashlib.sha256(root.encode()).hexdigest()[:12]}"
