"""What the service remembers over a restart: JSON documents, each replaced as a whole.

That of the jobs can be found again from the metrics, so losing it costs some minutes and no safety.
The document of the actor, which holds the breaker, is one of its own: it stays small, and is saved
however large the other has become.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from planish.base.errors import PlanishError, StoreError

logger = logging.getLogger(__name__)


class StateStore(Protocol):
    """Where a document lies: a file, or a ConfigMap of Kubernetes."""

    max_bytes: float
    """Size of the largest document."""

    def load(self) -> dict[str, Any]:
        """Return what was saved last; empty for none or a damaged one.

        Raises:
            PlanishError: it can not be reached.
        """

    def save(self, state: dict[str, Any]) -> None:
        """Replace it; a reader sees the old or the new one.

        Raises:
            PlanishError: it can not be reached.
        """

    def request_reset(self, now: float) -> None:
        """Ask the service to close the breaker."""

    def take_reset(self) -> float:
        """Return when that was asked, once; 0 when nobody did."""


class FileState:
    """The document as a file.

    Example:
        >>> import tempfile, pathlib
        >>> state = FileState(pathlib.Path(tempfile.mkdtemp()) / "state.json")
        >>> state.load(), state.save({"jobs": {}}), state.load()
        ({}, None, {'jobs': {}})
    """

    def __init__(self, path: Path) -> None:
        """Take the path; its folder is made with the first save."""
        self.path, self.max_bytes = path, float("inf")
        self._reset = path.with_name(path.name + ".breaker-reset")

    def load(self) -> dict[str, Any]:
        """Return what was saved last; empty for none or a damaged one."""
        text = _read(self.path)
        try:
            state = json.loads(text or "{}")
            if not isinstance(state, dict) or not isinstance(state.get("jobs", {}), dict):
                raise ValueError("not of this service")
        except (ValueError, RecursionError) as error:
            logger.warning("state_damaged path=%s reason=%r", self.path, str(error)[:100])
            return {}
        return state

    def save(self, state: dict[str, Any]) -> None:
        """Write beside the file, make it durable, and put it in its place."""
        _write(self.path, json.dumps(state, sort_keys=True, allow_nan=False))

    def request_reset(self, now: float) -> None:
        """Leave a note beside the file."""
        _write(self._reset, f"{now:.0f}")

    def take_reset(self) -> float:
        """Return when the note was left, and take it away."""
        text = _read(self._reset)
        if not text:
            return 0.0
        with contextlib.suppress(OSError):
            self._reset.unlink()
        return float(text) if text.isdecimal() else 0.0


def _read(path: Path) -> str:
    """Return a file's text, empty when there is none or it is no text.

    Raises:
        StoreError: it can not be read.
    """
    try:
        return path.read_text("utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""
    except OSError as error:
        raise StoreError(f"`{path}` must be readable, got {error}") from None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".minder-", dir=path.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
    except OSError as error:
        raise StoreError(f"`{path}` must be writable, got {error}") from None


def load_state(store: StateStore | None) -> dict[str, Any]:
    """Return the state, empty when there is none that can be had: it is found again from data."""
    if store is None:
        return {}
    try:
        return store.load()
    except PlanishError as error:
        logger.warning("state_lost reason=%r", str(error)[:200])
        return {}


def fit_jobs(jobs: Mapping[str, Any], max_bytes: float) -> dict[str, Any]:
    """Return the state of the jobs without what the largest have learnt, so that it fits.

    What was learnt of a job is found again from its metrics; which alerts are open is not.

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


def save_state(store: StateStore | None, state: dict[str, Any]) -> bool:
    """Save the state, and return whether it is saved; what fails is tried again the next time."""
    if store is None:
        return False
    try:
        store.save(state)
    except PlanishError as error:
        logger.warning("state_not_saved keys=%s reason=%r", ",".join(state), str(error)[:200])
        return False
    return True
