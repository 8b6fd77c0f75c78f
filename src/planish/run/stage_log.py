"""The state and the log lines of one task attempt, written below the run root.

No digest includes the log, and no failure to write it stops the work.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from planish import store
from planish.base.errors import PlanishError
from planish.base.telemetry import LogFormatter
from planish.records import layout
from planish.run import lock
from planish.run.events import record_earlier_attempt
from planish.store.documents import read_json, write_json
from planish.store.processes import process_start

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 60.0
"""Seconds between two uploads of log lines; KFP's pages lose them when a run is terminated."""


def process_age_seconds() -> float:
    """Return the seconds since the start of this process."""
    started = process_start(os.getpid()) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started if started else 0.0


_has_begun = False
"""True after the first task of this process, which alone waited for the process to start."""

EARLIER = "earlier"
"""Key, in a `running` entry, of the entry of the earlier attempt that did the work."""


def earlier_success(uri: str) -> dict[str, Any] | None:
    """Return the entry of the attempt that did the work of a task; None without one."""
    try:
        entry = read_json(uri)
    except (PlanishError, OSError):
        return None
    entry = entry.get(EARLIER, entry)
    return entry if entry.get("state") == "done" else None


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        # A task in another thread than the main one collects only lines of its thread.
        is_main = threading.current_thread() is threading.main_thread()
        self._thread = None if is_main else threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if self._thread in (None, record.thread):
            self.lines.append(self.format(record))


class StageLog:
    """The log of one task attempt; use it as a context manager around the work."""

    def __init__(self, root: str, stage: str, iteration: int, shard: int):
        self._root = root
        self.uri = layout.stage_log(root, stage, iteration, shard)
        attempt = os.environ.get("KFP_RETRY_INDEX", "0")
        self.text_uri = f"{self.uri.removesuffix('.json')}-{attempt}.txt"
        self.entry: dict[str, Any] = {
            "stage": stage,
            "iteration": iteration,
            "shard": shard,
            "start_seconds": time.time(),
            "startup_seconds": 0.0 if _has_begun else round(process_age_seconds(), 3),
        }
        self._lines = _Lines()
        self._lines.setFormatter(LogFormatter())
        self._ended = threading.Event()
        self._gave_up = False
        self._earlier: dict[str, Any] | None = None
        self._shipper = threading.Thread(target=self._ship, name="stage-log", daemon=True)

    def __enter__(self) -> StageLog:
        """Start to collect and upload log lines."""
        global _has_begun
        _has_begun = True
        logging.getLogger().addHandler(self._lines)
        self._shipper.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Upload the remaining lines."""
        self._ended.set()
        self._shipper.join(timeout=FLUSH_SECONDS)
        logging.getLogger().removeHandler(self._lines)
        self._flush()

    def give_up(self) -> None:
        """Write nothing more: the store has just failed, and each further try would wait again."""
        self._gave_up = True

    def _ship(self) -> None:
        while not self._ended.wait(FLUSH_SECONDS):
            self._flush()
            if self._gave_up:
                continue
            try:
                # The heartbeat shows that the run lives to those who cannot see its processes.
                lock.beat(self._root, lock.current_holder())
            except (PlanishError, OSError) as error:
                logger.warning("heartbeat not written root=%s error=%s", self._root, error)

    def _flush(self) -> None:
        if self._gave_up or not self._lines.lines:
            return
        text = "\n".join([*self._lines.lines, ""])
        try:
            store.write(self.text_uri, text.encode())
        except (PlanishError, OSError) as error:
            logger.warning("log lines not written uri=%s error=%s", self.text_uri, error)

    def write(self, state: str, **facts: Any) -> None:
        """Write the state (`running`, `done`, `failed`) with more facts.

        An attempt that found the work done keeps times, metrics and lines of the earlier attempt.
        """
        if self._gave_up:
            return
        if state == "running":
            record_earlier_attempt(self._root, self.uri, self.entry["start_seconds"])
        now = time.time()
        self.entry.update(state=state, seconds=now - self.entry["start_seconds"], **facts)
        entry = self.entry
        try:
            self._earlier = self._earlier or earlier_success(self.uri)
            if self._earlier and state == "running":
                entry = {**entry, EARLIER: self._earlier}
            elif self._earlier and facts.get("already_done"):
                entry, self._gave_up = {**self._earlier, "already_done": True}, True
            write_json(self.uri, entry)
        except (PlanishError, OSError) as error:
            logger.warning("stage log not written uri=%s error=%s", self.uri, error)
