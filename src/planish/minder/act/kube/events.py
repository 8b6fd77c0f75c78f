"""Kubernetes Events, at most one for each object and reason in ten minutes."""

from __future__ import annotations

import logging
import secrets
import socket

from planish.base.errors import ClusterError
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo, timestamp

logger = logging.getLogger(__name__)

QUIET_SECONDS = 600
_MAX_MESSAGE = 1024
"""Longest message in bytes that the API server accepts."""


class EventBook:
    """Writes Events, except soon after another one for the same object and reason."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._written: dict[tuple[str, str], float] = {}
        """Map from uid of the object and reason to the unix seconds of the last Event."""

    def note(
        self,
        about: NodeInfo | PodInfo,
        reason: str,
        message: str,
        now: float,
        *,
        is_warning: bool = True,
    ) -> None:
        """Write an Event, unless one was written for the object and reason within
        `QUIET_SECONDS`.
        """
        if now - self._written.get((about.uid, reason), -QUIET_SECONDS) < QUIET_SECONDS:
            return
        involved = {"apiVersion": "v1", "kind": "Node", "name": about.name, "uid": about.uid}
        place = "default"
        if isinstance(about, PodInfo):
            place = about.namespace
            involved |= {"kind": "Pod", "namespace": place}
        event = {
            "metadata": {"name": f"{about.name[:200]}.{secrets.token_hex(8)}", "namespace": place},
            "involvedObject": involved,
            "reason": reason,
            "message": message.encode()[:_MAX_MESSAGE].decode(errors="ignore"),
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": "minder"},
            "reportingComponent": "minder",
            "reportingInstance": socket.gethostname(),
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "count": 1,
        }
        try:
            self._cluster.call(self._cluster.core.create_namespaced_event, place, event)
        except ClusterError as error:
            # A failed Event changes nothing for the alert that it reports.
            logger.warning("event not written reason=%s error=%s", reason, error)
            return
        recent = {key: at for key, at in self._written.items() if now - at < QUIET_SECONDS}
        self._written = {**recent, (about.uid, reason): now}
