"""What the service remembers over a restart: JSON documents, each replaced as a whole.

The document of the jobs can be rebuilt from the metrics, so losing it costs some minutes and no
safety. The document of the actor, which holds the breaker, is separate: it stays small and is
saved even when the other does not fit.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from planish import store
from planish.base.errors import ObjectMissing, PlanishError, RecordError

if TYPE_CHECKING:
    from planish.minder.act.kube.cluster import Cluster

logger = logging.getLogger(__name__)

STATE_KEY, RESET_KEY = "state.json", "breaker-reset"


class StateStore(Protocol):
    """A document, and beside it the request of an operator to close the breaker."""

    max_bytes: float
    """Size of the largest document."""

    def _read(self, key: str) -> str:
        """Return one of the two texts; empty when there is none."""

    def _write(self, key: str, text: str | None) -> None:
        """Replace one of the two texts, or remove it."""

    def load(self) -> dict[str, Any]:
        """Return what was saved last; empty for none or a damaged one.

        Raises:
            PlanishError: it can not be reached.
        """
        text = self._read(STATE_KEY)
        try:
            state = json.loads(text or "{}")
            if not isinstance(state, dict) or not isinstance(state.get("jobs", {}), dict):
                raise ValueError("not a state of this service")
        except (ValueError, RecursionError) as error:
            logger.warning("state_damaged bytes=%d reason=%r", len(text), str(error)[:100])
            return {}
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Replace the document; a reader sees the old or the new one.

        Raises:
            RecordError: it is too large.
            PlanishError: it can not be reached.
        """
        text = json.dumps(state, sort_keys=True, allow_nan=False, separators=(",", ":"))
        if len(text) > self.max_bytes:
            raise RecordError(
                f"the state must not exceed {self.max_bytes:.0f} bytes, got {len(text)}; keep it "
                "in a file by `server.state_file`"
            )
        self._write(STATE_KEY, text)

    def request_reset(self, now: float) -> None:
        """Ask the service to close the breaker."""
        self._write(RESET_KEY, f"{now:.0f}")

    def take_reset(self) -> float:
        """Return when somebody asked to close the breaker, once; 0 when nobody did."""
        text = self._read(RESET_KEY)
        if text:
            self._write(RESET_KEY, None)
        return float(text) if text.isdecimal() else 0.0


class FileState(StateStore):
    """The document as a file.

    Example:
        >>> import tempfile, pathlib
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     state = FileState(pathlib.Path(folder) / "state.json")
        ...     state.load(), state.save({"jobs": {}}), state.load()
        ({}, None, {'jobs': {}})
    """

    def __init__(self, path: Path) -> None:
        """Take the path; the first save makes its folder."""
        self.path, self.max_bytes = path, float("inf")
        self._uris = {
            STATE_KEY: store.file_uri(path),
            RESET_KEY: store.file_uri(path.with_name(f"{path.name}.{RESET_KEY}")),
        }

    def _read(self, key: str) -> str:
        try:
            return store.read(self._uris[key]).decode(errors="replace")
        except ObjectMissing:
            return ""

    def _write(self, key: str, text: str | None) -> None:
        if text is None:
            store.delete(self._uris[key])
        else:
            store.write(self._uris[key], text.encode())


class ConfigMapState(StateStore):
    """The document in a ConfigMap that the manifests create; each change is one patch."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        """Use the ConfigMap of that name in the monitor's own namespace."""
        self._cluster, self._name = cluster, name
        # A ConfigMap holds 1 MiB.
        self.max_bytes = 900_000

    def _read(self, key: str) -> str:
        return self._cluster.read_config_map(self._name).get(key, "")

    def _write(self, key: str, text: str | None) -> None:
        self._cluster.patch_config_map(self._name, {key: text})


def load_state(place: StateStore | None) -> dict[str, Any]:
    """Return the state; empty when it can not be read, since it is rebuilt from the metrics."""
    try:
        return place.load() if place is not None else {}
    except PlanishError as error:
        logger.warning("state_lost reason=%r", str(error)[:200])
        return {}


def save_state(place: StateStore | None, state: dict[str, Any]) -> bool:
    """Save the state, and return whether it is saved; the next save tries again."""
    if place is None:
        return False
    try:
        place.save(state)
    except PlanishError as error:
        logger.warning("state_not_saved keys=%s reason=%r", ",".join(state), str(error)[:200])
        return False
    return True


def fit_jobs(jobs: Mapping[str, Any], max_bytes: float) -> dict[str, Any]:
    """Return the state of the jobs without the baselines of the largest, so that it fits.

    A baseline is learnt again from the metrics; which alerts are open is not.

    Example:
        >>> jobs = {"a": {"monitor": "m" * 50, "alerts": {}}, "b": {"monitor": "", "alerts": {}}}
        >>> fit_jobs(jobs, 80)
        {'a': {'alerts': {}}, 'b': {'monitor': '', 'alerts': {}}}
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
