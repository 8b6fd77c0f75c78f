"""What a program does first, and what all of it must know of its end."""

from __future__ import annotations

import atexit
import gc
import threading

ENDING = threading.Event()
"""Set once this process is asked to end: uploads are spread over no more time."""


def spare_collections() -> None:
    """Let this process look for garbage seldom, and no more at its end.

    By itself Python looks after every 700 new objects and once more at the end: together a third of
    the processor time of a rank that loads torch and transformers and has little to do.
    """
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)
