"""Frames: what all machines of one job measured, second by second, and what else is known of it.

Imports numpy only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

Samples = Mapping[str, Mapping[str, tuple[F64, F64]]]
"""Metric to machine to (timestamps in unix seconds, values), in any order."""

Stretches = Mapping[str, Sequence[tuple[int, int]]]
"""Machine to stretches of time `start <= t < stop` (unix seconds)."""

COARSE_SECONDS = 2.0
"""Samples further apart than this are not second-level data."""
COARSEST_SECONDS = 60.0
"""Between samples that are further apart nothing is known."""
_DENSE_SECONDS = 1.5
_FEWEST_SPACINGS = 8
"""A series with fewer samples has no known spacing."""


@dataclass(frozen=True)
class Frame:
    """The traces of one job on a grid of seconds."""

    job: str
    ts: I64
    """[T] unix seconds, a step of 1."""
    machines: tuple[str, ...]
    """N names of Kubernetes nodes, sorted."""
    values: dict[str, F32]
    """Metric to [T, N]; NaN where nothing was measured."""
    mask: dict[str, Mask] = field(default_factory=dict)
    """Metric to [T, N], True for a real sample; made from `values` where it is not given."""
    held: Mapping[str, float] = field(default_factory=dict)
    """Metric to the seconds for which one measurement stands, where a server said so."""

    def __post_init__(self) -> None:
        for name, array in self.values.items():
            self.mask.setdefault(name, np.isfinite(array))

    @property
    def num_seconds(self) -> int:
        """Length of the grid."""
        return len(self.ts)

    @property
    def num_machines(self) -> int:
        """N."""
        return len(self.machines)

    def slice(self, start: int, end: int) -> Frame:
        """Return the seconds `start <= t < end` (unix), views of these arrays."""
        low, high = np.searchsorted(self.ts, [start, end])
        return Frame(
            self.job,
            self.ts[low:high],
            self.machines,
            {name: array[low:high] for name, array in self.values.items()},
            {name: array[low:high] for name, array in self.mask.items()},
            self.held,
        )

    def select(self, machines: Sequence[str]) -> Frame:
        """Return some of the machines."""
        place = {name: i for i, name in enumerate(self.machines)}
        names = tuple(sorted(machines))
        columns = [place[name] for name in names]
        return Frame(
            self.job,
            self.ts,
            names,
            {name: array[:, columns] for name, array in self.values.items()},
            {name: array[:, columns] for name, array in self.mask.items()},
            self.held,
        )


@dataclass(frozen=True)
class Job:
    """What is known of a job besides its metrics."""

    stages: Mapping[str, str] = field(default_factory=dict)
    """Machine to pipeline stage."""
    baseline: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric to machine to what it has differed by in healthy history, normalised."""
    usual: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Metric to machine to the distance above the median machine that it has had when healthy."""
    waiting: Stretches = field(default_factory=dict)
    """When each machine only waits for others, as far as its ranks say so."""
    since: Mapping[str, int] = field(default_factory=dict)
    """Machine to the unix second from which on it counts; from the beginning where not named."""
    unknown: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Metric to the machines whose differences in healthy history are not known yet."""
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Metric to those of them that are too far away for a role."""
    board: str = ""
    """Model of the boards that it runs on; empty when not known."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Metric to the factor by which its limits are too narrow for this job."""
    turns: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Metric to machine to the seconds for which it once differed and then no longer; the machine
    "" stands for a part of them."""
    devices: Mapping[str, int] = field(default_factory=dict)
    """Machine to the most GPUs that it has had."""
    mature: Collection[str] = ()
    """Machines whose baselines rest on history enough to last."""
    is_young: bool = False
    """The turns of its machines are not known yet."""
    asked: int = 0
    """Unix second before which an earlier call has judged every run; 0 for none. As what lay
    before a run leaves the window, the run must not be judged anew."""
    named: Sequence[str] = ()
    """Machines that the earlier call named."""
    ignored: Sequence[tuple[int, int]] = ()
    """Stretches `start <= t < end` (unix seconds) in which no machine is a candidate."""


def align(
    job: str,
    start: int,
    end: int,
    machines: Sequence[str],
    samples: Samples,
) -> Frame:
    """Put raw samples on the grid `start <= t < end`.

    Each grid point takes the sample nearest in time within half a second, after the timestamps of
    the series have been moved by their median distance from whole seconds. A series whose samples
    come regularly but less than once a second counts until the next sample, for at most
    `COARSEST_SECONDS`. Samples that are not finite, or negative, are dropped; of equal timestamps
    the last counts. A machine without samples stays, without values.
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
    """Sort samples by time and drop impossible ones."""
    ts, values = np.asarray(ts, np.float64), np.asarray(values, np.float64)
    # What float32 can not hold is no measurement.
    good = np.isfinite(ts) & (values >= 0) & (values <= np.finfo(np.float32).max)
    ts, values = ts[good], values[good]
    order = np.argsort(ts, kind="stable")
    ts, values = ts[order], values[order]
    last = np.append(ts[1:] != ts[:-1], True) if len(ts) else np.zeros(0, bool)
    return ts[last], values[last]


def nearest(ts: F64, values: F64, grid: I64, *, reach: float = 0.5) -> F32:
    """Return for each grid second the nearest sample within `reach` seconds, or NaN."""
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
    """Return how far timestamps lie from whole seconds in the median, -0.5 to 0.5 or a bit more."""
    fractions = ts % 1.0
    if not fractions.any():
        return 0.0
    # The mean on the circle finds the place of the fractions, the median about it the skew.
    centre = float(np.angle(np.exp(2j * np.pi * fractions).mean())) / (2 * np.pi)
    return centre + float(np.median((ts - centre + 0.5) % 1.0 - 0.5))
