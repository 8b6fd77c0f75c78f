"""From machines to the runs that work on them, and alerts back to those runs.

It works from labels alone. An alert leaves an Event on each pod, an annotation on the workflow and
an object under the root of the run, from which the report of the run shows it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from planish import store
from planish.base.errors import ClusterError, PlanishError
from planish.minder.act.kube import names
from planish.minder.act.kube.client import Cluster
from planish.minder.act.kube.config import KubernetesConfig
from planish.minder.act.kube.events import EventBook, Subject
from planish.minder.act.kube.objects import JobInfo, PodInfo
from planish.minder.act.types import ActedAlert
from planish.records import layout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Row:
    """One pod of a run on one machine."""

    machine: str
    pod: str
    namespace: str
    run_id: str
    stage: str
    iteration: int
    job: str
    """Value of the label that names its job."""
    rank: int
    """-1 where no label tells it."""
    start: int
    """Unix seconds."""
    end: int = 0
    """Unix seconds at which it was no longer seen running; 0 while it is."""


class RunTable:
    """Which pod of which run was on which machine, and when."""

    def __init__(self, config: KubernetesConfig) -> None:
        """Begin empty."""
        self._keep_seconds = config.history_seconds
        self._rows: dict[str, Row] = {}

    def update(self, jobs: Iterable[JobInfo], now: int, namespace: str = "") -> None:
        """Take in what runs now, in one namespace or in all; what ran there else has ended."""
        running = {pod.uid: pod for job in jobs for pod in job.pods}
        for uid, row in list(self._rows.items()):
            if uid not in running and not row.end and namespace in ("", row.namespace):
                self._rows[uid] = replace(row, end=now)
            elif row.end and row.end < now - self._keep_seconds:
                del self._rows[uid]
        for uid, pod in running.items():
            if uid not in self._rows:
                self._rows[uid] = _row(pod)

    def rows(self, machine: str = "", at: int = 0) -> list[Row]:
        """Return the rows of a machine (empty: of all) at a time (0: at any), by time."""
        found = [
            row
            for row in self._rows.values()
            if machine in ("", row.machine)
            and (not at or (row.start <= at and (not row.end or at < row.end)))
        ]
        return sorted(found, key=lambda row: (row.start, row.machine, row.pod))

    def of_alert(self, alert: ActedAlert, job: JobInfo) -> list[Row]:
        """Return the pods of a job on the machines of an alert, also those that it ended."""
        return [
            row
            for row in self.rows()
            if row.machine in _machines(alert)
            and (row.namespace, row.job) == (job.namespace, job.name)
            and (not row.end or row.end > alert.since)
        ]


def _row(pod: PodInfo) -> Row:
    return Row(
        machine=pod.machine,
        pod=pod.name,
        namespace=pod.namespace,
        run_id=pod.run_id,
        stage=pod.stage,
        iteration=pod.iteration,
        job=pod.job,
        rank=pod.rank,
        start=pod.started,
    )


def alert_record(
    alert: ActedAlert, job: JobInfo, pods: Sequence[Row], action: str
) -> dict[str, Any]:
    """Return what is written about an alert: identity, evidence, run, pods and action."""
    return {
        "id": alert.id,
        "job": job.key,
        "namespace": job.namespace,
        "machine": alert.machine,
        "machines": list(alert.machines),
        "kind": alert.kind,
        "metric": alert.metric,
        "score": alert.score,
        "state": alert.state,
        "first_second": alert.since,
        "last_second": alert.seen,
        "run_id": job.run_id,
        "stage": job.stage,
        "iteration": job.iteration,
        "pods": [asdict(row) for row in pods],
        "action": action,
    }


def object_name(alert: ActedAlert) -> str:
    """Return `<time>-<machine>.json`, equal for all that is said of one alert."""
    time = datetime.fromtimestamp(int(alert.since), UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{time}-{alert.machine or 'job'}.json"


def allowed_root(root: str, config: KubernetesConfig) -> bool:
    """Tell whether alerts may be written below a root that a pod has named.

    Example:
        >>> config = KubernetesConfig(run_roots=("s3://runs/team",))
        >>> allowed_root("s3://runs/team/7", config), allowed_root("s3://runs/team-b/7", config)
        (True, False)
    """
    prefixes = [prefix.rstrip("/") for prefix in config.run_roots]
    return bool(root) and any(root == p or root.startswith(f"{p}/") for p in prefixes)


def _machines(alert: ActedAlert) -> set[str]:
    return {alert.machine} if alert.machine else set(alert.machines)


class RunLinks:
    """Tells runs of their alerts. No failure here stops anything."""

    def __init__(self, cluster: Cluster, events: EventBook, table: RunTable) -> None:
        """Use the switches of the cluster's configuration."""
        self._table = table
        self._cluster = cluster
        self._config = cluster.config
        self._events = events

    def attach(self, alert: ActedAlert, job: JobInfo, now: float, action: str = "") -> list[str]:
        """Leave an alert on its pods, its workflow and under its run root.

        Returns:
            Which of `event`, `workflow`, `object` now tell of it.
        """
        if not self._config.link_runs:
            return []
        record = alert_record(alert, job, self._table.of_alert(alert, job), action)
        done = []
        if alert.state != "resolved" and self._on_pods(alert, job, now):
            done.append("event")
        if self._on_workflows(record, job):
            done.append("workflow")
        if self._under_root(record, alert, job):
            done.append("object")
        return done

    def _on_pods(self, alert: ActedAlert, job: JobInfo, now: float) -> bool:
        what = alert.metric or alert.kind
        whom = f"machine {alert.machine}" if alert.machine else f"{len(alert.machines)} machines"
        message = f"{whom} unlike its peers in {what} since {int(alert.since)}"
        told = [
            self._events.note(Subject.of(pod), names.POD_REASON, message, now)
            for pod in job.pods
            if pod.machine in _machines(alert)
        ]
        return any(told)

    def _on_workflows(self, record: dict[str, Any], job: JobInfo) -> bool:
        workflows = sorted({pod.workflow for pod in job.pods if pod.workflow})
        text = json.dumps({k: v for k, v in record.items() if k != "pods"}, sort_keys=True)
        told = False
        for workflow in workflows:
            try:
                self._cluster.annotate_workflow(job.namespace, workflow, {names.ANOMALY: text})
                told = True
            except ClusterError as error:
                # The run may be of no workflow that still exists; the alert itself goes on.
                logger.warning("workflow not annotated name=%s error=%s", workflow, error)
        return told

    def _under_root(self, record: dict[str, Any], alert: ActedAlert, job: JobInfo) -> bool:
        root = job.run_root
        if not allowed_root(root, self._config):
            if root:
                logger.debug("run root not allowed root=%s", root)
            return False
        uri = f"{layout.alerts(root)}/{object_name(alert)}"
        try:
            text = json.dumps(record, sort_keys=True, allow_nan=False)
            store.write(uri, text.encode())
        except (PlanishError, OSError, ValueError) as error:
            # A store that is away must not keep a machine in service.
            logger.warning("alert not stored uri=%s error=%s", uri, error)
            return False
        return True
