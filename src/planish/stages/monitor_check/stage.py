"""The monitor stage: looks for a faulty machine while another stage works, or in a recording.

A fault does not fail it. It is written down under the root: runs that are set to keep away from
machines that were named do so from their start on.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from planish import store
from planish.base.config import load_toml
from planish.base.errors import BackendUnavailable, ClusterError, ConfigError
from planish.minder.detect.result import Result
from planish.records import layout
from planish.run.avoid import AvoidedNode, avoid, is_node_name
from planish.run.stage import Artifact, Context, Outcome, execute, is_stopped

if TYPE_CHECKING:
    from planish.minder.act.kube.objects import JobInfo
    from planish.minder.detect.job_monitor import JobMonitor
    from planish.minder.service.config import ServiceSettings

logger = logging.getLogger(__name__)

STAGE = "monitor_check"


class CheckResult(NamedTuple):
    """Output parameters."""

    faulty_machine: str
    """Name of the node; empty for none."""


@dataclass
class Watched:
    """The last result of a watched job, and the number of calls."""

    result: Result
    """The fault, if there is one; else that of the last call whose servers answered."""
    num_calls: int = 0
    num_failed: int = 0


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
    """Look for a faulty machine; `components/monitor_check.py` says what the parameters are."""
    root = root.rstrip("/")
    iteration = offset + number

    def work(_: Context) -> Outcome:
        if is_stopped(root, iteration):
            watched = Watched(_nothing(job))
        else:
            raw = load_toml(store.read(settings), name=settings) if settings else {}
            if trace:
                watched = Watched(_look_back(raw, trace, job), 1)
            else:
                from planish.minder.service.config import service_settings

                done = layout.update(root, iteration)
                watched = watch(
                    service_settings(raw),
                    job,
                    seconds=float(watch_seconds),
                    is_over=lambda: store.exists(done),
                )
        machines = [finding.machine for finding in watched.result.findings if finding.machine]
        machine = machines[0] if machines else ""
        if machine and is_node_name(machine):
            # Following runs keep away from it.
            avoid(root, AvoidedNode(machine, STAGE, os.environ.get("RUN_ID", ""), iteration))
        elif machine:
            # A recording may name machines as it likes; what is no node can not be kept away from.
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


def _nothing(job: str) -> Result:
    return Result(job, "skipped", 0, 0, 0, "default", 0.0, "euclidean")


def _look_back(raw: dict[str, Any], trace: str, job: str) -> Result:
    from planish.minder.detect.config import MinderConfig, minder_config
    from planish.minder.detect.model_files import default_models, load_models
    from planish.minder.lab.cases import Case, Truth
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
    for call in replay(Case(frame, Truth()), models, config):
        result = call.result
        if result.findings:
            break
    return result


def watch(
    settings: ServiceSettings,
    job: str,
    *,
    seconds: float,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Watched:
    """Look at a job in the interval of the configuration until a fault, the end or `seconds`.

    A server that does not answer is no reason to fail: what is watched goes on without. Neither is
    a job with too few machines to compare, which is logged once; others may still join it.
    """
    from planish.minder.detect.job_monitor import JobMonitor, too_few_machines
    from planish.minder.service.build import look, models_of

    models = models_of(settings)
    monitors: dict[str, JobMonitor] = {}
    watched, begun = Watched(_nothing(job)), time.monotonic()
    interval = settings.service.interval_seconds
    has_logged = False
    while True:
        watched.num_calls += 1
        try:
            info = find(settings, job)
            few = too_few_machines(info.key, info.machines, settings)
            if few is None:
                if info.key not in monitors:
                    monitors[info.key] = JobMonitor(info.key, models, settings)
                watched.result = look(monitors[info.key], settings, info)
            else:
                watched.result = few
                if not has_logged:
                    has_logged = True
                    least = settings.detect.min_machines
                    words = "nothing to compare job=%s machines=%d least=%d"
                    logger.warning(words, info.key, len(info.machines), least)
        except (BackendUnavailable, ClusterError) as error:
            watched.num_failed += 1
            logger.warning("call failed job=%s error=%s", job, error)
        if watched.result.findings or is_over() or time.monotonic() - begun + interval > seconds:
            return watched
        sleep(interval)


def find(settings: ServiceSettings, job: str) -> JobInfo:
    """Return the job that is named, or that of this run with the most machines.

    Raises:
        ConfigError: there is none, or the settings list several.
        ClusterError: the API server refused or does not answer.
    """
    from planish.minder.service.build import find_job, static_jobs

    if job:
        return find_job(settings, job)
    if settings.kubernetes is None:
        jobs = static_jobs(settings)
        if len(jobs) != 1:
            raise ConfigError(
                "`job` must be named unless the settings list exactly one, got "
                f"{[info.name for info in jobs]}"
            )
        return jobs[0]
    from planish.minder.act.kube.cluster import Cluster

    run_id = os.environ.get("RUN_ID", "")
    jobs = Cluster.connect(settings.kubernetes).jobs()
    ours = [info for info in jobs if info.run_id == run_id and info.stage != STAGE]
    if not run_id or not ours:
        raise ClusterError(f"no pod of the run {run_id!r} works yet")
    return max(ours, key=lambda info: (len(info.machines), info.key))
