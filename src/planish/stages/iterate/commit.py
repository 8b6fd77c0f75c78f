"""The end of an update: a thread commits the state and exports the policy beside the next rollouts.

If the engine that samples next has its weights from the trainer, sampling waits for neither.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from planish.base.errors import (
    EXIT_CONFIG,
    EXIT_TRANSIENT,
    ConfigError,
    PeerLost,
    PlanishError,
    SaveFailed,
)
from planish.checkpoint.train_state import Control, shared_call
from planish.records.stream import StreamState
from planish.run.pins import Pins
from planish.run.signals import STOP_SECONDS
from planish.run.stage import Context, Outcome, execute
from planish.stages.export.stage import export
from planish.stages.rollout.job import read_data, whole_pins
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.ranks.worker import Trained

LIMIT_SECONDS = 12 * 3600.0
"""Longest time that ranks wait for others that still sample, judge or export."""
LEAVE_SECONDS = STOP_SECONDS
"""Time that a running commit has to finish if the task ends early."""


@dataclass(frozen=True)
class Made:
    """Policy and train state that the next iteration starts from.

    A future raises the error of the stage that failed to make its value.
    """

    data: StreamState
    """Data part of the state; pins are whole URIs."""
    files_pin: str
    """A policy in the store with the same tokenizer and configuration."""
    version: int | None = None
    """Version of the policy, if the trainers of this task have its weights in memory."""
    state_pin: Future[str] = field(default_factory=Future)
    """Pin of the state once it is committed."""
    pins: Future[Pins] = field(default_factory=Future)
    """Both pins once the policy is exported."""


def stored(pins: Pins) -> Made:
    """Return a policy and a state that are in the store; "" is no state."""
    made = Made(read_data(pins.state_pin), pins.policy_pin)
    made.state_pin.set_result(pins.state_pin)
    made.pins.set_result(pins)
    return made


def begin_commit(job: TrainJob, trained: Trained) -> Made:
    """Start the thread that waits for the state and then exports; every rank calls it."""
    call = shared_call(f"export of iteration {job.iteration}", LIMIT_SECONDS)
    data = whole_pins(trained.stream, job.root)
    made = Made(data, job.policy_pin, job.iteration)

    def end() -> None:
        try:
            state_pin = trained.commit().pin()
            # Ranks wait here for the first one: then the record of the state exists.
            call.decide(bytes, "state")
            made.state_pin.set_result(state_pin)
            made.pins.set_result(Pins(export_policy(job, state_pin, call), state_pin))
        except BaseException as error:
            reason = error if isinstance(error, Exception) else SaveFailed(repr(error))
            try:
                call.abort(reason)
            finally:
                # Everybody who waits for the pins raises it.
                if not made.state_pin.done():
                    made.state_pin.set_exception(reason)
                made.pins.set_exception(reason)

    threading.Thread(target=end, name="commit", daemon=True).start()
    return made


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
