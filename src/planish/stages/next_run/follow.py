"""Whether the following run of a chain is due, and submitting it once.

It never raises for a chain that has ended; it does not wait for the run that it submits.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Literal

from planish.run.runs import Runs, run_name

logger = logging.getLogger(__name__)

Decision = Literal["submitted", "exists", "last run", "stop file", "not in a cluster"]


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
    created = runs.create(name, replace(facts, parameters=parameters))
    logger.info("submitted run=%s name=%s chain_index=%d", created, name, chain_index + 1)
    return Following("submitted", created)
