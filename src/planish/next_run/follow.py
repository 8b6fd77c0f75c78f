"""Whether the following run of a chain is due, and submitting it once.

It never raises for a chain that has ended; it does not wait for the run that it submits.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

logger = logging.getLogger(__name__)

Decision = Literal["submitted", "exists", "last run", "stop file", "not in a cluster"]


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


class Runs(Protocol):
    """The runs of one Kubeflow installation."""

    def facts(self, run_id: str) -> RunFacts:
        """Return how a run was started."""

    def find(self, name: str, experiment_id: str) -> str:
        """Return the id of the run of that name; empty when there is none."""

    def create(self, name: str, facts: RunFacts) -> str:
        """Start a run and return its id."""


def run_name(root: str, chain_index: int) -> str:
    """Return the name that marks the `chain_index`-th run on a root.

    Example:
        >>> run_name("s3://runs/a", 3)
        'planish-d09ae9a9f021-003'
    """
    return f"planish-{hashlib.sha256(root.encode()).hexdigest()[:12]}-{chain_index:03d}"


@dataclass(frozen=True)
class Following:
    """What became of the following run."""

    decision: Decision
    """Why it was submitted, or not."""
    run_id: str = ""
    """Its id where it exists."""


def follow(
    runs: Runs | None,
    *,
    root: str,
    run_id: str,
    chain_index: int,
    max_runs: int,
    is_stopped: bool,
) -> Following:
    """Submit run `chain_index + 1` unless the chain ends here or the run exists already.

    Args:
        runs: the Kubeflow installation; None outside one.
        root: URI of the run.
        run_id: id of the present run; empty outside a cluster.
        chain_index: place of the present run.
        max_runs: runs of the chain.
        is_stopped: an operator has ended the chain.
    """
    if chain_index + 1 >= max_runs:
        return Following("last run")
    if is_stopped:
        return Following("stop file")
    if runs is None or not run_id:
        return Following("not in a cluster")
    facts = runs.facts(run_id)
    name = run_name(root, chain_index + 1)
    found = runs.find(name, facts.experiment_id)
    if found:
        return Following("exists", found)
    parameters = {**facts.parameters, "chain_index": chain_index + 1}
    created = runs.create(
        name,
        RunFacts(
            *(facts.experiment_id, parameters, facts.service_account, facts.pipeline_root),
            pipeline=facts.pipeline,
        ),
    )
    logger.info("submitted run=%s name=%s chain_index=%d", created, name, chain_index + 1)
    return Following("submitted", created)
