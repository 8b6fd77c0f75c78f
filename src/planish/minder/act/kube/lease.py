"""Election of the one replica that acts, by a Lease.

A replica trusts its own clock only: it measures how long a lease has not changed from the moment
at which it first saw this version of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.kube.cluster import Cluster

logger = logging.getLogger(__name__)


class Lease:
    """A lease that one replica holds at a time; renew it every few seconds."""

    def __init__(
        self, cluster: Cluster, identity: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Compete for the lease of the configuration under a name that no other replica has."""
        self._cluster = cluster
        self.identity = identity
        self._clock = clock
        self._seconds = cluster.config.lease_seconds
        self._name, self._namespace = cluster.config.lease, cluster.own_namespace
        self._renewed: float | None = None
        self._seen: tuple[Any, float] = (None, 0.0)

    def is_leader(self) -> bool:
        """Tell whether this replica may act, without asking the server.

        It may while it renewed so recently that no other replica can hold the lease.
        """
        if self._renewed is None:
            return False
        return self._clock() - self._renewed < self._seconds * 2 / 3

    def renew(self) -> bool:
        """Take or keep the lease if that is allowed; return whether this replica leads."""
        begun = self._clock()
        try:
            if self._take():
                self._renewed = begun
        except ClusterError as error:
            # Another replica was faster, or the server is away: the time limit decides.
            logger.debug("lease not renewed error=%s", error)
        return self.is_leader()

    def release(self) -> None:
        """Give the lease up at once, so that another replica need not wait."""
        if not self.is_leader():
            return
        self._renewed = None
        try:
            lease = self._read()
            if lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"]["holderIdentity"] = ""
                self._write(lease)
        except ClusterError as error:
            logger.debug("lease not released error=%s", error)

    def _take(self) -> bool:
        try:
            lease = self._read()
        except ClusterError as error:
            if error.status != 404:
                raise
            body = {"metadata": {"name": self._name}, "spec": self._spec(0)}
            create = self._cluster.coordination.create_namespaced_lease
            self._cluster.call(create, self._namespace, body)
            return True
        spec = lease.setdefault("spec", {})
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen[0]:
            self._seen = (record, self._clock())
        holder = spec.get("holderIdentity")
        unchanged_seconds = self._clock() - self._seen[1]
        if holder == self.identity:
            spec["renewTime"] = _now()
        elif not holder or unchanged_seconds >= spec.get("leaseDurationSeconds", self._seconds):
            lease["spec"] = self._spec((spec.get("leaseTransitions") or 0) + 1)
        else:
            self._renewed = None
            return False
        self._write(lease)
        return True

    def _spec(self, transitions: int) -> dict[str, Any]:
        now = _now()
        return {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": self._seconds,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": transitions,
        }

    def _read(self) -> Any:
        read = self._cluster.coordination.read_namespaced_lease
        return self._cluster.call(read, self._name, self._namespace)

    def _write(self, lease: Any) -> None:
        # The server refuses it if another replica was faster: its resourceVersion comes along.
        replace = self._cluster.coordination.replace_namespaced_lease
        self._cluster.call(replace, self._name, self._namespace, lease)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
