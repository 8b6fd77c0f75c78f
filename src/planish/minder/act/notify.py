"""Notifier: reports an alert as Events on nodes and pods, and in the run that it concerns.

Labels of pods name the run of a machine. The run's workflow gets an annotation, and the run's root
an object that the report of the run shows. No failure of a report stops an action.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from planish import store
from planish.base.errors import ClusterError, PlanishError
from planish.minder.act.alerts import Alert, AlertKind
from planish.minder.act.config import KubernetesConfig
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.events import EventBook
from planish.minder.act.kube.objects import JobInfo, timestamp
from planish.records import layout

logger = logging.getLogger(__name__)

MAX_HISTORY = 20
"""Newest reports that are kept with an alert."""
_FAULTS: dict[AlertKind, str] = {
    "dissimilar": "unlike its peers in {metric}",
    "silent": "silent",
    "job_wide": "unlike the others at the same time",
    "outage": "without samples",
    "broken": "with a broken exporter of {metric}",
}
"""Kinds of alerts in words."""


class Notifier:
    """Writes Events on nodes and pods, and links alerts to runs."""

    def __init__(self, cluster: Cluster, events: EventBook) -> None:
        self._cluster, self._events = cluster, events

    def report(
        self,
        alert: Alert,
        job: JobInfo | None,
        history: Sequence[Mapping[str, Any]],
        planned: str,
        now: int,
    ) -> None:
        """Report a new state of an alert or a new outcome.

        `history` has second, state and action of each report, the newest last. `planned` is the
        action that a dry run would take.
        """
        if not alert.ended:
            self._write_events(alert, job, planned, now)
        if job is None:
            return
        record = alert_record(alert, job, history[-1]["action"])
        for workflow in sorted({pod.workflow for pod in job.pods if pod.workflow}):
            text = json.dumps(record, sort_keys=True)
            try:
                self._cluster.annotate_workflow(job.namespace, workflow, {names.ANOMALY: text})
            except ClusterError as error:
                # The workflow may have been deleted; the alert goes on without the annotation.
                logger.warning("workflow not annotated name=%s error=%s", workflow, error)
        record["history"] = list(history)
        self._write_under_root(record, alert, job.run_root)

    def _write_events(self, alert: Alert, job: JobInfo | None, planned: str, now: int) -> None:
        fault = _FAULTS[alert.kind].format(metric=alert.metric)
        fault += f" since {timestamp(alert.since)}"
        if alert.machine:
            try:
                node = self._cluster.node(alert.machine)
            except ClusterError as error:
                # A removed node needs no Event; the alert goes on without it.
                logger.debug("no event machine=%s error=%s", alert.machine, error)
            else:
                self._events.note(node, names.FAULTY_MACHINE, f"{fault}, alert {alert.id}", now)
                if planned:
                    self._events.note(node, names.DRY_RUN, planned, now, is_warning=False)
        whose = f"machine {alert.machine}" if alert.machine else f"{len(alert.machines)} machines"
        for pod in job.pods if job is not None else ():
            if pod.machine in _machines(alert):
                self._events.note(pod, names.POD_REASON, f"{whose} {fault}", now)

    def _write_under_root(self, record: dict[str, Any], alert: Alert, root: str) -> None:
        if not allowed_root(root, self._cluster.config):
            if root:
                logger.debug("run root not allowed root=%s", root)
            return
        # All reports of one alert have the same name, so the last report replaces the others.
        time = datetime.fromtimestamp(int(alert.since), UTC).strftime("%Y%m%dT%H%M%SZ")
        uri = f"{layout.alerts(root)}/{time}-{alert.machine or 'job'}.json"
        try:
            text = json.dumps(record, sort_keys=True, allow_nan=False)
            store.write(uri, text.encode())
        except (PlanishError, OSError, ValueError) as error:
            # A store that does not answer must not keep a faulty machine in service.
            logger.warning("alert not stored uri=%s error=%s", uri, error)


def alert_record(alert: Alert, job: JobInfo, action: str) -> dict[str, Any]:
    """Return the JSON record of an alert."""
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
        "action": action,
    }


def allowed_root(root: str, config: KubernetesConfig) -> bool:
    """Return whether alerts may be written below the run root that a pod names."""
    prefixes = [prefix.rstrip("/") for prefix in config.run_roots]
    return bool(root) and any(root == p or root.startswith(f"{p}/") for p in prefixes)


def _machines(alert: Alert) -> set[str]:
    return {alert.machine} if alert.machine else set(alert.machines)
