"""The boundary before each step, where all ranks leave together once one of them is asked to."""

from __future__ import annotations

import logging
import signal
import threading

import torch

from planish.base.errors import EXIT_TRANSIENT
from planish.base.parallel import Ranks
from planish.base.startup import ENDING
from planish.run.signals import Terminated

logger = logging.getLogger(__name__)


class Sigterm(threading.Event):
    """An event that SIGTERM sets, in place of ending this process, once it has been looked at.

    Ranks look at it before each step. Until the first one a rank may be loading or scoring for
    long: it ends at once.
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


def leave_together(ranks: Ranks, asked: threading.Event | None) -> None:
    """Leave if one of the ranks, all of which call this alike, was `asked` to.

    Raises:
        Terminated: with the exit code of what may be tried again.
    """
    if asked is None:
        return
    heard = ranks.max(torch.tensor([float(asked.is_set())]))
    if heard.item():
        raise Terminated(signal.SIGTERM, EXIT_TRANSIENT)
