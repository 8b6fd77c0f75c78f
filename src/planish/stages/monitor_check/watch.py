"""Looks at one job again and again until it finds a fault or what is watched has ended."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from planish.base.errors import BackendUnavailable, ClusterError, ConfigError
from planish.minder.detect.result import Result

if TYPE_CHECKING:
    from planish.minder.act.kube.objects import JobInfo
    from planish.minder.detect.job_monitor import JobMonitor
    from planish.minder.service.config import ServiceSettings

logger = logging.getLogger(__name__)

OWN_STAGE = "monitor_check"


@dataclass
class Watched:
    """The last result of a watched job, and the number of calls."""

    result: Result | None = None
    """Of the last call; it holds the fault if there is one."""
    num_calls: int = 0
    num_failed: int = 0
    """Calls in which a server did not answer."""


def watch(
    settings: ServiceSettings,
    job: str,
    *,
    seconds: float,
    is_over: Callable[[], bool],
    sleep: Callable[[float], None] = time.sleep,
) -> Watched:
    """Look at a job in the interval of the configuration.

    A server that does not answer is no reason to fail: what is watched goes on without. Neither is
    a job with too few machines to compare, which is logged once; others may still join it.

    Args:
        settings: of the service.
        job: its name or key; empty for the job of this run.
        seconds: how long at most; 0 to look once.
        is_over: whether what is watched has ended.
        sleep: waits so many seconds.

    Raises:
        ConfigError: no such job, or no models.
    """
    from planish.minder.detect.job_monitor import JobMonitor, too_few_machines
    from planish.minder.service.build import models_of, pull_once

    models = models_of(settings)
    monitors: dict[str, JobMonitor] = {}
    watched, begun = Watched(), time.monotonic()
    interval = settings.minder.service.interval_seconds
    has_logged = False
    while True:
        watched.num_calls += 1
        try:
            info = find(settings, job)
            watched.result = too_few_machines(info.key, info.machines, settings.minder)
            if watched.result is None:
                if info.key not in monitors:
                    monitors[info.key] = JobMonitor(info.key, models, settings.minder)
                frame, board = pull_once(settings, info)
                watched.result = monitors[info.key].call(
                    frame, started=info.started, stages=dict(info.stages), board=board
                )
            elif not has_logged:
                has_logged = True
                logger.warning(
                    "nothing to compare job=%s machines=%d least=%d",
                    info.key,
                    len(info.machines),
                    settings.minder.detect.min_machines,
                )
        except (BackendUnavailable, ClusterError) as error:
            watched.num_failed += 1
            logger.warning("call failed job=%s error=%s", job, error)
        if watched.result is not None and watched.result.findings:
            return watched
        if is_over() or time.monotonic() - begun + interval > seconds:
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
    ours = [info for info in jobs if info.run_id == run_id and info.stage != OWN_STAGE]
    if not run_id or not ours:
        raise ClusterError(f"no pod of the run {run_id!r} works yet")
    return max(ours, key=lambda info: (len(info.machines), info.key))
