"""Restart, once, a run that failed after a faulty machine was named in it.

The decision depends on records under the root, never on the state of a machine. The first stage of
the new run reads the named nodes and avoids them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from planish import store
from planish.base.errors import ObjectExists
from planish.records import layout
from planish.run.avoid import avoided
from planish.run.kubeflow import CANCELLED, KfpRuns, restart_name
from planish.stages.next_run.stage import submit_once
from planish.store.documents import read_json, write_json

FAILED = ("FAILED", "ERROR")
"""Final states after which a restart may be due."""


def restart(
    root: str, state: str, max_restarts: int, connect: Callable[[], KfpRuns] = KfpRuns
) -> str:
    """Submit a failed run again, with its own parameters, if a machine was named in it.

    The record of the restart is written before the submission, and the new run's name contains root
    and counter: a second attempt of the exit task finds both and submits nothing.

    Returns:
        Decision in words; empty if restarts are off or the run has not failed.
    """
    if max_restarts < 1 or state.upper() not in FAILED:
        return ""
    run_id = os.environ.get("RUN_ID", "")
    if not run_id:
        return "not restarted: not in a cluster"
    nodes = [node.name for node in avoided(root) if node.run_id == run_id]
    if not nodes:
        return "not restarted: no machine was named in this run"
    if store.exists(layout.stop_file(root)):
        return "not restarted: stop file"
    marks = [read_json(uri) for uri in store.list_uris(f"{layout.failed(root)}/")]
    if any(mark.get("run_id") == run_id for mark in marks):
        return "not restarted: a task failed for a reason that stays"
    runs = connect()
    facts = runs.facts(run_id)
    if facts.state in CANCELLED:
        return "not restarted: a person ended the run"
    counter = _claim(root, run_id, nodes, max_restarts)
    if not counter:
        return f"not restarted: {max_restarts} restarts are spent"
    name = restart_name(root, counter, str(facts.parameters.get("preset", "")))
    created, is_new = submit_once(runs, root, name, facts)
    return f"{'restarted' if is_new else 'restarted before'} as run {created}"


def _claim(root: str, run_id: str, nodes: list[str], limit: int) -> int:
    """Return the counter of the restart after this run; 0 if no restart is left."""
    for counter in range(1, limit + 1):
        uri = layout.restart_file(root, counter)
        record = {"after": run_id, "nodes": nodes}
        try:
            write_json(uri, record, over="")
        except ObjectExists:
            record = read_json(uri)
        if record.get("after") == run_id:
            return counter
    return 0
