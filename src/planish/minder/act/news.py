"""What people and runs hear of an alert and of what was done about it."""

from __future__ import annotations

import logging

from planish.base.errors import ClusterError
from planish.minder.act.kube import names
from planish.minder.act.kube.client import Cluster
from planish.minder.act.kube.events import EventBook, Subject
from planish.minder.act.kube.objects import JobInfo
from planish.minder.act.run_links import RunLinks, RunTable
from planish.minder.act.types import ActedAlert, Outcome

logger = logging.getLogger(__name__)


class News:
    """Events on nodes, and links on runs."""

    def __init__(self, cluster: Cluster, events: EventBook, table: RunTable) -> None:
        """Write through one book of Events, so that none comes too often."""
        self._cluster = cluster
        self._events = events
        self.links = RunLinks(cluster, events, table)

    def tell(
        self,
        alert: ActedAlert,
        job: JobInfo | None,
        outcome: Outcome,
        now: int,
        *,
        breaker: str = "",
    ) -> None:
        """Tell of a new state of an alert or a new outcome.

        Args:
            alert: as it is now.
            job: its job, where it still runs.
            outcome: what came of it.
            now: unix seconds.
            breaker: why the breaker is open; empty when it is closed.
        """
        if alert.machine and alert.state != "resolved":
            try:
                subject = Subject.of(self._cluster.node(alert.machine))
            except ClusterError as error:
                # A node that is no more needs no Event; the alert goes on without.
                logger.debug("no event machine=%s error=%s", alert.machine, error)
            else:
                self._on_node(alert, subject, outcome, now, breaker)
        if job is not None and alert.state != "candidate":
            action = f"{outcome.action} {outcome.result}: {outcome.detail}"
            self.links.attach(alert, job, now, action if outcome.action != "none" else "")

    def _on_node(
        self, alert: ActedAlert, subject: Subject, outcome: Outcome, now: int, breaker: str
    ) -> None:
        note = self._events.note
        what = alert.metric or alert.kind
        message = f"unlike its peers in {what} since {int(alert.since)}, alert {alert.id}"
        if alert.state == "candidate":
            note(subject, names.CANDIDATE, message, now, is_warning=False)
            return
        note(subject, names.FAULTY_MACHINE, message, now)
        if outcome.result == "dry_run":
            note(subject, names.DRY_RUN, outcome.detail, now, is_warning=False)
        if breaker:
            note(subject, names.BREAKER_OPEN, breaker, now)
