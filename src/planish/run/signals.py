"""End of a process on a signal: one exception, a time limit, and no processes left behind.

It reads the process table of Linux; elsewhere it finds no descendants.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from planish.base.startup import ENDING
from planish.store.processes import process_line

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Kubernetes sends the first, Ctrl-C the second, a closed terminal the third."""

STOP_VARIABLE = "PLANISH_STOP_SECONDS"
STOP_SECONDS = float(os.environ.get(STOP_VARIABLE, "25"))
"""Limit for a process to stop after a signal; Kubernetes kills it after 30 s, the default grace of
a pod. Ranks of a gang have more time, which `planish.run.gang.node` passes to them."""
RUN_STOP_SECONDS = STOP_SECONDS + 10.0
"""Time limit of a local task to stop, for its stage and its cleanup together."""
POLL_SECONDS = 0.1

Process = tuple[int, int]
"""Process id and start in clock ticks since boot; a later process with its id has another start."""


class Terminated(SystemExit):
    """A signal ends this process; `code` becomes the exit code unless it is caught."""

    def __init__(self, number: int, code: int) -> None:
        is_keyboard = number == signal.SIGINT
        super().__init__(
            "interrupted" if is_keyboard else f"stopped by {signal.Signals(number).name}"
        )
        self.code = code


@contextlib.contextmanager
def unwrapped(told: Sequence[Terminated]) -> Iterator[None]:
    """Raise the error of a signal in place of a later error of the block.

    Libraries replace an exception that a handler raises within them: pydantic in serializers, and
    `torch.tensor` even without a cause.
    """
    try:
        yield
    except Exception:
        if told:
            raise told[0] from None
        raise


@contextlib.contextmanager
def on_signal(act: Callable[[int], None]) -> Iterator[None]:
    """Call `act` with the number of the first signal of `STOP_SIGNALS`; later ones are ignored.

    Outside the main thread, where Python handles no signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    has_acted = False

    def handle(number: int, _: object) -> None:
        # A second signal would interrupt the reaction to the first one.
        nonlocal has_acted
        if not has_acted:
            has_acted = True
            act(number)

    # A signal that `nohup` or a shell in the background ignores stays ignored.
    handled = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def stops_with(code: int) -> Iterator[Sequence[Terminated]]:
    """Raise `Terminated` in the main thread at a signal; end anyway after `STOP_SECONDS`.

    Yields the list of signals so far, for `unwrapped`.

    Every write of a stage is complete or absent, so the process may stop anywhere. Calls that last
    longer (a rank that waits for its peers, a store that does not answer) are interrupted.
    """
    # SimpleQueue is reentrant: a handler may use it while it interrupts another use of it.
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    told: list[Terminated] = []

    def end_anyway() -> None:
        if asked.get():
            time.sleep(STOP_SECONDS)
            end_descendants(0.0)
            os._exit(code)

    def stop(number: int) -> None:
        ENDING.set()
        asked.put(True)
        told.append(Terminated(number, code))
        raise told[0]

    threading.Thread(target=end_anyway, name="stop-limit", daemon=True).start()
    try:
        with on_signal(stop):
            yield told
    finally:
        # After a signal the thread has read True already: its limit holds until the process ends.
        asked.put(False)


def _process_table() -> dict[int, tuple[int, Process]]:
    """Return the parent and the identity of every live process by its id."""
    table = {}
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        fields = process_line(pid)
        if fields and fields[0] not in ("Z", "X"):
            table[pid] = (int(fields[1]), (pid, int(fields[19])))
    return table


def _descendants(table: dict[int, tuple[int, Process]]) -> set[Process]:
    descendants: set[Process] = set()
    parents = {os.getpid()}
    while parents:
        children = {pid: process for pid, (parent, process) in table.items() if parent in parents}
        descendants.update(children.values())
        parents = set(children)
    return descendants


def end_descendants(limit_seconds: float) -> None:
    """Send SIGTERM to all descendants of this process, and kill those that stay."""
    deadline = time.monotonic() + limit_seconds
    asked: set[Process] = set()
    while True:
        table = _process_table()
        alive = {process for _, process in table.values()}
        # Processes whose parent has ended are not descendants any more, so `asked` keeps them.
        left = _descendants(table) | (asked & alive)
        is_late = time.monotonic() >= deadline
        for pid, _ in left if is_late else left - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
        if is_late or not left:
            return
        asked |= left
        time.sleep(POLL_SECONDS)
