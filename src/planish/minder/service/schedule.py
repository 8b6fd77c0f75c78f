"""Tasks that are done again and again, by a few threads and the monotonic clock.

A task is never done twice at the same time. Threads do not keep a process alive that wants to end.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

Action = Callable[[], float]
"""Does its task once and returns the seconds until the next time, from now."""

_RETRY_SECONDS = 60.0
"""A task that raised is tried again after so long."""


@dataclass
class _Task:
    action: Action
    due: float
    is_running: bool = False
    is_removed: bool = False


class Schedule:
    """Who does what when.

    Example:
        >>> schedule = Schedule(clock=lambda: 0.0)
        >>> schedule.add("hello", lambda: 60.0, after=5.0)
        >>> schedule.next_due(), schedule.run_next(), schedule.next_due()
        (5.0, True, 60.0)
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin with no task and no thread."""
        self._clock = clock
        self._tasks: dict[str, _Task] = {}
        self._changed = threading.Condition()
        self._is_stopped = False
        self._threads: list[threading.Thread] = []

    def add(self, name: str, action: Action, *, after: float = 0.0) -> None:
        """Do something from `after` seconds on; a task of the same name is replaced."""
        with self._changed:
            self._tasks[name] = _Task(action, self._clock() + after)
            self._changed.notify_all()

    def remove(self, name: str) -> None:
        """Never do a task again; one that goes on now ends by itself."""
        with self._changed:
            task = self._tasks.pop(name, None)
            if task is not None:
                task.is_removed = True

    def names(self) -> list[str]:
        """Return the names of all tasks, sorted."""
        with self._changed:
            return sorted(self._tasks)

    def next_due(self) -> float:
        """Return when the next task must be done; infinity when there is none."""
        with self._changed:
            return self._next()[1]

    def run_next(self) -> bool:
        """Do the next task now, whenever it is due; return whether there was one."""
        with self._changed:
            name, _ = self._next()
            if not name:
                return False
            task = self._tasks[name]
            task.is_running = True
        self._do(name, task)
        return True

    def start(self, threads: int, name: str) -> None:
        """Let threads do the tasks."""
        for number in range(threads):
            thread = threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def stop(self, seconds: float) -> bool:
        """Begin no task any more; return whether all that go on have ended in time."""
        end = time.monotonic() + seconds
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _next(self) -> tuple[str, float]:
        waiting = [(task.due, name) for name, task in self._tasks.items() if not task.is_running]
        if not waiting:
            return "", float("inf")
        due, name = min(waiting)
        return name, due

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._is_stopped:
                    return
                name, due = self._next()
                left = due - self._clock()
                if left > 0:
                    self._changed.wait(None if left == float("inf") else left)
                    continue
                task = self._tasks[name]
                task.is_running = True
            self._do(name, task)

    def _do(self, name: str, task: _Task) -> None:
        try:
            pause = task.action()
        except Exception:
            # One job's trouble, or a bug, must not end the watch over all others.
            logger.exception("task_failed name=%s", name)
            pause = _RETRY_SECONDS
        with self._changed:
            task.due = self._clock() + max(0.0, pause)
            task.is_running = False
            self._changed.notify_all()
