"""Alerts sent straight to Alertmanager, and whether it holds one under a silence.

The usual way is a rule of Prometheus over the metrics of the monitor; sending needs no rule, and is
off unless asked for. An alert that is not sent again ends after four times `resend_seconds`.
"""

from __future__ import annotations

import json
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from planish.base.errors import BackendUnavailable
from planish.minder.act.types import ActedAlert
from planish.minder.service.alerts import Alert, alert_name
from planish.minder.service.config import AlertmanagerConfig
from planish.minder.service.http_client import Deadline, HttpClient

_KEEP_FACTOR = 4
_SEVERITY = {
    "MinderFaultyMachine": "critical",
    "MinderJobWide": "critical",
    "MinderTelemetryOutage": "warning",
    "MinderTelemetryBroken": "warning",
}
_SUMMARY = {
    "dissimilar": "{machine} is unlike the other machines of {job}",
    "silent": "{machine} of {job} gives no metrics any more",
    "job_wide": "{count} machines of {job} differ at once: look at what they share",
    "outage": "{count} machines of {job} give no metrics: the measuring itself is broken",
    "broken": "the exporter of {machine} reports {metric} as 0 while the machine works",
}


@dataclass(frozen=True)
class AlertContext:
    """What labels and annotations need besides the alert."""

    namespace: str
    job_name: str
    is_dry_run: bool = True


def labels_of(alert: Alert, context: AlertContext, config: AlertmanagerConfig) -> dict[str, str]:
    """Return the identity of an alert: the same as long as it lives, and few values each."""
    found = {
        **config.labels,
        "alertname": alert_name(alert.kind),
        "severity": _SEVERITY[alert_name(alert.kind)],
        "cluster": config.cluster,
        "namespace": context.namespace,
        "job_name": context.job_name,
        "node": alert.machine,
        "kind": alert.kind,
    }
    # Alertmanager takes an empty label for none.
    return {name: value for name, value in found.items() if value}


def annotations_of(
    alert: Alert, context: AlertContext, config: AlertmanagerConfig
) -> dict[str, str]:
    """Return what people read; it may change while the alert lives."""
    words = {
        "machine": alert.machine,
        "job": context.job_name,
        "metric": alert.metric,
        "count": len(alert.machines),
    }
    metric = f" in {alert.metric}" if alert.metric else ""
    found = {
        "summary": _SUMMARY[alert.kind].format(**words),
        "description": (
            f"Since {_utc(alert.since)}, for {int(alert.duration_s)} s{metric}; mean score "
            f"{alert.score:.2f}."
            + (f" Machines: {', '.join(alert.machines)}." * bool(alert.machines))
        ),
        "metric": alert.metric,
        "score": f"{alert.score:.2f}",
        "since": _utc(alert.since),
        "dry_run": str(context.is_dry_run).lower(),
        "action": alert.action or (f"none: {alert.reason}" if alert.reason else "none"),
        **alert.run,
    }
    if config.runbook_url:
        found["runbook_url"] = f"{config.runbook_url.rstrip('/')}/{alert.name}.md"
    if config.dashboard_url:
        query = urllib.parse.urlencode({"var-job": context.job_name, "var-node": alert.machine})
        found["dashboard_url"] = f"{config.dashboard_url}?{query}"
    return {name: value for name, value in found.items() if value}


class Alertmanager:
    """Sends alerts to one Alertmanager, and asks it which of them people have silenced."""

    def __init__(self, config: AlertmanagerConfig) -> None:
        """Connect at the first request.

        Raises:
            ConfigError: the address can not be.
        """
        self.config = config
        self._http = HttpClient(config, connections=4, max_body_bytes=1 << 26)
        self._sent: dict[str, tuple[float, Alert]] = {}
        self._ended: dict[str, tuple[Alert, AlertContext]] = {}

    def send(
        self, now: float, alerts: Sequence[Alert], context: AlertContext, deadline: Deadline
    ) -> int:
        """Send what is due, and return how many alerts that were.

        A firing alert goes out when it is new or has changed, and every `resend_seconds`; a
        resolved one goes out once. What could not be sent stays due.

        Args:
            now: unix seconds.
            alerts: active and just resolved ones of one job.
            context: of that job.
            deadline: for the request.
        """
        due = [alert for alert in alerts if self._is_due(now, alert)]
        for alert in due:
            if alert.state == "resolved":
                self._ended[alert.id] = (alert, context)
        firing = [(one, context) for one in due if one.is_active]
        ended = list(self._ended.values())
        if not firing and not ended:
            return 0
        body = [self._payload(now, alert, where) for alert, where in [*firing, *ended]]
        self._post(body, deadline)
        for alert, _ in firing:
            self._sent[alert.id] = (now, alert)
        for alert, _ in ended:
            self._sent.pop(alert.id, None)
            self._ended.pop(alert.id, None)
        return len(body)

    def _is_due(self, now: float, alert: Alert) -> bool:
        if alert.state == "resolved":
            return True
        if not alert.is_active:
            return False
        at, sent = self._sent.get(alert.id, (float("-inf"), None))
        changed = sent is None or (sent.state, sent.action, sent.run) != (
            *(alert.state, alert.action, alert.run),
        )
        return changed or now - at >= self.config.resend_seconds

    def _payload(self, now: float, alert: Alert, context: AlertContext) -> dict[str, Any]:
        ends = now
        if alert.state != "resolved":
            ends = now + _KEEP_FACTOR * self.config.resend_seconds
        return {
            "labels": labels_of(alert, context, self.config),
            "annotations": annotations_of(alert, context, self.config),
            "startsAt": _utc(min(alert.fired or alert.since, ends)),
            "endsAt": _utc(ends),
        }

    def _post(self, body: list[dict[str, Any]], deadline: Deadline) -> None:
        status, answer = self._http.request(
            *("POST", "/api/v2/alerts"),
            deadline=deadline.sooner(self.config.timeout_seconds),
            body=json.dumps(body).encode(),
            content_type="application/json",
        )
        if status != 200:
            raise BackendUnavailable(
                f"Alertmanager at `{self.config.url}` must take alerts with 200, got {status} "
                f"{answer[:200]!r}",
                code=str(status),
            )

    def silence(self, alert: ActedAlert, deadline: Deadline) -> str:
        """Return the id of a silence under which Alertmanager holds an alert; empty for none.

        Only Alertmanager knows which labels the alert has there: Prometheus adds its own to those
        of a rule. So the alert is looked for by what all senders name alike.

        Raises:
            BackendUnavailable: not known, also where Alertmanager does not have the alert; then
                nothing must be done about it.
        """
        labels = {"alertname": alert_name(alert.kind), "job_name": alert.job, "node": alert.machine}
        if self.config.cluster:
            labels["cluster"] = self.config.cluster
        filters = [f"{name}={json.dumps(value)}" for name, value in labels.items()]
        query = urllib.parse.urlencode({"filter": filters}, doseq=True)
        status, body = self._http.request(
            "GET",
            f"/api/v2/alerts?{query}",
            deadline=deadline.sooner(self.config.timeout_seconds),
        )
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            held = [list(map(str, one["status"]["silencedBy"])) for one in json.loads(body)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BackendUnavailable(
                f"Alertmanager at `{self.config.url}` must tell its alerts, got {error!r:.120}",
                code=str(status) if status != 200 else "invalid",
            ) from None
        if not held:
            raise BackendUnavailable(
                f"Alertmanager at `{self.config.url}` must have the alert {', '.join(filters)}, "
                "got none; load monitoring/rules/minder.yaml into Prometheus, or set "
                "`alertmanager.send`",
                code="unknown",
            )
        return next((number for numbers in held for number in numbers), "")


def _utc(seconds: float) -> str:
    """Return a time as RFC 3339.

    Example:
        >>> _utc(0.25)
        '1970-01-01T00:00:00.250Z'
    """
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")
