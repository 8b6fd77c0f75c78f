"""Puller: reads the frame of one job from Prometheus; each call queries only the new seconds.

The server evaluates every query at whole seconds, so no alignment is needed. A cell of the frame is
the newest sample of its second. It is NaN if the sample is too old, not a number, or next to the
reset of a counter.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.pool import ThreadPool

import numpy as np

from planish.base.errors import BackendUnavailable
from planish.minder.detect.frame import COARSE_SECONDS, F32, F64, Frame, Mask
from planish.minder.detect.metrics_table import (
    JOB_SELECTOR,
    METRICS,
    WORST,
    Metric,
    device_columns,
)
from planish.minder.detect.runs import stretches
from planish.minder.service.http import Deadline
from planish.minder.service.prometheus import (
    ANSWER_SAMPLES,
    MIN_RATE_SECONDS,
    Prometheus,
    Series,
    job_matcher,
    node_matcher,
    queries_of,
)

logger = logging.getLogger(__name__)

_DENSE_SHARE = 0.75
"""Share of seconds with a sample above which a series has one sample every second."""
_SAME_SHARE = 0.01
"""Relative difference below which two exporters of one machine are averaged."""
_RATE_JITTER = 0.1
"""Share by which a rate of idle time may exceed one second in a second."""
_EDGE_INTERVALS = 1.1
"""Distance of samples from the ends of a range, in intervals, up to which Prometheus extrapolates
the rate to the end."""
_STALE_SECONDS = 5.0
"""Seconds after which the newest sample is too old, so that the value counts as missing."""
RANKS = 16
"""Upper bound of the ranks on one machine."""
GPU_ERROR = "MachineGpuError"
"""Alert in `monitoring/rules/cluster.yaml` for a GPU that reports an error."""
_MAX_FLOAT = float(np.finfo(np.float32).max)


class Puller:
    """The last minutes of one job, second by second; earlier seconds are kept from call to call."""

    def __init__(
        self,
        prometheus: Prometheus,
        sources: Mapping[str, Metric],
        job: str,
        *,
        on_duplicate: Callable[[], None] = lambda: None,
    ) -> None:
        """Set server, metrics and job; `on_duplicate` is called for two series of one machine that
        overlap.
        """
        self._prometheus, self._sources, self._job = prometheus, dict(sources), job
        self.on_duplicate = on_duplicate
        self.intervals: dict[str, float] = {}
        """Map from metric to the median seconds between its samples."""
        self.seconds_pulled = 0
        """Seconds that the last call queried."""
        self._kept: Frame | None = None
        self._counts: dict[str, int] = {}
        """Map from metric to the number of series that its query reads."""
        self._board: tuple[tuple[str, ...], str] = ((), "")

    def pull(
        self,
        machines: Sequence[str],
        seconds: int,
        deadline: Deadline,
        *,
        end: int | None = None,
    ) -> Frame:
        """Return the frame of the last `seconds` before `end`, by default now on the server's
        clock.

        Raises:
            BackendUnavailable: a query has no answer, or a required metric has no sample.
        """
        config = self._prometheus.config
        if end is None:
            end = math.floor(self._prometheus.now(deadline)) - config.delay_seconds + 1
        names = tuple(sorted(set(machines)))
        first = start = end - seconds
        kept = self._kept
        # If a kept frame ends after `end`, the server's clock went back.
        if kept is not None and set(names) <= set(kept.machines) and start <= kept.ts[-1] < end:
            first = max(start, int(kept.ts[-1]) + 1 - config.late_seconds)
        else:
            kept = None
            self._counts.clear()
        counted = next((name for name in self._sources if METRICS[name].is_gpu), "")

        def ask(source: Metric) -> dict[str, F32]:
            beside = device_columns(source, with_count=source.name == counted)
            return self._columns([source, *beside], names, (first, end), deadline)

        values: dict[str, F32] = {}
        # The pool's threads are daemons, so they do not keep an ending process alive.
        with ThreadPool(config.concurrency) as pool:
            for columns in pool.map(ask, self._sources.values(), chunksize=1):
                values |= columns
        if kept is not None:
            before = kept.select(names).slice(start, first).values
            values = {name: np.concatenate([before[name], values[name]]) for name in values}
        held = {
            name: self._rate_seconds(seconds) if METRICS[name].kind == "counter" else seconds
            for name, seconds in self.intervals.items()
            if seconds > COARSE_SECONDS
        }
        held |= {f"{name}{WORST}": seconds for name, seconds in held.items()}
        ts = np.arange(start, end, dtype=np.int64)
        frame = Frame(self._job, ts, names, values, held=held)
        self.seconds_pulled = end - first
        self._kept = frame
        return frame

    def board(self, machines: Sequence[str], deadline: Deadline, *, end: int | None = None) -> str:
        """Return the board model of most machines; empty if no label names one."""
        names, label = tuple(sorted(set(machines))), self._prometheus.config.board_label
        gpu = next((one for one in self._sources.values() if METRICS[one.name].is_gpu), None)
        if gpu is None or not label:
            return ""
        if self._board[0] != names:
            series = gpu.selector.replace(JOB_SELECTOR, job_matcher(gpu, names))
            counts = self._at(f"count by ({label}) ({series})", deadline, end)
            most = max(counts, key=lambda count: float(count.values[-1]), default=None)
            if most is None:
                return ""
            self._board = (names, most.labels.get(label, ""))
        return self._board[1]

    def waiting(self, frame: Frame, deadline: Deadline) -> dict[str, list[tuple[int, int]]]:
        """Return, by machine, the stretches of a frame in which all ranks of the machine only wait
        for others.

        Machines whose ranks do not report their phase are missing.
        """
        nodes = node_matcher("node", frame.machines)
        said = f"planish_rank_phase{{{nodes}}}"
        waits = f'planish_rank_phase{{phase="waiting",{nodes}}}'
        query = f"count by (node) ({waits}) == on (node) count by (node) ({said})"
        start, end = int(frame.ts[0]), int(frame.ts[-1]) + 1
        answer = self._prometheus.query_range(
            query, start, end, deadline, series=RANKS * frame.num_machines
        )
        found = {}
        for series in answer:
            seen = stretches(np.isfinite(_on_grid(series, (start, end))))
            found[series.labels["node"]] = [(start + low, start + high) for low, high in seen]
        return found

    def failed_boards(self, machines: Sequence[str], deadline: Deadline) -> set[str]:
        """Return the machines with a GPU that reports an error, by the rule `MachineGpuError`."""
        names = node_matcher("node", machines)
        query = f'ALERTS{{alertname="{GPU_ERROR}",alertstate="firing",{names}}}'
        return {series.labels["node"] for series in self._at(query, deadline)}

    def _at(self, query: str, deadline: Deadline, end: int | None = None) -> list[Series]:
        """Return the values of a query in the last second before `end`, by default now."""
        if end is None:
            end = math.floor(self._prometheus.now(deadline))
        return self._prometheus.query_range(query, end - 1, end, deadline)

    def _columns(
        self,
        columns: Sequence[Metric],
        names: tuple[str, ...],
        span: tuple[int, int],
        deadline: Deadline,
    ) -> dict[str, F32]:
        """Return the values of a metric, [seconds, machines], by name of the column.

        One query answers all `columns`, since they come from the same series.

        A cell is NaN if its value can not be trusted.
        """
        config, source = self._prometheus.config, columns[0]
        selector = source.selector.replace(JOB_SELECTOR, job_matcher(source, names))
        if source.name not in self._counts:
            count = f"count({selector})"
            series = sum(int(one.values[-1]) for one in self._at(count, deadline, span[1]))
            self._counts[source.name] = series * source.series.count(JOB_SELECTOR)

        def ask(query: str, start: int) -> list[Series]:
            series = max(ANSWER_SAMPLES * len(names), self._counts[source.name])
            return self._prometheus.query_range(query, start, span[1], deadline, series=series)

        interval = self.intervals.get(source.name, 1.0)
        for _ in range(2):
            rate = self._rate_seconds(interval)
            queries = queries_of(source, names, config.series_labels, rate)
            # A gauge depends on the samples before it, a rate on the samples at both ends of its
            # range.
            before = max(rate, math.ceil(self._stale_after(interval)))
            seen = ask(queries.seen, span[0] - before)
            measured = self._interval(source.name, seen) or interval
            is_right = source.kind == "gauge" or math.ceil(4 * measured) <= rate
            interval = measured
            if is_right:
                break
        resets = ask(queries.resets, span[0]) if queries.resets else []
        wide = (span[0] - before, span[1])
        fresh = {}
        for one in seen:
            # Age of the last second with a sample, for each second; inf before the first one.
            has_sample = np.isfinite(_on_grid(one, wide))
            rows = np.arange(len(has_sample))
            last = np.maximum.accumulate(np.where(has_sample, rows, -1))
            age = np.where(last >= 0, rows - last, np.inf)
            fresh[one.key] = self._fresh(source, age, interval, before, rate)
        for one in resets:
            if one.key in fresh:
                fresh[one.key] &= ~np.isfinite(_on_grid(one, span))
        arrays = {}
        for column in columns:
            query = queries_of(column, names, config.series_labels, rate).values
            answer = ask(query, span[0])
            arrays[column.name] = self._array(column, answer, fresh, names, span)
        if source.required and not np.isfinite(arrays[source.name]).any():
            raise BackendUnavailable(
                f"`{source.name}` is required, got no sample of it for job {self._job!r}",
                code="empty",
            )
        return arrays

    def _array(
        self,
        source: Metric,
        answer: Sequence[Series],
        fresh: Mapping[tuple[tuple[str, str], ...], Mask],
        names: tuple[str, ...],
        span: tuple[int, int],
    ) -> F32:
        """Return [T, N] of the series of one column; NaN where the series are not fresh."""
        by_machine: dict[str, list[F64]] = {}
        for series in answer:
            values = _on_grid(series, span)
            self._scale(source, values)
            values[~fresh.get(series.key, np.zeros(len(values), bool))] = np.nan
            machine = source.machine_of(series.labels.get(source.node_label, ""))
            by_machine.setdefault(machine, []).append(values)
        array = np.full((span[1] - span[0], len(names)), np.nan, np.float32)
        for place, name in enumerate(names):
            if name in by_machine:
                array[:, place] = self._merged(by_machine[name])
        return array

    def _interval(self, name: str, seen: Sequence[Series]) -> float:
        """Return the median seconds between samples; 0 if there are too few samples."""
        spacings = []
        for series in seen:
            ts = np.unique(series.ts)
            if len(ts) < 4:
                continue
            if len(ts) < _DENSE_SHARE * (ts[-1] - ts[0] + 1):
                # A sample at the very end of a second counts for two seconds.
                ts = ts[np.append(True, np.diff(ts) > 1)]
            spacings.append(float(np.median(np.diff(ts))))
        if not spacings:
            return 0.0
        interval = float(np.median(spacings))
        if interval > COARSE_SECONDS and self.intervals.get(name, 0.0) <= COARSE_SECONDS:
            logger.warning(
                "coarse_samples job=%s metric=%s interval_seconds=%.1f "
                "remedy='scrape and collect every second'",
                self._job,
                name,
                interval,
            )
        self.intervals[name] = interval
        return interval

    @staticmethod
    def _scale(source: Metric, column: F64) -> None:
        """Scale one series and remove impossible values, in place."""
        had = np.isfinite(column)
        column *= source.scale
        column += source.offset
        with np.errstate(invalid="ignore"):
            bad = np.isinf(column) | (np.abs(column) > _MAX_FLOAT)
            if source.nonnegative:
                # A rate of idle time may exceed 1 by the jitter of scrapes.
                bad |= column < -_RATE_JITTER * abs(source.scale) * (source.kind == "counter")
                np.maximum(column, 0.0, out=column, where=had & ~bad)
        column[bad] = np.nan

    @staticmethod
    def _rate_seconds(interval: float) -> int:
        return max(MIN_RATE_SECONDS, math.ceil(4 * interval))

    @staticmethod
    def _stale_after(interval: float) -> float:
        return max(_STALE_SECONDS, 1.5 * interval)

    def _fresh(self, source: Metric, age: F64, interval: float, before: int, rate: int) -> Mask:
        """Return [T], True for seconds whose value depends on new enough samples."""
        if source.kind == "gauge":
            # The sample lies up to a second before the end of its second.
            gauge: Mask = age[before:] <= self._stale_after(interval) - 1
            return gauge
        # Prometheus divides the increase by the whole range. If samples are missing at an end of
        # it, e.g. after a start or before a death, the rate is too small.
        covered = age <= _EDGE_INTERVALS * interval - 1
        begin = before - rate + math.ceil(interval)
        counter: Mask = covered[before:] & covered[begin : begin + len(age) - before]
        return counter

    def _merged(self, columns: list[F64]) -> F64:
        """Merge the series of all exporters of one machine into one."""
        result = columns[0]
        for other in columns[1:]:
            both = np.isfinite(result) & np.isfinite(other)
            if both.any():
                self.on_duplicate()
            alike = both & (
                np.abs(result - other)
                <= _SAME_SHARE * np.maximum(np.abs(result), np.abs(other)) + 1e-12
            )
            # argmax gives the row in which a series starts.
            newer = np.isfinite(other).argmax() > np.isfinite(result).argmax()
            merged = np.where(np.isfinite(result), result, other)
            merged = np.where(both & newer, other, merged)
            result = np.where(alike, (result + other) / 2, merged)
        return result


def _on_grid(series: Series, span: tuple[int, int]) -> F64:
    """Return [T], the values of a series at the seconds `span[0] <= t < span[1]`; NaN elsewhere."""
    column = np.full(span[1] - span[0], np.nan)
    rows = np.rint(series.ts).astype(np.int64) - span[0]
    inside = (rows >= 0) & (rows < len(column))
    column[rows[inside]] = series.values[inside]
    return column
