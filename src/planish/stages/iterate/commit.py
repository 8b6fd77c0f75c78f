"""The end of an update: it commits the state and exports the policy beside the next rollouts.

The engine that samples next has its weights from the trainer. It waits for state and policy only
before it writes records with their digests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import replace

from planish.base.errors import (
    EXIT_CONFIG,
    EXIT_TRANSIENT,
    ConfigError,
    PeerLost,
    PlanishError,
    SaveFailed,
)
from planish.checkpoint.ranks.control import Control, control_of
from planish.records.stream import StreamState
from planish.run.pins import Pins
from planish.run.signals import STOP_SECONDS
from planish.run.stage import Context, Outcome, execute
from planish.stages.export.stage import export
from planish.stages.rollout.job import Start, whole_pins
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.ranks.worker import Trained

LIMIT_SECONDS = 12 * 3600.0
"""Longest time that ranks wait for others that still sample, judge or export."""
LEAVE_SECONDS = STOP_SECONDS
"""Time that a running commit has to finish if the task ends early."""


class Commit(Start):
    """Start of an iteration while the update before it is still on its way to the store."""

    def __init__(self, job: TrainJob, trained: Trained) -> None:
        """Start a thread that waits for the state and then exports; every rank does so."""
        super().__init__(Pins(job.policy_pin, ""))
        self.held_version = job.iteration
        self._job, self._trained = job, trained
        subject = f"export of iteration {job.iteration}"
        call = control_of().call(subject, LIMIT_SECONDS)
        self._call = call.twin(missing=SaveFailed)
        self._saved: Future[str] = Future()
        self._ended: Future[Pins] = Future()
        threading.Thread(target=self._end, name="commit", daemon=True).start()

    def data(self) -> StreamState:
        """Return cursor and sets of the state on its way, with whole pins."""
        return whole_pins(self._trained.stream, self._job.root)

    def state_pin(self) -> str:
        """Wait for the state and return its pin; the export of the policy follows it."""
        return self._saved.result()

    def when_exported(self, told: Callable[[str], None]) -> None:
        """Call `told` with the pin of the policy once it is exported, maybe in another thread."""

        def call(ended: Future[Pins]) -> None:
            if ended.exception() is None:
                told(ended.result().policy_pin)

        self._ended.add_done_callback(call)

    def leave(self, seconds: float) -> None:
        """Wait at most `seconds` until the commit succeeds or fails."""
        wait([self._ended], seconds)

    def _wait(self) -> Pins:
        began = time.monotonic()
        try:
            return self._ended.result()
        finally:
            self.waited_seconds += time.monotonic() - began

    def _end(self) -> None:
        try:
            state_pin = self._trained.commit().pin()
            # The record of the state exists once the first rank gets here.
            self._call.decide(bytes, "state")
            self._saved.set_result(state_pin)
            policy_pin = export_policy(self._job, state_pin, self._call)
            self._ended.set_result(Pins(policy_pin, state_pin))
        except BaseException as error:
            reason = error if isinstance(error, Exception) else SaveFailed(repr(error))
            try:
                self._call.abort(reason)
            finally:
                # Everybody who waits for the pins raises it.
                if not self._saved.done():
                    self._saved.set_exception(reason)
                self._ended.set_exception(reason)


def export_policy(job: TrainJob, state_pin: str, call: Control | None = None) -> str:
    """Export the policy of an iteration as the task `checkpoint`; returns its pin.

    With `call` several ranks share the export, and only the first one runs it as a task.
    """

    def work(context: Context) -> Outcome:
        outcome = export(context, job.policy_pin, state_pin, call)
        return replace(outcome, refs={})

    if call is not None and call.rank:
        here = job.root, "checkpoint", job.iteration, 0
        outcome = work(Context(*here, job.config, job.config_sha256, run={}))
        return str(outcome.values["policy_pin"])
    try:
        outcome = execute(
            "checkpoint", work, root=job.root, config_sha256=job.config_sha256, outputs={},
            iteration=job.iteration,
        )  # fmt: skip
    except SystemExit as end:
        raise stage_error(end) from None
    return str(outcome.values["policy_pin"])


def stage_error(end: SystemExit) -> PlanishError:
    """Return the error for a stage that ended with this code; its log names the cause."""
    code = int(end.code or 0)
    kinds: dict[int, type[PlanishError]] = {EXIT_CONFIG: ConfigError, EXIT_TRANSIENT: PeerLost}
    kind = kinds.get(code, PlanishError)
    return kind(f"a stage of this task failed with exit code {end.code}")
