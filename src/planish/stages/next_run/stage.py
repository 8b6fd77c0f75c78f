"""The next stage: submit the following run of a chain, once.

It never raises for a chain that has ended; it does not wait for the run that it submits.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, replace
from typing import Literal

from planish import store
from planish.records import layout
from planish.run.chain import parse_chain, with_settings
from planish.run.kubeflow import KfpRuns, Runs, run_name
from planish.run.lock import current_holder, hand_over
from planish.run.stage import Context, Outcome, execute

logger = logging.getLogger(__name__)


Decision = Literal["submitted", "exists", "last run", "stop file", "not in a cluster"]


@dataclass(frozen=True)
class Following:
    """What became of the following run."""

    decision: Decision
    """Why it was submitted, or not."""
    run_id: str = ""
    """Its id where it exists."""


def run(root: str, config_sha256: str, chain_index: int, chain: str) -> None:
    """Submit the following run of the chain, once.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        chain_index: place of the present run in its chain.
        chain: run parameter of that name, the JSON of `planish.run.chain.Chain`.
    """
    execute(
        "next",
        lambda context: submit_next(context, chain_index, parse_chain(chain).runs),
        root=root,
        config_sha256=config_sha256,
        outputs={},
    )


def submit_next(context: Context, chain_index: int, max_runs: int) -> Outcome:
    """Connect to Kubeflow where a following run is due, and submit it."""
    run_id = os.environ.get("RUN_ID", "")
    is_stopped = store.exists(layout.stop_file(context.root))
    # Connecting imports the client of Kubeflow, which takes a second: only when a run is due.
    is_due = bool(run_id) and chain_index + 1 < max_runs and not is_stopped
    if is_due:
        # The following run may begin while the exit task of this one still writes its report.
        hand_over(context.root, current_holder())
    following = follow(
        KfpRuns() if is_due else None,
        root=context.root,
        run_id=run_id,
        chain_index=chain_index,
        max_runs=max_runs,
        is_stopped=is_stopped,
    )
    logger.info("next run decision=%s", following.decision.replace(" ", "-"))
    return Outcome(
        metrics={
            "submitted": float(following.decision == "submitted"),
            "chain_index": float(chain_index),
        },
        already_done=following.decision == "exists",
    )


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
    name = run_name(root, chain_index + 1, str(facts.parameters.get("preset", "")))
    existing = runs.find(name, facts.experiment_id)
    if existing:
        return Following("exists", existing)
    chain = with_settings(str(facts.parameters.get("chain", "")), index=chain_index + 1)
    parameters = {**facts.parameters, "chain": chain}
    created = runs.create(name, replace(facts, parameters=parameters))
    logger.info("submitted run=%s name=%s chain_index=%d", created, name, chain_index + 1)
    return Following("submitted", created)
