"""The first steps of a program, and the flag that says that it ends."""

from __future__ import annotations

import atexit
import gc
import threading

ENDING = threading.Event()
"""Set once this process gets SIGTERM: uploads then run without pauses."""


def spare_collections() -> None:
    """Let this process collect garbage seldom, and not at its end.

    By default Python collects after every 700 new objects and once at the end. Together that is a
    third of the CPU time of a rank that loads torch and transformers and has little to do.
    """
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)
