"""Turns of micro-batches: each micro-batch has its own thread, and one of them computes at a time.

The forward pass of a Hugging Face model is a plain call. A micro-batch that waits in the middle of
the call needs its own stack, so it has a thread. The micro-batch whose replies are complete first
computes next; among equals, the one with the lowest number. The scheduler of the machine has no
influence. One micro-batch computes while the rows of the others are in transit: this is the
ping-pong of the paper, with any number of micro-batches and an unmodified model.

Source: MegaScale-Infer, arXiv 2504.02263, section 4.1.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

Wait = Callable[[bool], list[int]]
"""Function that returns the micro-batches that may continue, in order; with True it waits for the
first."""


class _Stopped(Exception):
    """Ends a job because another job or the wait has failed."""


class Turns:
    """Runs one job for each of some micro-batches; a job gives up its turn with `pause`."""

    def __init__(self, num_micro_batches: int) -> None:
        """Start the threads; they end with `close` or with the process."""
        self.current = 0
        """Number of the micro-batch that computes."""
        self._back = threading.Semaphore(0)
        self._go = [threading.Semaphore(0) for _ in range(num_micro_batches)]
        self._jobs: dict[int, Callable[[], Any]] = {}
        self._results: dict[int, Any] = {}
        self._faults: dict[int, BaseException] = {}
        self._paused: set[int] = set()
        self._stopping = False
        for micro_batch in range(num_micro_batches):
            name = f"micro-batch-{micro_batch}"
            threading.Thread(target=self._work, args=(micro_batch,), name=name, daemon=True).start()

    def _work(self, micro_batch: int) -> None:
        while True:
            self._go[micro_batch].acquire()
            job = self._jobs.get(micro_batch)
            if job is None:
                return
            try:
                self._results[micro_batch] = job()
            except BaseException as error:  # handed to the caller of `run`
                self._faults[micro_batch] = error
            del self._jobs[micro_batch]
            self._back.release()

    def is_turn_of(self, micro_batch: int) -> bool:
        """Return whether this micro-batch has the turn."""
        return self.current == micro_batch

    def pause(self) -> None:
        """Give up the turn of the calling job, and return when it has the turn again."""
        micro_batch = self.current
        self._paused.add(micro_batch)
        self._back.release()
        self._go[micro_batch].acquire()
        if self._stopping:
            raise _Stopped

    def run(self, jobs: Mapping[int, Callable[[], Any]], wait: Wait) -> dict[int, Any]:
        """Run the jobs, started in ascending order, until all have ended; return their results.

        Raises the first error of a job or of `wait`, after all other jobs have stopped.
        """
        self._jobs = dict(jobs)
        self._results, self._faults, self._stopping = {}, {}, False
        ready = deque(sorted(jobs))
        try:
            while self._jobs and not self._faults:
                if not ready:
                    ready.extend(wait(True))
                self._resume(ready.popleft())
                ready.extend(wait(False))
        finally:
            self._stopping = True
            for micro_batch in sorted(self._paused):
                self._resume(micro_batch)
            self._jobs.clear()
        for error in self._faults.values():
            if not isinstance(error, _Stopped):
                raise error
        return self._results

    def _resume(self, micro_batch: int) -> None:
        """Let one micro-batch compute until it pauses or ends."""
        self.current = micro_batch
        self._paused.discard(micro_batch)
        self._go[micro_batch].release()
        self._back.acquire()

    def close(self) -> None:
        """End the threads; no job may be running."""
        self._jobs.clear()
        for go in self._go:
            go.release()
