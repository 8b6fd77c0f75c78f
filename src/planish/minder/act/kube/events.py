"""Events of Kubernetes, at most one for each object and reason in ten minutes."""

from __future__ import annotations

import hashlib
import logging
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.kube.client import Cluster
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.act.kube.parse import timestamp

logger = logging.getLogger(__name__)

COMPONENT = "minder"
MAX_MESSAGE = 1024
"""Bytes that the API server takes."""
MAX_SAVED = 1000
"""Series that outlive a restart; one that does not is begun anew at the server."""


@dataclass(frozen=True)
class Subject:
    """What an Event is about."""

    kind: str
    """Node or Pod."""
    name: str
    namespace: str
    """Empty for a node."""
    uid: str

    @classmethod
    def of(cls, thing: NodeInfo | PodInfo) -> Subject:
        """Return the subject for a node or a pod."""
        if isinstance(thing, PodInfo):
            return cls("Pod", thing.name, thing.namespace, thing.uid)
        return cls("Node", thing.name, "", thing.uid)


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
    """Writes Events and counts those that come too soon after one of their kind."""

    def __init__(self, cluster: Cluster, seconds: float) -> None:
        """Allow one for each object and reason in so many seconds."""
        self._cluster = cluster
        self._seconds = seconds
        self._series: dict[str, _Series] = {}

    def note(
        self, subject: Subject, reason: str, message: str, now: float, *, is_warning: bool = True
    ) -> bool:
        """Write an Event, or count it for the next one; return whether the server has it."""
        key = f"{subject.kind}/{subject.namespace}/{subject.name}/{subject.uid}/{reason}"
        known = self._series.get(key)
        if known is not None and now - known.written < self._seconds:
            known.pending += 1
            return False
        text = message.encode()[:MAX_MESSAGE].decode(errors="ignore")
        try:
            if known is None or not self._again(known, text, now):
                self._series[key] = self._first(subject, reason, text, now, is_warning)
        except ClusterError as error:
            # An Event is news, never a condition: what it tells of goes on without it.
            logger.warning("event not written reason=%s error=%s", reason, error)
            return False
        return True

    def _first(
        self, subject: Subject, reason: str, message: str, now: float, is_warning: bool
    ) -> _Series:
        namespace = subject.namespace or "default"
        mark = f"{subject.uid}/{reason}/{now}".encode()
        name = f"{subject.name[:200]}.{hashlib.sha256(mark).hexdigest()[:16]}"
        involved = {
            "apiVersion": "v1",
            "kind": subject.kind,
            "name": subject.name,
            "uid": subject.uid,
            **({"namespace": subject.namespace} if subject.namespace else {}),
        }
        body = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "type": "Warning" if is_warning else "Normal",
            "source": {"component": COMPONENT},
            "reportingComponent": COMPONENT,
            "reportingInstance": socket.gethostname(),
            "firstTimestamp": timestamp(now),
            "lastTimestamp": timestamp(now),
            "count": 1,
        }
        self._cluster.create_event(namespace, body)
        return _Series(name, namespace, now, 1)

    def _again(self, known: _Series, message: str, now: float) -> bool:
        """Count up an Event; return False when the server has forgotten it."""
        count = known.count + known.pending + 1
        body = {"count": count, "lastTimestamp": timestamp(now), "message": message}
        try:
            self._cluster.patch_event(known.namespace, known.name, body)
        except ClusterError as error:
            if error.status != 404:
                raise
            return False
        known.count, known.pending, known.written = count, 0, now
        return True

    def forget(self, before: float) -> None:
        """Drop what was last written earlier."""
        self._series = {k: s for k, s in self._series.items() if s.written >= before}

    def to_json(self) -> dict[str, Any]:
        """Return what must outlive a restart: the series that were written last."""
        newest = sorted(self._series.items(), key=lambda item: (item[1].written, item[0]))
        return {key: vars(series) for key, series in newest[-MAX_SAVED:]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        self._series = {key: _Series(**series) for key, series in state.items()}
