"""Baselines: lasting differences between healthy machines, e.g. of collectors, power caps, stages.

The paper has no baselines: it compares machines as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from planish.minder.detect.config import DetectConfig
from planish.minder.detect.distances import away_from_peers, floor_of, median_of_known
from planish.minder.detect.frame import F32, I64, Mask

CHUNK_SECONDS = 60
"""Length of a chunk: history stores one median a chunk, later one median of 2, 4, 8, ... chunks."""

_MATURE_SECONDS = 600
"""Seconds of healthy history after which a baseline stops learning while any machine is a
candidate."""
_MAX_CHUNKS = 64
_FLOOR_WITHOUT_FLOORS = 0.02
_SETTLED = 0.25
"""A new baseline replaces the old one only if the two differ by more than this share of the floor.
Otherwise windows computed earlier stay valid."""
_ALIKE_SHARE = 0.1
"""Two machines have similar differences if these are no further apart than the floor plus this
share of them."""
_SINGLE_SHARE = 0.145
"""Largest difference in power that a single machine may have as its role, as a share of the fleet's
highest median minute (power caps of single boards)."""
_GROWTH = 1.25
"""A machine's baseline is computed again when its history has grown by this factor, so that old
windows stay valid meanwhile."""


@dataclass(frozen=True)
class History:
    """The measurements that a baseline learns from: values [T, N] and masks [T, N] by metric. A
    mask is True where the value is not known.
    """

    ts: I64
    values: Mapping[str, F32]
    masked: Mapping[str, Mask]
    groups: Sequence[I64]
    """Groups of machines that are compared with each other, as column numbers."""


class Baseline:
    """The lasting difference of each machine from the fleet's median, metric by metric.

    History grows while the job is healthy. It stores medians of one minute, later of two minutes,
    four and so on, at most 64 of them. If the two halves of a machine's history disagree by more
    than the metric's floor, the machine keeps its earlier baseline, or has none.
    """

    def __init__(self, config: DetectConfig, *, is_role: bool = True) -> None:
        self.config, self._is_role = config, is_role
        self.machines: tuple[str, ...] = ()
        self.suspects: Collection[str] = ()
        """Machines that some job has named lately: they may be faulty, so they get no role."""
        self.refused: dict[str, list[str]] = {}
        """Map from metric to the machines whose difference is too large for a role and lies on the
        bad side: GPUs that draw little power, networks that send many pauses."""
        self.until = 0
        """Unix second up to which measurements have been processed."""
        self._stride = 1
        self._chunks: dict[str, list[F32]] = {}
        self._waiting: dict[str, list[tuple[int, F32]]] = {}
        """Medians of 2^k chunks that wait until `_stride` chunks are complete, the longest
        first."""
        self._levels: dict[str, float] = {}
        """Map from metric to the fleet's median in its busiest chunk."""
        self._used: dict[str, dict[str, float]] = {}
        self._decided: dict[str, dict[str, int]] = {}

    @property
    def mature(self) -> Mask:
        """[N], True for machines with at least `_MATURE_SECONDS` of history in some metric."""
        counts = np.zeros(len(self.machines), int)
        for chunks in self._chunks.values():
            if chunks:
                counts = np.maximum(counts, np.isfinite(np.stack(chunks)).sum(axis=0))
        seconds = counts * self._stride * CHUNK_SECONDS
        return np.asarray(seconds >= _MATURE_SECONDS)

    @property
    def begun(self) -> bool:
        """True once the history is long enough for a first baseline."""
        seconds = max(map(len, self._chunks.values()), default=0) * self._stride * CHUNK_SECONDS
        return seconds >= self.config.baseline_early_seconds

    def keep(self, machines: Sequence[str]) -> None:
        """Set the machines; forget the history of all others."""
        names = tuple(machines)
        if names == self.machines:
            return
        old = {name: place for place, name in enumerate(self.machines)}
        places = [old.get(name, len(old)) for name in names]

        def moved(row: F32) -> F32:
            return np.append(row, np.float32(np.nan))[places]

        for rows in self._chunks.values():
            rows[:] = map(moved, rows)
        for waiting in self._waiting.values():
            waiting[:] = [(count, moved(row)) for count, row in waiting]
        self._used = {
            metric: {name: value for name, value in used.items() if name in names}
            for metric, used in self._used.items()
        }
        for decided in self._decided.values():
            for name in old.keys() - set(names):
                decided.pop(name, None)
        self.machines = names

    def add(self, history: History, until: int, unsure: Mask) -> None:
        """Add the complete chunks since the last call to the history.

        Seconds from `until` on are left out, and so are the machines that the mask `unsure` [N]
        marks.
        """
        ts = history.ts
        if not len(ts):
            return
        self.until = max(self.until, int(ts[0]))
        while self.until + CHUNK_SECONDS <= min(until, int(ts[-1]) + 1):
            rows = slice(*np.searchsorted(ts, [self.until, self.until + CHUNK_SECONDS]).tolist())
            for metric, array in history.values.items():
                masked = history.masked[metric][rows]
                level = max(self._levels.get(metric, 0.0), float(np.median(array[rows])))
                self._levels[metric] = level
                away = away_from_peers(array[rows], masked, history.groups)
                row = _median(np.where(masked, np.nan, away))
                row[unsure] = np.nan
                self._append(metric, row)
            self.until += CHUNK_SECONDS
        self._decide()

    def skip(self, until: int) -> None:
        """Leave out measurements before the unix second `until`, which may be unhealthy."""
        self.until = max(self.until, until)

    def table(self) -> dict[str, dict[str, float]]:
        """Return the baselines by metric and machine, normalised. A machine that is missing has
        baseline 0.
        """
        return {metric: used for metric, used in self._used.items() if used}

    def unknown(self, metric: str) -> list[str]:
        """Return the machines that have no baseline in a metric yet."""
        known = self._decided.get(metric, {})
        return [name for name in self.machines if name not in known]

    def _append(self, metric: str, row: F32) -> None:
        waiting = self._waiting.setdefault(metric, [])
        waiting.append((1, row))
        while len(waiting) > 1 and waiting[-1][0] == waiting[-2][0]:
            (count, second), (_, first) = waiting.pop(), waiting.pop()
            waiting.append((2 * count, _median(np.stack([first, second]))))
        if waiting[0][0] < self._stride:
            return
        chunks = self._chunks.setdefault(metric, [])
        chunks.append(waiting.pop(0)[1])
        if len(chunks) >= _MAX_CHUNKS:
            self._stride *= 2
            for name, rows in self._chunks.items():
                pairs = zip(rows[0::2], rows[1::2], strict=False)
                self._chunks[name] = [_median(np.stack(pair)) for pair in pairs]

    def _decide(self) -> None:
        """Compute the baselines of machines whose two halves of history agree."""
        needed = max(2, -(-self.config.baseline_early_seconds // (CHUNK_SECONDS * self._stride)))
        for metric, chunks in self._chunks.items():
            rows = np.stack(chunks)
            floor = floor_of(metric, self.config)
            floor = floor if np.isfinite(floor) else _FLOOR_WITHOUT_FLOORS
            used = self._used.setdefault(metric, {})
            decided = self._decided.setdefault(metric, {})
            minutes = np.isfinite(rows).sum(axis=0) * self._stride
            last = np.array([decided.get(name, 0) for name in self.machines])
            due = (minutes >= needed * self._stride) & (minutes >= _GROWTH * last)
            if not due.any():
                continue
            agreed = _agreed(rows, floor, needed)
            if self._is_role:
                # A difference beyond the limit of roles is a fault, however long it has lasted.
                whole = median_of_known(rows.T, np.isfinite(rows).T)
                refused = self._refused(metric, agreed, whole, floor)
                wrong = {"gpu_power_draw": agreed < 0, "pfc_tx_packet_rate": agreed > 0}
                telling = refused & wrong.get(metric, False)
                names = [self.machines[place] for place in np.flatnonzero(telling)]
                self.refused[metric] = [*names, *self.suspects]
                agreed[refused] = np.nan
            for place in np.flatnonzero(due).tolist():
                name, value = self.machines[place], float(agreed[place])
                if np.isfinite(value):
                    decided[name] = int(minutes[place])
                # A comparison with NaN is false.
                if abs(value - used.get(name, 0.0)) > _SETTLED * floor:
                    used[name] = round(value, 5)

    def _refused(self, metric: str, agreed: F32, whole: F32, floor: float) -> Mask:
        """Return [N], True for machines whose difference is too large for a role.

        Several machines with a similar large difference have a role, e.g. a pipeline stage, or
        judges beside trainers, if the two halves of each one's history agree. `whole` [N] is the
        median of each machine's history.
        """
        limit = self.config.role_limit(metric)
        if metric == "gpu_power_draw" and metric not in self.config.role_limits:
            limit = max(floor, _SINGLE_SHARE * self._levels.get(metric, 1.0))
        size = np.abs(whole)
        suspect = np.isin(self.machines, list(self.suspects))
        near = np.abs(whole[:, None] - whole) <= floor + _ALIKE_SHARE * size[:, None]
        alike = near & ~suspect & (size > limit)
        is_single = (alike.sum(axis=1) < 2) | (alike & np.isnan(agreed)).any(axis=1)
        refused = (size > limit) & is_single | suspect & (size > floor)
        return np.asarray(refused & np.isfinite(agreed))

    def to_json(self) -> dict[str, Any]:
        """Return JSON values: the baselines, and the history as the medians of its two halves."""
        halves = {}
        for metric, chunks in self._chunks.items():
            if len(chunks) > 1:
                rows, half = np.stack(chunks), len(chunks) // 2
                halves[metric] = [_plain(_median(rows[:half])), _plain(_median(rows[half:]))]
        return {
            "machines": list(self.machines),
            "until": self.until,
            "minutes": max(map(len, self._chunks.values()), default=0) * self._stride,
            "halves": halves,
            "used": self._used,
        }

    @classmethod
    def from_json(
        cls, config: DetectConfig, raw: Mapping[str, Any], *, is_role: bool = True
    ) -> Baseline:
        """Restore a baseline from the values of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: the values are not of that form.
        """
        baseline = cls(config, is_role=is_role)
        baseline.machines, baseline.until = tuple(raw["machines"]), raw["until"]
        # A very long history is restored shorter, so new measurements weigh more.
        times = max(1, min(raw["minutes"] // 2, _MAX_CHUNKS // 4))
        for metric, halves in raw["halves"].items():
            first, second = (np.array(row, np.float32) for row in halves)
            baseline._chunks[metric] = [first] * times + [second] * times
        baseline._used = {metric: dict(used) for metric, used in raw["used"].items()}
        return baseline


def _agreed(rows: F32, floor: float, needed: int) -> F32:
    """Return [N], the median of each machine's known rows; NaN if they are fewer than `needed` or
    if the two halves disagree.
    """
    known = np.isfinite(rows)
    result = np.full(rows.shape[1], np.nan, np.float32)
    # Machines with equally many known rows (mostly all machines) are computed together.
    counts = known.sum(axis=0)
    for count in sorted(set(counts.tolist())):
        if count < needed:
            continue
        columns = np.flatnonzero(counts == count)
        mine = rows[:, columns].T[known[:, columns].T].reshape(len(columns), count)
        first, second = np.median(mine[:, : count // 2], 1), np.median(mine[:, count // 2 :], 1)
        agree = np.abs(first - second) <= floor
        result[columns] = np.where(agree, np.median(mine, axis=1), np.nan)
    return result


def _median(rows: F32) -> F32:
    """Return [N], the medians of the columns of [R, N]; NaN where fewer than half of the rows are
    known.
    """
    known = np.isfinite(rows)
    median = median_of_known(rows.T, known.T)
    return np.where(2 * known.sum(axis=0) >= len(rows), median, np.nan).astype(np.float32)


def _plain(row: F32) -> list[float | None]:
    return [None if np.isnan(value) else round(float(value), 5) for value in row]
