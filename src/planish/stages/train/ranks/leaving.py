"""Ranks that leave together: one of them is asked to end, and all end before their next step.

What an iteration has done until then is lost, and the retry does it again to the same digests.
A save that is under way is finished first: between two steps there is none.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Any, cast

import torch

from planish.base.errors import EXIT_TRANSIENT
from planish.base.parallel import Ranks
from planish.run.signals import Terminated
from planish.stages.train.trainer import Trainer

logger = logging.getLogger(__name__)


def hear_sigterm() -> threading.Event:
    """Return an event that SIGTERM sets from now on, in place of ending this process."""
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    logger.info("rank leaves before its next step once it gets SIGTERM")
    return asked


class LeavingTrainer:
    """A trainer whose steps begin with the question whether any rank was asked to end."""

    def __init__(self, trainer: Trainer, ranks: Ranks, asked: threading.Event) -> None:
        """Wrap a trainer.

        Args:
            trainer: does the work.
            ranks: this process among those that leave together.
            asked: set where this process was asked to end.
        """
        self._trainer, self._ranks, self._asked = trainer, ranks, asked
        self._steps, self._began = 0, time.monotonic()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def step(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Make a step of the policy, or leave."""
        self._leave_if_asked()
        return self._trainer.step(*arguments, **options)

    def value_step(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Make a step of the critic, or leave."""
        self._leave_if_asked()
        return self._trainer.value_step(*arguments, **options)

    def _leave_if_asked(self) -> None:
        """End all ranks if one was asked to.

        Raises:
            Terminated: with the exit code of what may be tried again.
        """
        asked = torch.tensor([float(self._asked.is_set())])
        if self._ranks.max(asked).item():
            seconds = time.monotonic() - self._began
            logger.warning("left steps_lost=%d seconds_lost=%.1f", self._steps, seconds)
            raise Terminated(signal.SIGTERM, EXIT_TRANSIENT)
        self._steps += 1


def leaving(trainer: Trainer, ranks: Ranks, asked: threading.Event | None) -> Trainer:
    """Return the trainer with ranks that leave together; as it is where nobody is heard."""
    if asked is None:
        return trainer
    return cast("Trainer", LeavingTrainer(trainer, ranks, asked))
