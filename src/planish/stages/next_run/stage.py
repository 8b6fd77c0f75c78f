"""The next stage: open, ask, submit."""

from __future__ import annotations

import logging
import os

from planish.records import layout
from planish.run.lock import current_holder, hand_over
from planish.run.runs import connect
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.next_run.follow import follow
from planish.store import open_store

logger = logging.getLogger(__name__)


def run(root: str, config_sha256: str, chain_index: int, max_runs: int, metrics: Artifact) -> None:
    """Submit the following run of the chain, once.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        chain_index: place of the present run in its chain.
        max_runs: runs of the chain.
        metrics: gets whether a run was submitted.
    """
    execute(
        "next",
        lambda context: _work(context, chain_index, max_runs),
        root=root,
        config_sha256=config_sha256,
        outputs={"metrics": metrics},
    )


def _work(context: Context, chain_index: int, max_runs: int) -> Outcome:
    run_id = os.environ.get("RUN_ID", "")
    is_stopped = open_store(context.root).exists(layout.stop_file(context.root))
    # Connecting imports the client of Kubeflow, which takes a second: only when a run is due.
    is_due = bool(run_id) and chain_index + 1 < max_runs and not is_stopped
    if is_due:
        # The following run may begin while the exit task of this one still writes its report.
        hand_over(context.root, current_holder())
    following = follow(
        connect() if is_due else None,
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
