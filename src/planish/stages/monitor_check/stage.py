"""The monitor stage: looks for a faulty machine while another stage works, or in a recording.

A fault does not fail it. It is written down under the root: runs that are set to keep away from
machines that were named do so from their start on.
"""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from planish import store
from planish.base.config import load_toml
from planish.minder.detect.result import Result
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid, is_node_name
from planish.run.stage import Artifact, Context, Outcome, execute, is_stopped

logger = logging.getLogger(__name__)


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
    """Look for a faulty machine.

    Args:
        root: URI of the run.
        config_sha256: digest of the resolved configuration.
        number: iteration within this run, from 1.
        offset: iterations before this run.
        settings: URI of the monitor's TOML; empty for what is built in, which a trace needs only.
        trace: URI of a recorded trace (npz, CSV or Parquet) to look at; empty for Prometheus.
        job: name of the job; empty for that of this run.
        watch_seconds: how long to look while the iteration trains; 0 for once.
        result: gets the result object as JSON.
        metrics: gets counts.
    """
    root = root.rstrip("/")
    iteration = offset + number

    def work(_: Context) -> Outcome:
        if is_stopped(root, iteration):
            return _outcome(_nothing(job), 0, 0)
        raw = load_toml(store.read(settings), name=settings) if settings else {}
        if trace:
            outcome = _outcome(_look_back(raw, trace, job), 1, 0)
        else:
            outcome = _look_on(raw, job, root, iteration, float(watch_seconds))
        machine = str(outcome.values["faulty_machine"])
        if machine and is_node_name(machine):
            # Following runs keep away from it.
            run_id = os.environ.get("RUN_ID", "")
            avoid(root, AvoidedNode(machine, "monitor_check", run_id, iteration))
        elif machine:
            # A recording may name machines as it likes; what is no node can not be kept away from.
            logger.warning("not the name of a node machine=%s", machine)
        return outcome

    outcome = execute(
        "monitor_check",
        work,
        root=root,
        config_sha256=config_sha256,
        outputs={"result": result, "metrics": metrics},
        iteration=iteration,
    )
    return CheckResult(str(outcome.values["faulty_machine"]))


def _look_back(raw: dict[str, Any], trace: str, job: str) -> Result:
    """Return the first result with a fault of a recorded trace, else the last one."""
    from dataclasses import replace

    from planish.minder.detect.config import MinderConfig, minder_config
    from planish.minder.detect.model_files import default_models, load_models
    from planish.minder.lab.files import read_frame
    from planish.minder.lab.replay import replay

    config = minder_config({k: v for k, v in raw.items() if k in MinderConfig.model_fields})
    folder = raw.get("models", {}).get("folder", "")
    models = load_models(
        Path(folder) if folder else default_models(), config.denoise, config.detect.metrics
    )
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / trace.rpartition("/")[2]
        store.read_file(trace, path)
        frame = read_frame(path)
    frame = replace(frame, job=job or frame.job)
    result = _nothing(frame.job)
    for call in replay(frame, models, config):
        result = call.result
        if result.findings:
            break
    return result


def _look_on(
    raw: dict[str, Any], job: str, root: str, iteration: int, watch_seconds: float
) -> Outcome:
    """Look at the job until a fault, the end of the update or the end of the time."""
    from planish.minder.service.config import service_settings
    from planish.stages.monitor_check.watch import watch

    done = layout.update(root, iteration)
    watched = watch(
        service_settings(raw),
        job,
        seconds=watch_seconds,
        is_over=lambda: store.exists(done),
    )
    return _outcome(watched.result or _nothing(job), watched.num_calls, watched.num_failed)


def _nothing(job: str) -> Result:
    return Result(job, "skipped", 0, 0, 0, "default", 0.0, "euclidean")


def _outcome(result: Result, num_calls: int, num_failed: int) -> Outcome:
    machines = [finding.machine for finding in result.findings if finding.machine]
    return Outcome(
        documents={"result": result.to_json()},
        metrics={
            "num_findings": float(len(result.findings)),
            "num_machines": float(result.n_machines),
            "num_calls": float(num_calls),
            "num_failed_calls": float(num_failed),
        },
        values={"faulty_machine": machines[0] if machines else ""},
    )
