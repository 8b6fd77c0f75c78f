"""Checkpoints of one training run: saves on a schedule, retention by rules, and resume.

The loop calls `step` after every training step; on SIGTERM all ranks save at the same step before
the machine goes away.
"""

from __future__ import annotations

import json
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from planish.base import telemetry
from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    CheckpointNotFound,
)
from planish.checkpoint.adapters.base import collect_roles
from planish.checkpoint.commit import catalog
from planish.checkpoint.saving.agree import SaveOptions
from planish.checkpoint.saving.engine import SaveEngine, default_engine
from planish.checkpoint.saving.finish import SaveHandle
from planish.checkpoint.watch.monitor import CheckpointInfo
from planish.store import Store, open_store, uri_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

logger = logging.getLogger(__name__)

DAMAGED = (CheckpointCorrupt, CheckpointIncomplete, CheckpointNotFound)
"""Errors after which `resume` tries the next older checkpoint."""


@dataclass(frozen=True)
class Resumed:
    """Checkpoint from which a run continues."""

    info: CheckpointInfo
    skipped: tuple[tuple[str, str], ...] = ()
    """Place and reason of each newer checkpoint that could not be loaded."""


@dataclass(frozen=True)
class Schedule:
    """Rules for saves and for retention."""

    interval: int
    """Steps between saves, at least 1."""
    keep_last: int = 3
    """Number of the newest checkpoints that stay, at least 1."""
    keep_every: int = 0
    """Checkpoints whose step is a multiple of it stay; 0 for no such rule."""
    pins: tuple[int | str, ...] = ()
    grace_s: float = 30.0
    """Time limit of the last save, after SIGTERM, seconds."""
    max_failures: int = 2
    """Number of failed saves in a row that training tolerates; the next one is raised."""

    def __post_init__(self) -> None:
        least = {"interval": 1, "keep_last": 1, "keep_every": 0, "grace_s": 0, "max_failures": 0}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"`{name}` must be at least {lowest}, got {getattr(self, name)}")

    def is_due(self, step: int) -> bool:
        """Return whether a save is planned at this step."""
        return step > 0 and step % self.interval == 0


class CheckpointManager:
    """Owns the root of a run: `step` in the loop, `resume` before it, `close` after it."""

    def __init__(
        self,
        root: str,
        schedule: Schedule,
        framework: str | Mapping[str, str] = "plain",
        *,
        process_group: ProcessGroup | None = None,
        engine: SaveEngine | None = None,
        hear_sigterm: bool = False,
        **options: Any,
    ) -> None:
        """Use `root` for this run; a collective of the ranks of the group.

        Args:
            engine: engine to use instead of the group's own.
            hear_sigterm: on SIGTERM save at the next step and set `should_stop`; only from the main
                thread.
            options: further fields of `SaveOptions` (`inflight`, `timeout_s`, ...).
        """
        self.root, self.schedule, self.framework = uri_of(root).rstrip("/"), schedule, framework
        self.group = process_group
        self.engine = engine or default_engine(process_group)
        self.failures: deque[tuple[str, BaseException]] = deque(maxlen=16)
        """Place and error of the saves that failed, latest last."""
        self.should_stop = False
        """True once the last save after SIGTERM has been staged: leave the loop."""
        self._options = options
        self._handles: deque[SaveHandle] = deque()
        self._failed_in_a_row = 0
        self._term = threading.Event()
        self._stop_at = -1
        self._stop_name = f"stop/{self.engine.control.serial('managers')}"
        self._previous: Any = None
        if hear_sigterm:
            self._previous = signal.signal(signal.SIGTERM, lambda *_: self._term.set())

    def place(self, step: int) -> str:
        """Return the URI of the checkpoint of a step."""
        return f"{self.root}/step-{step:08d}"

    def will_save_at(self, step: int) -> bool:
        """Return whether `step(step, ...)` is going to save."""
        return self.schedule.is_due(step) or self._stop_at == step

    def step(self, step: int, state: Mapping[str, Any]) -> SaveHandle | None:
        """Save if it is time; call it after every training step on every rank.

        `step` is the number of steps done. Raises a `CheckpointError` once more saves in a row have
        failed than the schedule tolerates, or if the last save after SIGTERM has failed.
        """
        self._look()
        if self._must_stop(step):
            handle = self.save(step, state, timeout_s=max(0.1, self.schedule.grace_s), pace_s=0.0)
            self.should_stop = True
            handle.result(self.schedule.grace_s)
            return handle
        return self.save(step, state) if self.schedule.is_due(step) else None

    def save(self, step: int, state: Mapping[str, Any], **options: Any) -> SaveHandle:
        """Save now; a collective. Retention follows once the checkpoint is visible.

        A skipped save (`inflight="skip"`) does not count as a failure.
        """
        options = {"step": step, **self._options, **options}
        handle = self.engine.save(
            lambda: collect_roles(state, self.framework),
            SaveOptions(self.place(step), **options),
            after_commit=self._retain,
        )
        if not handle.skipped:
            self._handles.append(handle)
        return handle

    def wait(self, timeout: float | None = None) -> None:
        """Wait for all saves under way; raise the error of the newest one, or `TimeoutError`."""
        limit = None if timeout is None else time.monotonic() + timeout
        newest = self._handles[-1] if self._handles else None
        for handle in list(self._handles):
            left = None if limit is None else max(0.0, limit - time.monotonic())
            if not handle.wait_done(left):
                raise TimeoutError(f"the save of `{handle.uri}` goes on after {timeout} s")
        self._look()
        if newest is not None:
            newest.result()

    def resume(self, state: Mapping[str, Any], **options: Any) -> Resumed | None:
        """Load the newest intact checkpoint; a collective. Return None if nothing is committed.

        Rank 0 lists the checkpoints, and all ranks load the same one. If one is damaged, the error
        is logged and the next older one is tried. `options` are further arguments of `api.load`.

        Raises:
            CheckpointCorrupt: there are checkpoints, but none can be loaded.
            LayoutMismatch: the newest intact one does not fit the state.
        """
        from planish.checkpoint import api

        skipped: list[tuple[str, str]] = []
        for pin in self._pins():
            info, fault = None, ""
            try:
                info = api.load(pin, state, self.framework, process_group=self.group, **options)
            except DAMAGED as error:
                fault = f"{type(error).__name__}: {error}"
            # If one rank finds a checkpoint damaged, all ranks skip it.
            call = self.engine.control.call(f"loaded {pin}", 300.0)
            faults = call.gather(fault.encode(), "faults")
            first = next(filter(None, faults), b"") if faults is not None else None
            fault = call.broadcast(first, "first fault").decode()
            if info is not None and not fault:
                return Resumed(info, tuple(skipped))
            fault = fault or "a rank could not load it"
            logger.error(telemetry.event("checkpoint_skipped", uri=pin, reason=fault))
            skipped.append((pin, fault))
        if skipped:
            raise CheckpointCorrupt(
                f"`{self.root}` must hold a whole checkpoint, but none of {len(skipped)} can be "
                f"loaded: {skipped[0][0]}: {skipped[0][1]}"
            )
        return None

    def close(self) -> None:
        """Wait for the saves under way, as `wait`, and restore the handling of SIGTERM."""
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None
        self.wait()

    def _must_stop(self, step: int) -> bool:
        """Return whether all ranks are to make their last save at this step.

        The first rank with the signal publishes the number of the next step. Every rank reads it by
        that step at the latest, because a training step needs all ranks.
        """
        control = self.engine.control
        if self._stop_at < 0:
            said = control.said(self._stop_name)
            if not said and self._term.is_set():
                said = control.first_to_say(self._stop_name, str(step + (control.size > 1)))
            self._stop_at = int(said) if said else -1
        return 0 <= self._stop_at <= step and not self.should_stop

    def _look(self) -> None:
        """Record the outcomes of ended saves; raise after too many failures in a row."""
        while self._handles and self._handles[0].done():
            handle = self._handles.popleft()
            try:
                handle.result()
            except Exception as error:
                logger.error(telemetry.event("save_failed", uri=handle.uri, reason=error))
                self.failures.append((handle.uri, error))
                self._failed_in_a_row += 1
                if self._failed_in_a_row > self.schedule.max_failures:
                    raise
            else:
                self._failed_in_a_row = 0

    def _retain(self, storage: Store, path: str) -> None:
        rules = self.schedule
        folder = path.rpartition("/")[0]
        keep: dict[str, Any] = {"keep_last": rules.keep_last, "keep_every": rules.keep_every}
        catalog.retain(storage, folder, **keep, pins=rules.pins)
        catalog.gc(storage, folder, grace_s=catalog.GRACE_SECONDS)

    def _pins(self) -> list[str]:
        """Return pins of the committed checkpoints, newest first, as rank 0 lists them."""
        call = self.engine.control.call(f"list {self.root}", 300.0)

        def find() -> bytes:
            entries = catalog.list_checkpoints(*open_store(self.root))
            pins = [entry.pin for entry in reversed(entries)]
            return json.dumps(pins).encode()

        listed: list[str] = json.loads(call.decide(find, "pins"))
        return listed
