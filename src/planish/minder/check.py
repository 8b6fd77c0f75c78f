"""The monitor inside a program: watch one job until a fault, or search a recorded trace."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from planish import store
from planish.base.errors import BackendUnavailable, ClusterError, ConfigError
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import JobInfo
from planish.minder.detect.config import MinderConfig, minder_config
from planish.minder.detect.job_monitor import JobMonitor, too_few_machines
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.detect.result import Result
from planish.minder.lab.cases import Case, Truth
from planish.minder.lab.files import read_frame
from planish.minder.lab.replay import replay
from planish.minder.service.build import find_job, look, models_of, static_jobs
from planish.minder.service.config import ServiceSettings, service_settings

logger = logging.getLogger(__name__)


@dataclass
class Watched:
    """The last result of a watched job, and the number of calls."""

    result: Result
    """Result with the fault if there is one, else the result of the last call that had answers."""
    num_calls: int = 0
    num_failed: int = 0


def nothing(job: str) -> Result:
    """Return the result of a job before any call."""
    return Result(job, "skipped", 0, 0, 0, "default", 0.0, "euclidean")


def look_back(raw: Mapping[str, Any], trace: str, job: str) -> Result:
    """Return the first result with a fault in the trace at a URI, else the last result.

    `raw` are settings of the service; settings that a trace does not need are ignored.
    """
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
    result = nothing(frame.job)
    for call in replay(Case(frame, Truth()), models, config):
        result = call.result
        if result.findings:
            break
    return result


def watch(
    raw: Mapping[str, Any],
    job: str,
    *,
    own_stage: str,
    seconds: float,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Watched:
    """Call the detector for a job at the configured interval, until a fault, `is_over`, or
    `seconds`.

    A server that does not answer does not end the watch, and neither does a job with too few
    machines, since others may still join. Both are logged.
    """
    settings = service_settings(raw)
    models = models_of(settings)
    monitors: dict[str, JobMonitor] = {}
    watched, begun = Watched(nothing(job)), time.monotonic()
    interval = settings.service.interval_seconds
    has_logged = False
    while True:
        watched.num_calls += 1
        try:
            info = find(settings, job, own_stage)
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


def find(settings: ServiceSettings, job: str, own_stage: str) -> JobInfo:
    """Return the job with a name; without a name, the job of this run that has the most machines.

    Raises:
        ConfigError: there is no such job, or the settings list several.
        ClusterError: the API server refused the request or does not answer.
    """
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
    run_id = os.environ.get("RUN_ID", "")
    jobs = Cluster.connect(settings.kubernetes).jobs()
    ours = [info for info in jobs if info.run_id == run_id and info.stage != own_stage]
    if not run_id or not ours:
        raise ClusterError(f"no pod of the run {run_id!r} works yet")
    return max(ours, key=lambda info: (len(info.machines), info.key))
