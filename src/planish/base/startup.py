"""The first steps of a program, and the flag that is set when it must end."""

from __future__ import annotations

import atexit
import gc
import threading

ENDING = threading.Event()
"""Set once this process gets SIGTERM; uploads then run without pauses."""


def spare_collections() -> None:
    """Make garbage collection rare in this process, and skip it at the end.

    By default Python collects after every 700 new objects and once at the end. Together that takes
    a third of the CPU time of a rank that loads torch and transformers and has little other
    work.
    """
    gc.set_threshold(20_000, 20, 20)
    atexit.register(gc.freeze)
