"""Election of the one replica that acts, by a Lease.

A replica trusts its own clock only: how long a lease has not changed is measured from when this
process first saw it so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.kube.client import Cluster

logger = logging.getLogger(__name__)


class Lease:
    """A place that one replica holds at a time; renew it every few seconds."""

    def __init__(
        self, cluster: Cluster, identity: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Run for the lease of the configuration under a name that no other replica has."""
        self._cluster = cluster
        self.identity = identity
        self._clock = clock
        self._seconds = cluster.config.lease_seconds
        self._name, self._namespace = cluster.config.lease, cluster.own_namespace
        self._renewed: float | None = None
        self._seen: tuple[Any, float] = (None, 0.0)

    def is_leader(self) -> bool:
        """Tell whether this replica may act: it renewed recently enough that no other can have
        taken the place.
        """
        if self._renewed is None:
            return False
        return self._clock() - self._renewed < self._seconds * 2 / 3

    def renew(self) -> bool:
        """Take or keep the place if that is allowed; return whether this replica leads."""
        begun = self._clock()
        try:
            succeeded = self._try()
        except ClusterError as error:
            # Another replica was faster, or the server is away: the time limit decides.
            logger.debug("lease not renewed error=%s", error)
            succeeded = False
        if succeeded:
            self._renewed = begun
        return self.is_leader()

    def release(self) -> None:
        """Give the place up at once, so that another replica need not wait."""
        if not self.is_leader():
            return
        self._renewed = None
        try:
            found = self._read()
            if found["spec"].get("holderIdentity") == self.identity:
                found["spec"]["holderIdentity"] = ""
                self._write(found)
        except ClusterError as error:
            logger.debug("lease not released error=%s", error)

    def _try(self) -> bool:
        try:
            found = self._read()
        except ClusterError as error:
            if error.status != 404:
                raise
            self._create()
            return True
        spec = found.setdefault("spec", {})
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen[0]:
            self._seen = (record, self._clock())
        holder = spec.get("holderIdentity")
        if holder == self.identity:
            spec["renewTime"] = _now()
        elif not holder or self._clock() - self._seen[1] >= spec.get(
            "leaseDurationSeconds", self._seconds
        ):
            found["spec"] = self._spec((spec.get("leaseTransitions") or 0) + 1)
        else:
            self._renewed = None
            return False
        self._write(found)
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
        cluster = self._cluster
        return cluster.call(cluster.coordination.read_namespaced_lease, self._name, self._namespace)

    def _create(self) -> None:
        body = {"metadata": {"name": self._name}, "spec": self._spec(0)}
        cluster = self._cluster
        cluster.call(cluster.coordination.create_namespaced_lease, self._namespace, body)

    def _write(self, found: Any) -> None:
        # Its resourceVersion comes along: the server refuses if another replica was faster.
        cluster = self._cluster
        cluster.call(
            cluster.coordination.replace_namespaced_lease, self._name, self._namespace, found
        )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
