"""Builds the service from its configuration; runs single calls with the same parts."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from planish.base.errors import ConfigError
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.lease import Lease
from planish.minder.act.kube.objects import JobInfo
from planish.minder.detect.denoise import Models
from planish.minder.detect.job_monitor import JobMonitor
from planish.minder.detect.model_files import default_models, load_models
from planish.minder.detect.result import Result
from planish.minder.service.alertmanager import Alertmanager, AlertmanagerConfig
from planish.minder.service.config import ServiceSettings
from planish.minder.service.http import Deadline
from planish.minder.service.job import Shared
from planish.minder.service.own_metrics import OwnMetrics
from planish.minder.service.prometheus import Prometheus, queries_of
from planish.minder.service.pull import Puller
from planish.minder.service.service import Service
from planish.minder.service.state import ConfigMapState, FileState, StateStore

logger = logging.getLogger(__name__)


def models_of(settings: ServiceSettings) -> Models:
    """Return the models of all metrics: the site's models, or the models that come with the
    package.
    """
    folder = Path(settings.models.folder) if settings.models.folder else default_models()
    return load_models(folder, settings.denoise, settings.detect.metrics)


def check_queries(settings: ServiceSettings, prometheus: Prometheus, deadline: Deadline) -> None:
    """Let Prometheus parse all queries.

    Raises:
        ConfigError: Prometheus refuses a query; the message names its key.
    """
    for name, source in settings.sources.items():
        queries = queries_of(source, ["none"], settings.prometheus.series_labels, 5)
        for query in (queries.values, queries.seen, queries.resets):
            if query:
                prometheus.check(query, f"metrics.{name}.promql", deadline)


def static_jobs(settings: ServiceSettings) -> list[JobInfo]:
    """Return the jobs that the configuration lists."""
    return [
        JobInfo(j.name, j.namespace, tuple(sorted(set(j.machines))), j.stages, j.started)
        for j in settings.jobs
    ]


def find_job(settings: ServiceSettings, name: str) -> JobInfo:
    """Return the job with a name or key, from the configuration or from Kubernetes."""
    jobs = static_jobs(settings)
    if settings.kubernetes is not None:
        jobs += Cluster.connect(settings.kubernetes).jobs()
    named = [job for job in jobs if name in (job.key, job.name)]
    fitting = [job for job in named if job.key == name] or named
    if len(fitting) != 1:
        raise ConfigError(
            f"`--job` must name one job, got {name!r}, which fits "
            f"{[job.key for job in named] or 'none'}; there are {sorted(j.key for j in jobs)[:20]}"
        )
    return fitting[0]


def look(
    monitor: JobMonitor, settings: ServiceSettings, job: JobInfo, *, end: int | None = None
) -> Result:
    """Return the result for the newest frame of a job, or for the frame that ends before `end`.

    Raises:
        BackendUnavailable: Prometheus gives no valid answer.
    """
    service = settings.service
    puller = Puller(Prometheus(settings.prometheus), settings.sources, job.key)
    deadline = Deadline.after(service.call_timeout_seconds)
    frame = puller.pull(job.machines, service.window_seconds, deadline, end=end)
    return monitor.call(
        frame,
        started=job.started,
        stages=dict(job.stages),
        waiting=puller.waiting(frame, deadline),
        board=puller.board(job.machines, deadline, end=end) if settings.boards else "",
    )


def run_once(settings: ServiceSettings, name: str, *, end: int | None = None) -> Result:
    """Return the result that the service's first call for a job would have, now or before `end`."""
    job = find_job(settings, name)
    return look(JobMonitor(job.key, models_of(settings), settings), settings, job, end=end)


def build(settings: ServiceSettings) -> Service:
    """Return the service, ready to start."""
    models, metrics = models_of(settings), OwnMetrics()
    for name, denoiser in models.denoisers.items():
        facts = (denoiser.version, denoiser.quality, denoiser.name)
        metrics.set(
            "model_info", 1.0, name, *facts, "site" if settings.models.folder else "package"
        )
    prometheus = Prometheus(
        settings.prometheus, on_error=lambda code: metrics.count("prometheus_errors", code)
    )
    shared = Shared(settings, models, metrics)
    state: StateStore | None = None
    lease = None
    if settings.kubernetes is not None:
        cluster = Cluster.connect(settings.kubernetes)
        state = ConfigMapState(cluster, names.STATE)
        if settings.server.leader_election:
            identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
            lease = Lease(cluster, identity)
        is_leader = lease.is_leader if lease is not None else lambda: True
        is_silenced = silences(settings.alertmanager, shared.stop)
        shared.actor = Actor(cluster, settings.act, is_leader=is_leader, is_silenced=is_silenced)
    if settings.server.state_file:
        state = FileState(Path(settings.server.state_file))

    def jobs() -> Sequence[JobInfo]:
        actor = shared.actor
        return [*static_jobs(settings), *(actor.cluster.jobs() if actor else ())]

    def source_of(info: JobInfo) -> Puller:
        return Puller(
            prometheus,
            settings.sources,
            info.key,
            on_duplicate=lambda: metrics.count("duplicate_series"),
        )

    return Service(
        shared, jobs=jobs, source_of=source_of, probe=prometheus.now, state=state, lease=lease
    )


def silences(config: AlertmanagerConfig, stop: threading.Event) -> Callable[[Alert], bool]:
    """Return the function that tells whether people have silenced an alert."""
    if not (config.url and config.honour_silences):
        return lambda alert: False
    alertmanager = Alertmanager(config)

    def is_silenced(alert: Alert) -> bool:
        silence = alertmanager.silence(alert, Deadline.after(10.0, stop))
        if silence:
            logger.info("silenced alert=%s silence=%s", alert.id, silence)
        return bool(silence)

    return is_silenced
