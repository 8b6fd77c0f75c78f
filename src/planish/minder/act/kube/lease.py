"""Election of the one replica that acts, by a Lease.

A replica trusts only its own clock: it measures for how long the lease has been unchanged. The
election of the Kubernetes client library supports only ConfigMaps, does not release the lock at the
end, and compares wall clocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from planish.base.errors import ClusterError
from planish.minder.act.kube import names
from planish.minder.act.kube.cluster import Cluster

logger = logging.getLogger(__name__)

LEASE_SECONDS = 15
"""Seconds after which a leader that has not renewed the lease has lost it."""


class Lease:
    """A lease that one replica holds at a time; the replica must renew it every few seconds."""

    def __init__(
        self,
        cluster: Cluster,
        identity: str,
        *,
        name: str = names.LEASE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from kubernetes.client import CoordinationV1Api

        self._kube, self._clock = cluster.kube, clock
        self._api: Any = CoordinationV1Api(self._kube.client)
        self.identity = identity
        self._place = name, self._kube.namespace
        self._renewed: float | None = None
        self.fault = ""
        """Error of the last request; empty if the API server answered it."""
        self._seen: tuple[Any, float] = (None, 0.0)

    def is_leader(self) -> bool:
        """Return whether this replica renewed so recently that no other replica can hold the
        lease.
        """
        return self._renewed is not None and self._clock() - self._renewed < LEASE_SECONDS * 2 / 3

    def renew(self) -> bool:
        """Take or keep the lease if possible; return whether this replica leads."""
        begun = self._clock()
        try:
            self._renewed = begun if self._take() else None
            self.fault = ""
        except ClusterError as error:
            # After a lost race or without the API server, the age of the last renewal decides.
            self.fault = "" if error.status == 409 else str(error)[:300]
        return self.is_leader()

    def release(self) -> None:
        """Give up the lease at once, so that another replica need not wait."""
        if not self.is_leader():
            return
        self._renewed = None
        try:
            lease = self._kube.call(self._api.read_namespaced_lease, *self._place)
            if lease["spec"].get("holderIdentity") == self.identity:
                lease["spec"]["holderIdentity"] = ""
                self._write(lease)
        except ClusterError as error:
            logger.debug("lease not released error=%s", error)

    def _take(self) -> bool:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        ours = {
            "holderIdentity": self.identity,
            "leaseDurationSeconds": LEASE_SECONDS,
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": 0,
        }
        lease = self._kube.find(self._api.read_namespaced_lease, *self._place)
        name, namespace = self._place
        if lease is None:
            body = {"metadata": {"name": name}, "spec": ours}
            self._kube.call(self._api.create_namespaced_lease, namespace, body)
            return True
        spec = lease.setdefault("spec", {})
        record = (spec.get("holderIdentity"), spec.get("renewTime"), spec.get("leaseTransitions"))
        if record != self._seen[0]:
            self._seen = (record, self._clock())
        holder = spec.get("holderIdentity")
        unchanged_seconds = self._clock() - self._seen[1]
        if holder == self.identity:
            spec["renewTime"] = now
        elif not holder or unchanged_seconds >= spec.get("leaseDurationSeconds", LEASE_SECONDS):
            lease["spec"] = {**ours, "leaseTransitions": (spec.get("leaseTransitions") or 0) + 1}
        else:
            return False
        self._write(lease)
        return True

    def _write(self, lease: Any) -> None:
        # The object carries its resourceVersion, so the server refuses it if another replica was
        # faster.
        self._kube.call(self._api.replace_namespaced_lease, *self._place, lease)
