"""Puts the service together from its configuration, and does single calls with the same parts."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from planish.base.errors import ConfigError
from planish.minder.act.kube.objects import JobInfo
from planish.minder.detect.denoise import Models
from planish.minder.detect.frame import Frame
from planish.minder.detect.job_monitor import JobMonitor
from planish.minder.detect.model_files import default_models, load_models, read_facts
from planish.minder.detect.result import Result
from planish.minder.lab.cases import Case, Truth
from planish.minder.service.alertmanager import Alertmanager
from planish.minder.service.config import ServiceSettings
from planish.minder.service.http_client import Deadline
from planish.minder.service.job import Surroundings
from planish.minder.service.own_metrics import OwnMetrics
from planish.minder.service.prometheus import Prometheus
from planish.minder.service.prometheus_pull import Puller
from planish.minder.service.prometheus_query import queries_of
from planish.minder.service.service import Service
from planish.minder.service.state import FileState, StateStore

if TYPE_CHECKING:
    from planish.minder.act.kube.client import Cluster
    from planish.minder.act.types import ActedAlert

logger = logging.getLogger(__name__)


def models_folder(settings: ServiceSettings) -> Path:
    """Return where the models lie."""
    return Path(settings.models.folder) if settings.models.folder else default_models()


def models_of(settings: ServiceSettings) -> Models:
    """Load the models of all metrics.

    Raises:
        ConfigError: one is missing or damaged; names its file.
    """
    minder = settings.minder
    return load_models(models_folder(settings), minder.denoise, minder.detect.metrics)


def check_queries(settings: ServiceSettings, prometheus: Prometheus, deadline: Deadline) -> None:
    """Have Prometheus parse all queries.

    Raises:
        ConfigError: it does not take one; names the key.
        BackendUnavailable: it can not be asked.
    """
    for name, source in settings.sources.items():
        queries = queries_of(source, ["none"], settings.prometheus.series_labels, 5)
        for query in (queries.values, queries.seen, queries.resets):
            if query:
                prometheus.check(query, f"metrics.{name}.promql", deadline)


def static_jobs(settings: ServiceSettings) -> list[JobInfo]:
    """Return the jobs that the configuration names."""
    return [
        JobInfo(
            *(job.name, job.namespace, tuple(sorted(set(job.machines)))),
            stages=dict(job.stages),
            started=job.started,
        )
        for job in settings.jobs
    ]


def find_job(settings: ServiceSettings, name: str) -> JobInfo:
    """Return a job by its name or by its key, from the configuration or from Kubernetes.

    Raises:
        ConfigError: there is none, or there are several.
    """
    jobs = static_jobs(settings)
    if settings.kubernetes is not None:
        from planish.minder.act.kube.client import Cluster

        jobs += Cluster.connect(settings.kubernetes).jobs()
    found = [job for job in jobs if name in (job.key, job.name)]
    exact = [job for job in found if job.key == name]
    if len(exact or found) != 1:
        raise ConfigError(
            f"`--job` must name one job, got {name!r}, which fits "
            f"{[job.key for job in found] or 'none'}; there are {sorted(j.key for j in jobs)[:20]}"
        )
    return (exact or found)[0]


def pull_once(
    settings: ServiceSettings, job: JobInfo, *, end: int | None = None
) -> tuple[Frame, str]:
    """Return the newest frame of a job, or the one that ends before `end`, and its board model.

    Raises:
        BackendUnavailable: Prometheus does not answer as it must.
    """
    service = settings.minder.service
    puller = Puller(Prometheus(settings.prometheus), settings.sources, job.key)
    deadline = Deadline.after(service.call_timeout_seconds)
    frame = puller.pull(job.machines, service.window_seconds, deadline, end=end)
    board = puller.board(job.machines, deadline, end=end) if settings.minder.boards else ""
    return frame, board


def record(
    settings: ServiceSettings,
    name: str,
    seconds: int,
    *,
    end: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Case:
    """Return what Prometheus has of a job, of which nothing bad is known.

    Args:
        settings: of the service.
        name: of the job.
        seconds: how long; they are pulled in the pieces that calls pull.
        end: unix seconds; None for now.
        progress: called with the seconds that have been pulled.

    Raises:
        ConfigError: no such job, or there is no sample of it.
        BackendUnavailable: Prometheus does not answer as it must.
    """
    job, service = find_job(settings, name), settings.minder.service
    prometheus = Prometheus(settings.prometheus)
    puller = Puller(prometheus, settings.sources, job.key)
    if end is None:
        now = prometheus.now(Deadline.after(service.call_timeout_seconds))
        end = int(now) - settings.prometheus.delay_seconds + 1
    pieces = []
    for start in range(end - seconds, end, service.window_seconds):
        stop = min(end, start + service.window_seconds)
        deadline = Deadline.after(service.call_timeout_seconds)
        pieces.append(puller.pull(job.machines, stop - start, deadline, end=stop))
        if progress:
            progress(stop - end + seconds)
    values = {
        metric: np.concatenate([piece.values[metric] for piece in pieces])
        for metric in pieces[0].values
    }
    values = {metric: array for metric, array in values.items() if np.isfinite(array).any()}
    if not values:
        raise ConfigError(
            f"`--job` must name a job with samples in the {seconds} s before {end}, got none of "
            f"{sorted(settings.sources)} for {job.key!r}; check the queries with validate-config"
        )
    frame = Frame(job.key, np.concatenate([p.ts for p in pieces]), pieces[0].machines, values)
    board = puller.board(job.machines, Deadline.after(service.call_timeout_seconds), end=end)
    return Case(frame, Truth(), dict(job.stages), name=job.key, board=board)


def run_once(settings: ServiceSettings, name: str, *, end: int | None = None) -> Result:
    """Look at a job once, as the service would in its first call.

    Args:
        settings: of the service.
        name: of the job.
        end: unix seconds; None for now.

    Raises:
        ConfigError: no such job, or no models.
        BackendUnavailable: Prometheus does not answer as it must.
    """
    job = find_job(settings, name)
    monitor = JobMonitor(job.key, models_of(settings), settings.minder)
    frame, board = pull_once(settings, job, end=end)
    return monitor.call(frame, started=job.started, stages=dict(job.stages), board=board)


def state_of(
    settings: ServiceSettings, part: Literal["jobs", "actor"] = "jobs"
) -> StateStore | None:
    """Return where a part of the state is kept: a file, else a ConfigMap, else nowhere."""
    if settings.server.state_file:
        path = Path(settings.server.state_file)
        return FileState(path if part == "jobs" else path.with_name(f"{path.name}.actor"))
    if settings.kubernetes is not None:
        from planish.minder.act.kube.client import Cluster
        from planish.minder.act.kube.state import ConfigMapState

        config = settings.kubernetes
        name = config.state_config_map if part == "jobs" else config.actor_config_map
        return ConfigMapState(Cluster.connect(config), name)
    return None


def build(settings: ServiceSettings, stop: threading.Event | None = None) -> Service:
    """Return the service, ready to start.

    Raises:
        ConfigError: something that it was told can not be.
    """
    models, metrics = models_of(settings), OwnMetrics()
    _tell_models(settings, models, metrics)
    prometheus = Prometheus(settings.prometheus)
    alertmanager = Alertmanager(settings.alertmanager) if settings.alertmanager.url else None
    around = Surroundings(
        settings.minder,
        models,
        metrics,
        notifier=alertmanager if settings.alertmanager.send else None,
        is_dry_run=bool(settings.act.dry_run) or settings.act.mode == "observe",
        min_backoff_seconds=settings.server.min_backoff_seconds,
        max_backoff_seconds=settings.server.max_backoff_seconds,
        stop=stop or threading.Event(),
    )
    metrics.follow(prometheus.counts.errors)

    def source_of(info: JobInfo) -> Puller:
        puller = Puller(prometheus, settings.sources, info.key)
        metrics.follow_duplicates(info.key, puller.counts.duplicates)
        return puller

    parts: dict[str, Any] = {
        "source_of": source_of,
        "probe": prometheus.now,
        "state": state_of(settings),
        "actor_state": state_of(settings, "actor"),
    }
    if settings.kubernetes is None:
        return Service(settings, around, jobs=lambda: static_jobs(settings), **parts)
    return _in_cluster(settings, around, alertmanager, parts)


def _in_cluster(
    settings: ServiceSettings,
    around: Surroundings,
    alertmanager: Alertmanager | None,
    parts: dict[str, Any],
) -> Service:
    """Return the service with jobs of Kubernetes, an actor and, if wanted, an election."""
    from planish.minder.act.actor import Actor
    from planish.minder.act.kube.client import Cluster
    from planish.minder.act.kube.lease import Lease

    assert settings.kubernetes is not None
    cluster: Cluster = Cluster.connect(settings.kubernetes)
    lease = None
    if settings.server.leader_election:
        identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        lease = Lease(cluster, identity)
    actor = Actor(
        cluster,
        settings.act,
        is_leader=lease.is_leader if lease else lambda: True,
        is_silenced=_silences(settings, around, alertmanager),
    )
    around.actor = actor

    def jobs() -> Sequence[JobInfo]:
        return [*static_jobs(settings), *actor.jobs(int(time.time()))]

    return Service(settings, around, jobs=jobs, leader=lease, keeper=actor, **parts)


def _silences(
    settings: ServiceSettings, around: Surroundings, alertmanager: Alertmanager | None
) -> Callable[[ActedAlert], bool]:
    """Return what asks Alertmanager whether people have silenced an alert."""

    def is_silenced(alert: ActedAlert) -> bool:
        if alertmanager is None or not settings.alertmanager.honour_silences:
            return False
        found = alertmanager.silence(alert, Deadline.after(10.0, around.stop))
        if found:
            logger.info("silenced alert=%s silence=%s", alert.id, found)
        return bool(found)

    return is_silenced


def _tell_models(settings: ServiceSettings, models: Models, metrics: OwnMetrics) -> None:
    for name, one in models.denoisers.items():
        metrics.model(name, one.version, one.quality, one.name)
        if settings.minder.denoise.denoiser != "none":
            facts = read_facts(models_folder(settings), name)
            metrics.model_error(name, facts.mse_held_out)
