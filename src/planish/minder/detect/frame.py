"""Frames: measurements of all machines of one job, second by second, and other facts on the job.

This module imports numpy only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

Samples = Mapping[str, Mapping[str, tuple[F64, F64]]]
"""(timestamps in unix seconds, values) by metric and machine, in any order."""

Stretches = Mapping[str, Sequence[tuple[int, int]]]
"""Map from machine to stretches of time `start <= t < stop` (unix seconds)."""

COARSE_SECONDS = 2.0
"""Spacing of samples, in seconds, above which a series is coarse."""
COARSEST_SECONDS = 60.0
"""Largest spacing of samples, in seconds, that a sample is repeated over."""
_DENSE_SECONDS = 1.5
_FEWEST_SPACINGS = 8
"""Fewest samples from which the spacing of a series is computed."""


@dataclass(frozen=True)
class Frame:
    """The measurements of one job on a grid of seconds."""

    job: str
    ts: I64
    """[T] unix seconds in steps of 1."""
    machines: tuple[str, ...]
    """N names of Kubernetes nodes, sorted."""
    values: dict[str, F32]
    """Metric to [T, N]; NaN where nothing was measured."""
    mask: dict[str, Mask] = field(default_factory=dict)
    """Metric to [T, N], True for a real sample; computed from `values` if not given."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Map from metric to the seconds that one measurement is valid for, where the server reports
    it."""

    def __post_init__(self) -> None:
        for name, array in self.values.items():
            self.mask.setdefault(name, np.isfinite(array))

    @property
    def num_seconds(self) -> int:
        """Number of seconds T."""
        return len(self.ts)

    @property
    def num_machines(self) -> int:
        """Number of machines N."""
        return len(self.machines)

    def slice(self, start: int, end: int) -> Frame:
        """Return the frame of the seconds `start <= t < end` (unix); its arrays are views."""
        low, high = np.searchsorted(self.ts, [start, end])
        return self._cut(np.s_[low:high], self.machines)

    def select(self, machines: Sequence[str]) -> Frame:
        """Return the frame of some machines."""
        place = {name: i for i, name in enumerate(self.machines)}
        names = tuple(sorted(machines))
        return self._cut(np.s_[:, [place[name] for name in names]], names)

    def _cut(self, cells: Any, machines: tuple[str, ...]) -> Frame:
        """Return the frame of some cells of the arrays."""
        return replace(
            self,
            ts=self.ts[cells[0] if isinstance(cells, tuple) else cells],
            machines=machines,
            values={name: array[cells] for name, array in self.values.items()},
            mask={name: array[cells] for name, array in self.mask.items()},
        )


@dataclass(frozen=True)
class Job:
    """Facts on a job besides its metrics."""

    stages: Mapping[str, str] = field(default_factory=dict)
    """Map from machine to pipeline stage."""
    baseline: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Difference of a machine from its peers in healthy history, normalised, by metric and
    machine."""
    usual: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Distance of a machine above the median machine in healthy history, by metric and machine."""
    waiting: Stretches = field(default_factory=dict)
    """Stretches in which each machine only waits for others, as its ranks report."""
    since: Mapping[str, int] = field(default_factory=dict)
    """Map from machine to the unix second from which it counts; a missing machine counts from the
    beginning."""
    unknown: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Map from metric to the machines that have no baseline yet."""
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Machines whose difference is too large for a role, by metric; all of them are in
    `unknown`."""
    board: str = ""
    """Model of the job's GPU boards; empty if not known."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Map from metric to the factor by which its limits are widened for this job."""
    turns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Longest turn in seconds, by metric and machine. A turn is a time in which a machine differed
    from its peers and then no longer did. The machine "" is a part of the job."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Map from machine to the largest number of GPUs that it has shown."""
    mature: Collection[str] = ()
    """Machines whose baselines have ten minutes of healthy history."""
    is_young: bool = False
    """True while the turns of the machines are not known."""
    asked: int = 0
    """Unix second up to which an earlier call has judged every run; 0 if there was no call. A run
    before it is not judged again, since the time before the run has left the window."""
    named: Sequence[str] = ()
    """Machines that the last call named."""
    ignored: Sequence[tuple[int, int]] = ()
    """Stretches `start <= t < end` (unix seconds) in which no machine is a candidate."""


def align(
    job: str,
    start: int,
    end: int,
    machines: Sequence[str],
    samples: Samples,
) -> Frame:
    """Return raw samples on the grid `start <= t < end`.

    Each grid point gets the nearest sample within half a second. Before that, the timestamps of a
    series are shifted by their median distance from whole seconds. If the samples of a series come
    regularly but less than once a second, a sample is valid until the next one, at most for
    `COARSEST_SECONDS`. Samples that are negative or not finite are dropped; among equal timestamps
    the last sample counts. A machine without samples keeps a column of NaN.
    """
    names = tuple(sorted(set(machines)))
    grid = np.arange(start, end, dtype=np.int64)
    values: dict[str, F32] = {}
    for metric, by_machine in samples.items():
        array = np.full((len(grid), len(names)), np.nan, np.float32)
        for column, name in enumerate(names):
            if name in by_machine:
                ts, sent = clean(*by_machine[name])
                spacing = float(np.median(np.diff(ts))) if len(ts) >= _FEWEST_SPACINGS else 0.0
                reach = spacing / 2 if _DENSE_SECONDS < spacing <= COARSEST_SECONDS else 0.5
                array[:, column] = nearest(ts - _skew(ts), sent, grid, reach=reach)
        values[metric] = array
    return Frame(job, grid, names, values)


def clean(ts: F64, values: F64) -> tuple[F64, F64]:
    """Sort samples by time and drop impossible values."""
    ts, values = np.asarray(ts, np.float64), np.asarray(values, np.float64)
    # A value that float32 can not represent is no measurement.
    good = np.isfinite(ts) & (values >= 0) & (values <= np.finfo(np.float32).max)
    ts, values = ts[good], values[good]
    order = np.argsort(ts, kind="stable")
    ts, values = ts[order], values[order]
    last = np.append(ts[1:] != ts[:-1], True) if len(ts) else np.zeros(0, bool)
    return ts[last], values[last]


def nearest(ts: F64, values: F64, grid: I64, *, reach: float = 0.5) -> F32:
    """Return the nearest sample within `reach` seconds of each grid second, or NaN."""
    if not len(ts):
        return np.full(len(grid), np.nan, np.float32)
    after = np.searchsorted(ts, grid)
    left, right = np.clip(after - 1, 0, None), np.clip(after, None, len(ts) - 1)
    # The earlier one wins a tie.
    use_left = np.abs(ts[left] - grid) <= np.abs(ts[right] - grid)
    chosen = np.where(use_left, left, right)
    close = np.abs(ts[chosen] - grid) <= reach + 1e-9
    return np.where(close, values[chosen], np.nan).astype(np.float32)


def _skew(ts: F64) -> float:
    """Return the median distance of timestamps from whole seconds, about -0.5 to 0.5."""
    fractions = ts % 1.0
    if not fractions.any():
        return 0.0
    # The circular mean finds the centre of the fractions; their median around it is the skew.
    centre = float(np.angle(np.exp(2j * np.pi * fractions).mean())) / (2 * np.pi)
    return centre + float(np.median((ts - centre + 0.5) % 1.0 - 0.5))
