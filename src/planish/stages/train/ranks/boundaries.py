"""Boundaries between two steps, where ranks commit, and leave together once one is asked to.

With `train.commit_steps` a retry of the stage goes on from the newest commit of its iteration, on
any number of ranks and with any trainer; without, it repeats the iteration. On the same ranks both
end with the digests of an undisturbed run.

Log-probabilities, values and advantages of the batch are not committed: a retry computes them again
with the weights before the iteration, and loads the commit after that.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch

from planish import store
from planish.base.errors import (
    EXIT_TRANSIENT,
    CheckpointCorrupt,
    CheckpointError,
    LayoutMismatch,
)
from planish.base.parallel import Ranks
from planish.base.startup import ENDING
from planish.checkpoint import CheckpointManager, RandomStreams, SaveHandle, Schedule
from planish.checkpoint.commit import catalog
from planish.checkpoint.train_state import POLICY, by_role
from planish.records import layout
from planish.run.events import record_event
from planish.run.signals import STOP_SECONDS, Terminated
from planish.stages.train.progress import Progress
from planish.stages.train.ranks.job import TrainJob, clear_steps
from planish.stages.train.trainer import Trainer
from planish.stages.train.update import Step

logger = logging.getLogger(__name__)

KEEP_LAST = 2
"""Commits that are kept: where the newest is damaged, the one before is loaded."""


class StartOver(Exception):
    """No commit can be loaded, and weights may have changed: the iteration begins anew."""


class Sigterm(threading.Event):
    """An event that SIGTERM sets, in place of ending this process, once it has been looked at.

    Ranks look at it before each step. Until the first one there is nothing to keep, and a rank may
    be loading or scoring for long: it ends at once.
    """

    _is_heard = False

    def is_set(self) -> bool:
        """Tell whether SIGTERM has come; the first look begins to hear it."""
        if not self._is_heard:
            self._is_heard = True
            signal.signal(signal.SIGTERM, self._hear)
            logger.info("rank leaves before its next step once it gets SIGTERM")
        return super().is_set()

    def _hear(self, *_: object) -> None:
        ENDING.set()
        self.set()


class StepBoundaries:
    """The boundaries between the steps of one iteration; all ranks call every method alike."""

    def __init__(self, job: TrainJob, ranks: Ranks, asked: threading.Event | None) -> None:
        """Commit nothing yet; `asked` is set once this process is to end, None if nobody asks."""
        self._job, self._ranks, self._asked = job, ranks, asked
        self._manager: CheckpointManager | None = None
        self._saves: list[tuple[int, float, SaveHandle]] = []
        self._steps, self._began = 0, time.monotonic()
        self.resumed = 0
        """Steps that an earlier attempt has made."""

    def resume(
        self, trainer: Trainer, progress: Progress, num_steps: int
    ) -> tuple[list[Step], Progress]:
        """Load the newest commit of this iteration, as `update.Boundaries` says.

        Raises:
            StartOver: there are commits, but none that can be loaded; they are gone now.
        """
        config = self._job.train
        self._steps, self._began = 0, time.monotonic()
        if not config.commit_steps:
            return [], progress
        place = self._job.steps_place
        if self._ranks.is_first:
            opened, key = store.open_store(layout.step_commits(self._job.root, self._job.iteration))
            for entry in catalog.list_checkpoints(opened, key):
                if place.rpartition("/")[2] not in entry.path.split("/"):
                    reason = "of another configuration or of other inputs"
                    logger.warning("commit ignored uri=%s reason=%s", entry.uri, reason)
        self._manager = CheckpointManager(
            place,
            Schedule(config.commit_steps, keep_last=KEEP_LAST),
            trainer.state().framework,
            # The next step never waits for the uploads of two earlier commits.
            inflight="skip",
            overwrite=True,
            timeout_s=config.timeout_seconds,
        )
        state = self._state(trainer, [], progress)
        try:
            found = self._manager.resume(state)
        except (CheckpointCorrupt, LayoutMismatch) as error:
            logger.error("commits removed, the iteration begins anew reason=%s", error)
            if self._ranks.is_first:
                clear_steps(self._job)
            self._ranks.barrier()
            raise StartOver(str(error)) from error
        steps: list[Step] = []
        if found is not None:
            committed = state[POLICY]["extra"]
            steps, progress = committed["steps"], Progress.from_json(committed["progress"])
        self._steps = self.resumed = len(steps)
        if steps and self._ranks.is_first:
            facts: dict[str, Any] = {"step": len(steps), "of": num_steps}
            facts |= {"trainer": config.trainer} | config.grid(self._ranks).to_json()
            record_event(self._job.root, "resumed", self._job.iteration, **facts)
        logger.info(
            "resumed steps=%d of=%d commit_steps=%d", len(steps), num_steps, config.commit_steps
        )
        return list(steps), progress

    def reach(self, trainer: Trainer, steps: Sequence[Step], progress: Progress) -> None:
        """Commit if it is time, and leave if one rank was asked to; called before each step.

        Raises:
            Terminated: with the exit code of what may be tried again.
            CheckpointError: more commits in a row have failed than `Schedule.max_failures`.
        """
        asked = False
        if self._asked is not None:
            heard = self._ranks.max(torch.tensor([float(self._asked.is_set())]))
            asked = bool(heard.item())
        is_new, self._steps = len(steps) > self._steps, len(steps)
        manager = self._manager
        if manager is not None and is_new and (asked or manager.will_save_at(progress.step)):
            state = self._state(trainer, steps, progress)
            if asked:
                limits = {"inflight": "wait", "timeout_s": STOP_SECONDS}
                handle: SaveHandle | None = manager.save(progress.step, state, **limits)
            else:
                handle = manager.step(progress.step, state)
            assert handle is not None, "the manager saves when it says so"
            if not handle.skipped:
                self._saves.append((self._steps, time.monotonic(), handle))
                stall = handle.stall_seconds
                logger.info("commit begun step=%d stall_seconds=%.3f", progress.step, stall)
        if asked:
            raise Terminated(signal.SIGTERM, EXIT_TRANSIENT)

    def leave(self) -> None:
        """Finish the commits under way, and log what a retry has to do again."""
        steps, since = self.resumed, self._began
        deadline = time.monotonic() + STOP_SECONDS
        for number, began, handle in self._saves:
            try:
                handle.result(max(0.0, deadline - time.monotonic()))
            except (CheckpointError, TimeoutError) as error:
                logger.warning("commit not finished step=%d error=%s", number, error)
            else:
                steps, since = number, began
        lost, seconds = self._steps - steps, time.monotonic() - since
        logger.warning("left steps_lost=%d seconds_lost=%.1f", lost, seconds)

    def close(self) -> None:
        """Wait for the commits under way, and remove all: the state of the iteration is there."""
        if self._manager is not None:
            try:
                self._manager.close()
            except CheckpointError as error:
                logger.warning("commit failed, the iteration is done without it error=%s", error)
        if self._ranks.is_first:
            clear_steps(self._job)

    def _state(
        self, trainer: Trainer, steps: Sequence[Step], progress: Progress
    ) -> dict[str, dict[str, Any]]:
        """Return what is committed after `steps`, and what a commit is loaded into."""
        grid = self._job.train.grid(self._ranks)
        streams = RandomStreams(
            seed=self._job.seed,
            step=progress.step,
            coordinate={"rank": self._ranks.rank},
            layout=grid.to_json(),
        )
        state = by_role({**trainer.state().parts, "random": streams})
        state[POLICY]["extra"] = {"steps": list(steps), "progress": progress.to_json()}
        return state
