"""The state of the monitor between restarts, in ConfigMaps that the manifests create."""

from __future__ import annotations

import json
import logging
from typing import Any

from planish.base.errors import ClusterError, RecordError
from planish.minder.act.kube.client import Cluster

logger = logging.getLogger(__name__)

STATE_KEY = "state.json"
RESET_KEY = "breaker-reset"
MAX_BYTES = 900_000
"""A ConfigMap holds 1 MiB."""


class ConfigMapState:
    """Loads and saves; each save is one patch, so readers see the old state or the new."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Use the ConfigMap of that name in the monitor's own namespace."""
        self._cluster, self._name = cluster, name
        self.max_bytes: float = MAX_BYTES
        self._namespace = cluster.own_namespace

    def _data(self) -> dict[str, str]:
        core = self._cluster.core
        try:
            found = self._cluster.call(core.read_namespaced_config_map, self._name, self._namespace)
        except ClusterError as error:
            if error.status == 404:
                raise ClusterError(
                    f"the ConfigMap {self._namespace}/{self._name} must exist, but does not; apply "
                    "manifests/base/minder",
                    status=404,
                ) from None
            raise
        return found.get("data") or {}

    def _patch(self, data: dict[str, str | None]) -> None:
        core = self._cluster.core
        self._cluster.call(
            core.patch_namespaced_config_map, self._name, self._namespace, {"data": data}
        )

    def load(self) -> dict[str, Any]:
        """Return what was saved last; nothing for none or a damaged one, which data rebuilds.

        Raises:
            ClusterError: the ConfigMap is not there, or the server does not answer.
        """
        text = self._data().get(STATE_KEY, "")
        try:
            state = json.loads(text or "{}")
        except ValueError:
            logger.warning("state unreadable bytes=%d", len(text))
            return {}
        return state if isinstance(state, dict) else {}

    def save(self, state: dict[str, Any]) -> None:
        """Replace the state.

        Raises:
            RecordError: it does not fit into a ConfigMap.
            ClusterError: the server refused or does not answer.
        """
        text = json.dumps(state, sort_keys=True, separators=(",", ":"))
        if len(text) > self.max_bytes:
            raise RecordError(
                f"the state must not exceed {MAX_BYTES} bytes, got {len(text)}; keep it on a volume"
            )
        self._patch({STATE_KEY: text})

    def request_reset(self, now: float) -> None:
        """Ask the leader to close the breaker; what `breaker reset` does."""
        self._patch({RESET_KEY: f"{now:.0f}"})

    def take_reset(self) -> float:
        """Return when a human asked to close the breaker, once; 0 when nobody did."""
        text = self._data().get(RESET_KEY, "")
        if not text:
            return 0.0
        self._patch({RESET_KEY: None})
        return float(text) if text.isdecimal() else 0.0
