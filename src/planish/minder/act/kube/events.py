"""Events of Kubernetes, at most one for each object and reason in ten minutes."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.kube.cluster import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo, timestamp

logger = logging.getLogger(__name__)

COMPONENT = "minder"
MAX_MESSAGE = 1024
"""Bytes that the API server takes."""
MAX_SAVED = 1000
"""Series that outlive a restart; for others a new Event is created."""


@dataclass
class _Series:
    name: str
    namespace: str
    written: float
    count: int
    """As the server knows it."""
    pending: int = 0
    """Occurrences since then."""


class EventBook:
    """Writes Events, and counts those that come too soon after an equal one."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        """Allow one Event for each object and reason in so many seconds."""
        self._cluster = cluster
        self._seconds = seconds
        self._series: dict[str, _Series] = {}

    def note(
        self,
        about: NodeInfo | PodInfo,
        reason: str,
        message: str,
        now: float,
        *,
        is_warning: bool = True,
    ) -> bool:
        """Write an Event, or count it for the next one; return whether the server has it."""
        kind, namespace = "Node", ""
        if isinstance(about, PodInfo):
            kind, namespace = "Pod", about.namespace
        key = f"{kind}/{namespace}/{about.name}/{about.uid}/{reason}"
        series = self._series.get(key)
        if series is not None and now - series.written < self._seconds:
            series.pending += 1
            return False
        text = message.encode()[:MAX_MESSAGE].decode(errors="ignore")
        involved = {"apiVersion": "v1", "kind": kind, "name": about.name, "uid": about.uid}
        if namespace:
            involved["namespace"] = namespace
        place = namespace or "default"
        mark = hashlib.sha256(f"{about.uid}/{reason}/{now}".encode()).hexdigest()[:16]
        event = {
            "metadata": {"name": f"{about.name[:200]}.{mark}", "namespace": place},
            "involvedObject": involved,
            "reason": reason,
            "message": text,
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": socket.gethostname(),
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "count": 1,
        }
        try:
            if series is None or not self._count_up(series, text, now):
                self._cluster.call(self._cluster.core.create_namespaced_event, place, event)
                self._series[key] = _Series(f"{about.name[:200]}.{mark}", place, now, 1)
        except ClusterError as error:
            # What an Event reports goes on without the Event.
            logger.warning("event not written reason=%s error=%s", reason, error)
            return False
        return True

    def _count_up(self, series: _Series, message: str, now: float) -> bool:
        """Raise the count of an Event; return False when the server has forgotten the Event."""
        count = series.count + series.pending + 1
        body = {"count": count, "lastTimestamp": timestamp(now), "message": message}
        patch = self._cluster.core.patch_namespaced_event
        try:
            self._cluster.call(patch, series.name, series.namespace, body)
        except ClusterError as error:
            if error.status != 404:
                raise
            return False
        series.count, series.pending, series.written = count, 0, now
        return True

    def forget(self, before: float) -> None:
        """Drop what was last written earlier."""
        self._series = {k: s for k, s in self._series.items() if s.written >= before}

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive a restart: the series that were written last."""
        newest = sorted(self._series.items(), key=lambda item: (item[1].written, item[0]))
        return {key: vars(series) for key, series in newest[-MAX_SAVED:]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved."""
        self._series = {key: _Series(**series) for key, series in state.items()}
