"""The monitor stage: looks for a faulty machine while another stage works, or in a recording.

A found fault does not fail the stage: it records the node under the root. Later runs on the root
avoid recorded nodes, if their pipeline does so.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

from planish import store
from planish.base.config import load_toml
from planish.minder.check import Watched, look_back, nothing, watch
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid, is_node_name
from planish.run.stage import Artifact, Context, Outcome, execute, is_stopped

logger = logging.getLogger(__name__)

STAGE = "monitor_check"


class CheckResult(NamedTuple):
    """Output parameters."""

    faulty_machine: str
    """Name of the node; empty for none."""


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    settings: str,
    trace: str,
    job: str,
    watch_seconds: int,
    result: Artifact,
    metrics: Artifact,
) -> CheckResult:
    """Look for a faulty machine; `components/monitor_check.py` describes the parameters."""
    root = root.rstrip("/")
    iteration = offset + number

    def work(_: Context) -> Outcome:
        if is_stopped(root, iteration):
            watched = Watched(nothing(job))
        else:
            raw = load_toml(store.read(settings), name=settings) if settings else {}
            if trace:
                watched = Watched(look_back(raw, trace, job), 1)
            else:
                done = layout.update(root, iteration)
                watched = watch(
                    raw,
                    job,
                    own_stage=STAGE,
                    seconds=float(watch_seconds),
                    is_over=lambda: store.exists(done),
                )
        machines = [finding.machine for finding in watched.result.findings if finding.machine]
        machine = machines[0] if machines else ""
        if machine and is_node_name(machine):
            # Following runs avoid the recorded node.
            avoid(root, AvoidedNode(machine, STAGE, os.environ.get("RUN_ID", ""), iteration))
        elif machine:
            # A recording may use any names; a run can only avoid nodes.
            logger.warning("not the name of a node machine=%s", machine)
        return Outcome(
            documents={"result": watched.result.to_json()},
            metrics={
                "num_findings": float(len(watched.result.findings)),
                "num_machines": float(watched.result.n_machines),
                "num_calls": float(watched.num_calls),
                "num_failed_calls": float(watched.num_failed),
            },
            values={"faulty_machine": machine},
        )

    digest, outputs = config_sha256, {"result": result, "metrics": metrics}
    outcome = execute(
        STAGE, work, root=root, config_sha256=digest, iteration=iteration, outputs=outputs
    )
    return CheckResult(str(outcome.values["faulty_machine"]))
