"""A fair mutex."""

from __future__ import annotations

import threading
from collections import deque


class TurnLock:
    """A mutex that serves threads in the order in which they came.

    `threading.Lock` lets a polling loop take it again at once and starve a thread that aborts.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._guard:
            if not self._held:
                self._held = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        gate.acquire()

    def __exit__(self, *_: object) -> None:
        with self._guard:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._held = False
