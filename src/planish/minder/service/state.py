"""State of the service over restarts: one JSON document in a file or a ConfigMap.

The state can be rebuilt from the metrics and from annotations of nodes. Losing it costs minutes and
no safety.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planish import store
from planish.base.errors import ClusterError, ObjectMissing, PlanishError

if TYPE_CHECKING:
    from planish.minder.act.kube.cluster import Cluster

logger = logging.getLogger(__name__)

_KEY = "state.json"


class FileState:
    """The document as a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.max_bytes = path, float("inf")
        self.known: str | None = ""
        """Document that was read or written last; None if the last try failed."""

    def read(self) -> str:
        """Return the document; empty if there is none yet."""
        try:
            return store.read(store.file_uri(self.path)).decode(errors="replace")
        except ObjectMissing:
            return ""

    def write(self, text: str) -> None:
        """Replace the document; a reader sees the old or the new one."""
        store.write(store.file_uri(self.path), text.encode())


class ConfigMapState:
    """The document in a ConfigMap that the manifests create; each change is one patch."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Use the ConfigMap `name` in the namespace of the monitor."""
        self._kube, self._place = cluster.kube, (name, cluster.kube.namespace)
        # The API server limits a ConfigMap to 1 MiB.
        self.max_bytes: float = 900_000
        self.known: str | None = ""
        """Document that was read or written last; None if the last try failed."""

    def read(self) -> str:
        """Return the document; empty if there is none yet."""
        content = self._kube.find(self._kube.core.read_namespaced_config_map, *self._place)
        if content is None:
            name, namespace = self._place
            raise ClusterError(
                f"the ConfigMap {namespace}/{name} must exist, but does not; apply "
                "manifests/base/minder",
                status=404,
            )
        return str((content.get("data") or {}).get(_KEY, ""))

    def write(self, text: str) -> None:
        """Replace the document."""
        patch = self._kube.core.patch_namespaced_config_map
        self._kube.call(patch, *self._place, {"data": {_KEY: text}})


StateStore = FileState | ConfigMapState
"""Place of the document."""


def load_jobs(place: StateStore | None) -> dict[str, Any]:
    """Return the state of each job; empty if it can not be read or is damaged."""
    if place is None:
        return {}
    try:
        place.known = place.read()
        state = json.loads(place.known or "{}")
        return dict(state.get("jobs", {}))
    except (PlanishError, ValueError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("state_lost reason=%r", str(error)[:200])
        return {}


def save_jobs(place: StateStore | None, jobs: Mapping[str, Any]) -> bool:
    """Save the state of each job if it has changed, and return whether it is saved."""
    if place is None:
        return False
    state = {"jobs": fit_jobs(jobs, place.max_bytes)}
    text = json.dumps(state, sort_keys=True, allow_nan=False, separators=(",", ":"))
    try:
        if text != place.known:
            place.write(text)
    except PlanishError as error:
        if place.known is not None:
            logger.warning("state_not_saved bytes=%d reason=%r", len(text), str(error)[:200])
        place.known = None
        return False
    place.known = text
    return True


def fit_jobs(jobs: Mapping[str, Any], max_bytes: float) -> dict[str, Any]:
    """Return the state of the jobs in at most `max_bytes`; the largest baselines are left out.

    The monitor can learn a baseline again from the metrics, but not which alerts are open.
    """
    fitting = dict(jobs)
    size = len(json.dumps(jobs))
    learnt = {key: len(json.dumps(job.get("monitor"))) for key, job in jobs.items()}
    for key in sorted(learnt, key=lambda key: (-learnt[key], key)):
        if size <= max_bytes:
            break
        fitting[key] = {name: value for name, value in jobs[key].items() if name != "monitor"}
        size -= learnt[key]
        logger.warning("baseline_not_saved job=%s bytes=%d", key, learnt[key])
    return fitting
