"""Whether a run that failed beside a faulty machine is started again, and starting it once.

It decides from what lies under the root and never from the state of a machine. What the new run
keeps away from is not decided here: its first stage reads the nodes that were named.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planish import store
from planish.base.errors import ObjectExists
from planish.records import layout
from planish.run.avoid import avoided
from planish.run.kubeflow import Runs, restart_name
from planish.run.lock import current_holder, hand_over
from planish.stages.report.facts import CANCELLED
from planish.store.documents import read_json

logger = logging.getLogger(__name__)

FAILED = ("FAILED", "ERROR")
"""Final states after which a restart may be due."""


@dataclass(frozen=True)
class Restarted:
    """What became of the restart."""

    decision: str
    """Why it was submitted, or not; for people."""
    run_id: str = ""
    """Run that was submitted."""
    nodes: tuple[str, ...] = ()
    """Nodes that were named in the failed run."""

    @property
    def words(self) -> str:
        """The decision and the run in one line of the report."""
        return f"{self.decision} {self.run_id}".strip()


def restart(
    root: str, state: str, max_restarts: int, connect: Callable[[], Runs]
) -> Restarted | None:
    """Submit a failed run again, with its own parameters, where a machine was named in it.

    The record of a restart is written before the run is submitted, and the name of that run is
    made of root and counter: a second attempt of the exit task finds both and adds nothing.

    Args:
        root: URI of the run.
        state: final state of the run.
        max_restarts: restarts on this root; 0 for none.
        connect: reaches the Kubeflow installation; asked only when a restart is due.

    Returns:
        What was decided; None where restarts are off or the run has not failed.
    """
    if max_restarts < 1 or state.upper() not in FAILED:
        return None
    run_id = os.environ.get("RUN_ID", "")
    if not run_id:
        return Restarted("not restarted: not in a cluster")
    nodes = tuple(node.name for node in avoided(root) if node.run_id == run_id)
    if not nodes:
        return Restarted("not restarted: no machine was named in this run")
    if store.exists(layout.stop_file(root)):
        return Restarted("not restarted: stop file", nodes=nodes)
    marks = [read_json(uri) for uri in store.list_uris(f"{layout.failed(root)}/")]
    if any(isinstance(mark, dict) and mark.get("run_id") == run_id for mark in marks):
        return Restarted("not restarted: a task failed for a reason that stays", nodes=nodes)
    runs = connect()
    facts = runs.facts(run_id)
    if facts.state in CANCELLED:
        return Restarted("not restarted: a person ended the run", nodes=nodes)
    counter = _claim(root, run_id, nodes, max_restarts)
    if not counter:
        return Restarted(f"not restarted: {max_restarts} restarts are spent", nodes=nodes)
    name = restart_name(root, counter, str(facts.parameters.get("preset", "")))
    existing = runs.find(name, facts.experiment_id)
    if existing:
        return Restarted("restarted before as run", existing, nodes)
    hand_over(root, current_holder())
    created = runs.create(name, facts)
    logger.info("restarted run=%s name=%s without=%s", created, name, ",".join(nodes))
    return Restarted("restarted as run", created, nodes)


def _claim(root: str, run_id: str, nodes: tuple[str, ...], limit: int) -> int:
    """Return the counter of the restart after this run; 0 when none is left."""
    for counter in range(1, limit + 1):
        uri = layout.restart_file(root, counter)
        record: Any = {"after": run_id, "nodes": list(nodes)}
        try:
            store.create(uri, json.dumps(record, sort_keys=True).encode())
        except ObjectExists:
            record = read_json(uri)
        if isinstance(record, dict) and record.get("after") == run_id:
            return counter
    return 0
