"""Client of Alertmanager that asks whether people have silenced an alert.

The monitor sends no alerts itself. The rules of Prometheus in `monitoring/rules/minder.yaml` do.
"""

from __future__ import annotations

import json
import urllib.parse

from planish.base.errors import BackendUnavailable
from planish.minder.act.alerts import Alert
from planish.minder.service.http import AccessConfig, Deadline, HttpClient


class AlertmanagerConfig(AccessConfig):
    """Address of the Alertmanager in which people silence alerts; without `url` no alert is
    silenced.
    """

    cluster: str = ""
    """Value of the label `cluster`; empty if Alertmanager serves only one cluster."""
    honour_silences: bool = True
    """Take no action on an alert that is silenced or that Alertmanager does not have."""


class Alertmanager:
    """Client of one Alertmanager; several threads may use it."""

    def __init__(self, config: AlertmanagerConfig) -> None:
        self.config = config
        self._http = HttpClient(config)

    def silence(self, alert: Alert, deadline: Deadline) -> str:
        """Return the id of a silence that matches an alert; empty if there is none.

        Prometheus adds labels of its own to those of a rule, so the filter has only labels of the
        rule.

        Raises:
            BackendUnavailable: there is no valid answer, or Alertmanager does not have the alert.
        """
        labels = {"alertname": alert.name, "job_name": alert.job, "node": alert.machine}
        if self.config.cluster:
            labels["cluster"] = self.config.cluster
        filters = [f"{name}={json.dumps(value)}" for name, value in labels.items()]
        query = urllib.parse.urlencode({"filter": filters}, doseq=True)
        status, body = self._http.request("GET", f"/api/v2/alerts?{query}", deadline=deadline)
        try:
            if status != 200:
                raise ValueError(f"status {status}")
            silences = [list(map(str, item["status"]["silencedBy"])) for item in json.loads(body)]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise BackendUnavailable(
                f"Alertmanager at `{self.config.url}` must list its alerts, got {error!r:.120}",
                code=str(status) if status != 200 else "invalid",
            ) from None
        if not silences:
            raise BackendUnavailable(
                f"Alertmanager at `{self.config.url}` must have the alert {', '.join(filters)}, "
                "got none; load monitoring/rules/minder.yaml into Prometheus",
                code="unknown",
            )
        return next((silence for ids in silences for silence in ids), "")
