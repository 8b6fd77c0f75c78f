"""Replay: calls the detector on a recorded trace, minute by minute, as the service would have.

A trace does not record which machines belonged to the job at which time. A machine belongs to the
job from its first sample. A machine that falls silent has left if another machine joined at about
that time. Otherwise it stays and is reported: only a cluster knows that a job was made smaller.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planish.minder.act.alerts import AlertBook
from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import Models
from planish.minder.detect.frame import Frame
from planish.minder.detect.job_monitor import JobMonitor
from planish.minder.detect.preprocess import last_rows
from planish.minder.detect.result import Result
from planish.minder.lab.cases import Case

FAULT_KINDS = ("dissimilar", "silent", "job_wide")
"""Kinds of alerts that a replay returns; alerts about the telemetry are left out."""

_TOGETHER_SECONDS = 60
"""Seconds after the start within which a machine's first sample counts as the start."""
_CLIPPED_SHARE = 0.01
"""Share of values outside a metric's limits above which the limits are wrong."""
_REPLACED_SECONDS = 300
"""Largest time in seconds between one machine's last sample and the first of its replacement."""


@dataclass(frozen=True)
class Alarm:
    """An alert of `FAULT_KINDS` that began."""

    machine: str
    """Node name; empty for an event of the whole job."""
    time: int
    """Unix second of the call that raised it."""
    kind: str
    metric: str


@dataclass(frozen=True)
class Call:
    """One call of the detector during a replay, at a unix second."""

    now: int
    result: Result
    alarms: tuple[Alarm, ...]
    seconds: float


def replay(case: Case, models: Models, config: MinderConfig, *, every: int = 0) -> Iterator[Call]:
    """Yield one call after the other on a trace; each sees only the samples before it.

    `every` is the number of seconds between calls, by default `service.interval_seconds`.
    """
    frame = case.frame
    every = every or config.service.interval_seconds
    monitor = JobMonitor(frame.job, models, config)
    book = AlertBook(config.service.window_seconds)
    if not frame.num_seconds:
        return
    membership = Membership(frame, config)
    start, stop = int(frame.ts[0]), int(frame.ts[-1]) + 1
    # The last call is at the end of the trace, even if less than a step after the one before.
    for now in [*range(start + every, stop, every), stop]:
        begun = time.perf_counter()
        machines = membership.at(now)
        piece = frame.slice(now - config.service.window_seconds, now)
        if len(machines) < frame.num_machines:
            piece = piece.select(machines)
        result = monitor.call(piece, stages=case.stages, waiting=case.waiting, board=case.board)
        alarms = tuple(
            Alarm(alert.machine, now, alert.kind, alert.metric)
            for alert in book.update(result, machines)
            if not alert.ended and alert.kind in FAULT_KINDS
        )
        yield Call(now, result, alarms, time.perf_counter() - begun)


def notes_of(results: Sequence[Result]) -> list[str]:
    """Return notes that are needed to judge the results of a trace, a line each."""
    count, notes = len(results), []
    clipped: Counter[str] = Counter()
    skipped: Counter[tuple[str, str]] = Counter()
    for result in results:
        clipped.update(result.clipped)
        skipped.update(result.skipped.items())
    notes += [
        f"{metric} was not judged in {times} of {count} calls: {reason}"
        for (metric, reason), times in sorted(skipped.items())
        if 2 * times > count
    ]
    notes += [
        f"{total / count:.0%} of {metric} lies outside its limits; give those of this hardware in "
        "the table `limits` (`planish minder calibrate --traces`)"
        for metric, total in sorted(clipped.items())
        if total > _CLIPPED_SHARE * count
    ]
    intervals = results[-1].intervals if results else {}
    notes += [
        f"samples of {metric} come every {seconds:g} s: a machine must differ for as much longer"
        for metric, seconds in sorted(intervals.items())
    ]
    if not any(result.is_judged for result in results):
        notes.append("nothing could be judged: that no machine is named says nothing")
    return notes


class Membership:
    """The machines of a job at each time, as far as its trace shows them."""

    def __init__(self, frame: Frame, config: MinderConfig) -> None:
        self.frame = frame
        self._silent_after = max(1, config.preprocess.silent_after_seconds)
        self._heard = np.zeros((frame.num_seconds, frame.num_machines), bool)
        for real in frame.mask.values():
            self._heard |= real
        never = frame.num_seconds
        self._first = np.where(self._heard.any(axis=0), self._heard.argmax(axis=0), never)

    def at(self, now: int) -> tuple[str, ...]:
        """Return the machines at a unix second, sorted."""
        count = int(np.searchsorted(self.frame.ts, now))
        known = self._first < count
        last = last_rows(self._heard[:count])
        silent = np.flatnonzero(known & (count - 1 - last > self._silent_after))
        arrivals = [first for first in self._first[known].tolist() if first > _TOGETHER_SECONDS]
        gone = set()
        for machine in sorted(silent.tolist(), key=lambda i: (last[i], i)):
            near = [at for at in arrivals if abs(at - last[machine]) <= _REPLACED_SECONDS]
            if near:
                arrivals.remove(min(near))
                gone.add(machine)
        return tuple(
            name for i, name in enumerate(self.frame.machines) if known[i] and i not in gone
        )
