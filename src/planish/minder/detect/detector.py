"""Detector of one job: it tries metric after metric for a machine that stays unlike its peers.

Source: Minder, arXiv 2411.01791, sections 4.4 and 4.5.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.continuity import View, conclude
from planish.minder.detect.denoise import WINDOW, Models, touching, windows_of
from planish.minder.detect.distances import Trace, compared_values, comparison_groups, fill_trace
from planish.minder.detect.frame import F32, I64, Frame, Job, Mask
from planish.minder.detect.metrics_table import METRICS, columns_of
from planish.minder.detect.preprocess import Prepared, prepare
from planish.minder.detect.result import Result, make_result

_SCORE_WINDOWS = 60
"""Newest windows over which a machine's score is averaged."""


@dataclass
class Seen:
    """One metric as the last call computed it."""

    first: int
    values: F32
    masked: Mask
    trace: Trace


class Detector:
    """Detector of one job; a call computes only windows that changed since the last call.

    A new detector computes all windows, so results never depend on earlier calls.
    """

    def __init__(self, models: Models, config: MinderConfig) -> None:
        self.models, self.config = models, config
        self.windows_computed = 0
        """Windows that the last call computed, over all metrics."""
        self.prepared: Prepared | None = None
        """Preprocessed metrics of the last call; None before a call and for a job that is too
        small."""
        self.last: Mapping[str, Trace] = {}
        self.seconds: Mapping[str, float] = {}
        """Duration in seconds of each stage of the last call."""
        self._denoise_seconds = 0.0
        self._machines: tuple[str, ...] = ()
        self.groups: list[I64] = []
        """Groups of machines that are compared with each other, as column numbers."""
        self._seen: dict[str, Seen] = {}

    def call(self, frame: Frame, job: Job | None = None) -> Result:
        """Return the result for one frame of a job, e.g. its last 15 minutes."""
        started = time.perf_counter()
        rules, job = self.config.detect, job or Job()
        self.windows_computed, self._denoise_seconds = 0, 0.0
        self.prepared, self.last, self.seconds = None, {}, {}
        few = frame.num_machines < rules.min_machines
        if few and (frame.num_machines < 2 or not self.config.preprocess.silent_after_seconds):
            return make_result(frame, self.config, "too_few_machines", started)
        prepared = prepare(
            frame, self.config, self.models.limits, board=job.board, scales=job.scales
        )
        prepared = _without_hidden(prepared, job)
        self.prepared = prepared
        groups = comparison_groups(frame.machines, rules, job)
        if frame.machines != self._machines or (
            [columns.tolist() for columns in groups]
            != [columns.tolist() for columns in self.groups]
        ):
            self._seen = {}
        self._machines, self.groups = frame.machines, groups
        is_prepared = time.perf_counter()
        # Machines of a small job can not be compared, but silent machines are found.
        traces = self.traces(prepared, job) if not few else {}
        self._seen = {name: self._seen[name] for name in traces if name in self._seen}
        seconds = np.zeros(frame.num_seconds, bool)
        for start, end in job.ignored:
            seconds |= (frame.ts >= start) & (frame.ts < end)
        ignored = np.asarray(windows_of(seconds[:, None])[:, 0].any(axis=1))
        self.last = traces
        compared = {name: seen.values for name, seen in self._seen.items()}
        view = View(prepared, traces, groups, self.config, ignored, job, compared)
        result = conclude(view, self.models.denoisers, started)
        self.seconds = {
            "preprocess": is_prepared - started,
            "denoise": self._denoise_seconds,
            "detect": time.perf_counter() - is_prepared - self._denoise_seconds,
        }
        return result

    def newest_scores(self) -> dict[str, dict[str, float]]:
        """Return the mean normal score over the newest windows, by metric and machine."""
        return {
            name: dict(zip(self._machines, newest.mean(axis=0).tolist(), strict=True))
            for name, trace in self.last.items()
            if len(newest := trace.scores[-_SCORE_WINDOWS:])
        }

    def traces(self, prepared: Prepared, job: Job) -> dict[str, Trace]:
        """Return the trace of each usable metric, in the order in which metrics are tried."""
        traces: dict[str, Trace] = {}
        for name in columns_of(self.config.detect.metrics, prepared.values):
            denoiser = self.models.denoisers.get(METRICS[name].name)
            if name not in prepared.values or denoiser is None:
                continue
            values = compared_values(prepared, name, self.config.detect, job, self.groups)
            masked = prepared.masked[name]
            width = denoiser.embed(np.zeros((1, WINDOW), np.float32)).shape[1]
            trace = Trace.empty(~touching(masked), width)
            first = int(prepared.frame.ts[0]) if len(values) else 0
            touched = self.renew(name, Seen(first, values, masked, trace))
            self._denoise_seconds += fill_trace(
                trace, touched, values, denoiser, self.groups, self.config.detect
            )
            traces[name] = trace
        return traces

    def renew(self, name: str, seen: Seen) -> Mask:
        """Copy the unchanged windows of a metric from the trace of the last call.

        Returns:
            [W, N], True for the other windows, which the caller must compute.
        """
        old, values = self._seen.get(name), seen.values
        changed = np.ones(values.shape, bool)
        if old is not None and old.values.shape[1] == values.shape[1]:
            shift = seen.first - old.first
            low, high = max(0, -shift), min(len(values), len(old.values) - shift)
            if high > low:
                mine, theirs = slice(low, high), slice(low + shift, high + shift)
                changed[mine] = values[mine] != old.values[theirs]
                changed[mine] |= seen.masked[mine] != old.masked[theirs]
            high -= WINDOW - 1
            if high > low:
                mine, theirs = slice(low, high), slice(low + shift, high + shift)
                for attribute in ("sums", "scores", "above", "embedded"):
                    getattr(seen.trace, attribute)[mine] = getattr(old.trace, attribute)[theirs]
        touched = touching(changed)
        self.windows_computed += int(touched.any(axis=1).sum())
        self._seen[name] = seen
        return touched


def _without_hidden(prepared: Prepared, job: Job) -> Prepared:
    """Mask the times in which machines wait for others, and the times before they count."""
    frame = prepared.frame
    since = np.array([job.since.get(name, 0) for name in frame.machines])
    hidden = frame.ts[:, None] < since
    for column, name in enumerate(frame.machines):
        for stretch in job.waiting.get(name, ()):
            low, high = np.searchsorted(frame.ts, stretch)
            hidden[low:high, column] = True
    if not hidden.any():
        return prepared
    return replace(
        prepared,
        values={name: np.where(hidden, 0, array) for name, array in prepared.values.items()},
        masked={name: masked | hidden for name, masked in prepared.masked.items()},
        silent_seconds=np.minimum(prepared.silent_seconds, frame.ts[-1] - since),
    )
