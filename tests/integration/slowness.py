"""Making the ranks of a pod slow, as a machine does whose link or clock has failed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field

from tests.processes import below

STOPPED_SECONDS, RUNNING_SECONDS = 0.7, 0.3
"""In turns, of the ranks of a slow machine."""


@dataclass
class Slowness:
    """A context in which all processes below one are stopped and go on in turns."""

    process_id: int
    """First process of the pod."""
    ended: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Slowness:
        self.thread = threading.Thread(target=self._stop_and_go, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join(10)

    def _stop_and_go(self) -> None:
        while not self.ended.is_set():
            ranks = below(self.process_id)
            for number, seconds in (
                (signal.SIGSTOP, STOPPED_SECONDS),
                (signal.SIGCONT, RUNNING_SECONDS),
            ):
                for rank in ranks:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rank, number)
                # What was stopped goes on before this ends.
                time.sleep(seconds)
