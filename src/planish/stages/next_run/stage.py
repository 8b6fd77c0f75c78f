"""The next stage: submit the following run of a chain, once.

It does not raise if the chain has ended, and does not wait for the submitted run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from planish import store
from planish.records import layout
from planish.run.chain import parse_chain, with_settings
from planish.run.kubeflow import KfpRuns, KubeflowRun, run_name
from planish.run.lock import current_holder, hand_over
from planish.run.stage import Context, Outcome, execute

logger = logging.getLogger(__name__)

Decision = Literal["submitted", "exists", "last run", "stop file", "not in a cluster"]


def run(root: str, config_sha256: str, chain_index: int, chain: str) -> None:
    """Submit the following run of the chain, once.

    `components/next_run.py` describes the parameters.
    """

    def work(context: Context) -> Outcome:
        decision = submit_next(context.root, chain_index, parse_chain(chain).runs)
        logger.info("next run decision=%s", decision.replace(" ", "-"))
        metrics = {"submitted": float(decision == "submitted"), "chain_index": float(chain_index)}
        return Outcome(metrics=metrics, already_done=decision == "exists")

    execute("next", work, root=root, config_sha256=config_sha256, outputs={})


def submit_next(
    root: str, chain_index: int, max_runs: int, connect: Callable[[], KfpRuns] = KfpRuns
) -> Decision:
    """Submit run `chain_index + 1` unless the chain ends here or that run exists.

    `connect` is called only if a run is due: the import of Kubeflow's client takes a second.
    """
    run_id = os.environ.get("RUN_ID", "")
    if chain_index + 1 >= max_runs:
        return "last run"
    if store.exists(layout.stop_file(root)):
        return "stop file"
    if not run_id:
        return "not in a cluster"
    runs = connect()
    facts = runs.facts(run_id)
    name = run_name(root, chain_index + 1, str(facts.parameters.get("preset", "")))
    chain = with_settings(str(facts.parameters.get("chain", "")), index=chain_index + 1)
    parameters = {**facts.parameters, "chain": chain}
    _, is_new = submit_once(runs, root, name, replace(facts, parameters=parameters))
    return "submitted" if is_new else "exists"


def submit_once(runs: KfpRuns, root: str, name: str, facts: KubeflowRun) -> tuple[str, bool]:
    """Start a run unless one with this name exists; return its id, and whether it is new.

    First the lock is handed over: the new run may start while this one still writes its report.
    """
    hand_over(root, current_holder())
    if existing := runs.find(name, facts.experiment_id):
        return existing, False
    created = runs.create(name, facts)
    logger.info("submitted run=%s name=%s", created, name)
    return created, True
