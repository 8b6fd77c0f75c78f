"""The boundary before each step, where all ranks leave together once one has got SIGTERM."""

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
    """Event that SIGTERM sets; the first call of `is_set` installs the handler.

    Ranks call it before each step. Before the first step a rank may load or score for long, so
    SIGTERM ends it at once.
    """

    _is_heard = False

    def is_set(self) -> bool:
        """Return True once SIGTERM has arrived; the first call installs the handler."""
        if not self._is_heard:
            self._is_heard = True
            signal.signal(signal.SIGTERM, self._hear)
            logger.info("rank leaves before its next step once it gets SIGTERM")
        return super().is_set()

    def _hear(self, *_: object) -> None:
        ENDING.set()
        self.set()


def leave_together(ranks: Ranks, asked: threading.Event | None) -> None:
    """End this rank if `asked` is set on any rank; every rank calls this function.

    Raises:
        Terminated: `asked` is set on a rank; the exit code allows another attempt.
    """
    if asked is None:
        return
    heard = ranks.max(torch.tensor([float(asked.is_set())]))
    if heard.item():
        raise Terminated(signal.SIGTERM, EXIT_TRANSIENT)
