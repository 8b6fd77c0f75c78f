"""Other ways to tell how unlike its peers a machine is, for comparison with the published one.

Source: Minder, arXiv 2411.01791, section 6 (Mahalanobis distances, raw windows, concatenated
embeddings, one integrated model). Each is a detector whose traces are made in another way; what
follows from the traces, continuity above all, is the same for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from planish.minder.detect.config import MinderConfig
from planish.minder.detect.denoise import WINDOW, Denoiser, Models, windows_of
from planish.minder.detect.detector import Detector, Seen
from planish.minder.detect.distances import (
    Trace,
    compared_values,
    comparison_groups,
    distance_sums,
    known_windows,
    normal_scores,
)
from planish.minder.detect.frame import F32, F64, I64, Job, Mask
from planish.minder.detect.preprocess import Prepared

TOGETHER = "all_metrics"
"""Name of the one trace of detectors that join all metrics."""
STATIC_SECONDS = 60
"""A static alert looks at the mean of so many seconds, as `avg_over_time(x[1m])` does."""
_BLOCK_WINDOWS = 64

StaticLimits = Mapping[str, tuple[float, float]]
"""Metric to the normalised values outside of which a machine is called faulty."""


@dataclass(frozen=True)
class Joined:
    """All usable metrics of a frame, window by window."""

    metrics: tuple[str, ...]
    """M of the configuration's, in its order."""
    windows: tuple[F32, ...]
    """One [W, N, 8] for each."""
    present: Mask
    """[W, N], machines of which the windows of all metrics are known."""


class JointDetector(Detector):
    """Makes one trace of all metrics together."""

    def traces(self, prepared: Prepared, job: Job) -> dict[str, Trace]:
        """Return the trace under the name `TOGETHER`; nothing when no metric can be used."""
        names = tuple(name for name in self.config.detect.metrics if name in prepared.values)
        if not names:
            return {}
        rules, frame = self.config.detect, prepared.frame
        values = [compared_values(prepared, name, rules, job) for name in names]
        unknown = np.logical_or.reduce([prepared.masked[name] for name in names])
        present = known_windows(unknown)
        data = Joined(names, tuple(windows_of(one) for one in values), present)
        trace = Trace.empty(*present.shape)
        groups = comparison_groups(frame.machines, rules, job)

        first = int(frame.ts[0]) if frame.num_seconds else 0
        together = np.concatenate(values, axis=1)
        seen = Seen(first, together, np.tile(unknown, len(names)), trace)
        which = self.renew(TOGETHER, seen)
        trace.present[which] = present[which]
        for start in range(0, len(which), _BLOCK_WINDOWS):
            rows = which[start : start + _BLOCK_WINDOWS]
            vectors = self.vectors(data, rows)
            for columns in groups:
                cells = np.ix_(rows, columns)
                trace.put(cells, self.distances(vectors[:, columns], present[cells]))
        return {TOGETHER: trace}

    def vectors(self, data: Joined, rows: I64) -> F32:
        """Return [R, N, d] of some windows."""
        raise NotImplementedError

    def distances(self, vectors: F32, present: Mask) -> F32:
        """Return [R, N], how unlike the others each machine is."""
        return distance_sums(vectors, self.config.detect.distance, present)


class ConcatenatedDetector(JointDetector):
    """Compares the embeddings of all metrics as one long vector."""

    def vectors(self, data: Joined, rows: I64) -> F32:
        """Return the embeddings one after the other."""
        parts = [
            _embed(self.models.denoisers[name], windows[rows])
            for name, windows in zip(data.metrics, data.windows, strict=True)
        ]
        return np.concatenate(parts, axis=2)


class IntegratedDetector(JointDetector):
    """Compares reconstructions of one model over all metrics."""

    def __init__(self, models: Models, config: MinderConfig, integrated: Denoiser) -> None:
        """Take the model; it reads and gives windows [K, 8 * M], samples of one second together."""
        super().__init__(models, config)
        self.integrated = integrated

    def vectors(self, data: Joined, rows: I64) -> F32:
        """Return the reconstructions; a metric that can not be used is alike on all machines."""
        place = dict(zip(data.metrics, data.windows, strict=True))
        unused = np.full((len(rows), data.present.shape[1], WINDOW), 0.5, np.float32)
        columns = [
            place[name][rows] if name in place else unused for name in self.config.detect.metrics
        ]
        together = np.stack(columns, axis=3)
        return _embed(self.integrated, together.reshape(*together.shape[:2], -1))


class MahalanobisDetector(JointDetector):
    """Mahalanobis distance of each machine's window statistics from the mean of its peers."""

    def vectors(self, data: Joined, rows: I64) -> F32:
        """Return [R, N, 2 * M], mean and deviation of each window."""
        parts = []
        for windows in data.windows:
            block = windows[rows].astype(np.float64)
            parts += [block.mean(axis=2), block.std(axis=2)]
        return np.stack(parts, axis=2).astype(np.float32)

    def distances(self, vectors: F32, present: Mask) -> F32:
        """Return Mahalanobis distances, covariance over the machines."""
        return mahalanobis(vectors.astype(np.float64), present).astype(np.float32)


class ZscoreDetector(Detector):
    """The z-score of each machine's window mean over the machines, metric by metric."""

    def traces(self, prepared: Prepared, job: Job) -> dict[str, Trace]:
        """Return a trace for each metric; the score is |z|."""
        found = {}
        groups = comparison_groups(prepared.frame.machines, self.config.detect, job)
        for name in self.config.detect.metrics:
            if name not in prepared.values:
                continue
            windows = windows_of(compared_values(prepared, name, self.config.detect, job))
            trace = Trace.empty(*windows.shape[:2])
            trace.present[:] = known_windows(prepared.masked[name])
            trace.sums[:] = windows.mean(axis=2)
            for columns in groups:
                here, means = trace.present[:, columns], trace.sums[:, columns]
                trace.scores[:, columns] = np.abs(normal_scores(means, here))
            found[name] = trace
        return found


class StaticDetector(Detector):
    """Static alerts: a machine whose minute mean leaves the limits of healthy jobs."""

    def __init__(self, models: Models, config: MinderConfig, limits: StaticLimits) -> None:
        """Take the limits, as `static_limits` fits them."""
        super().__init__(models, config)
        self.static_limits = limits

    def traces(self, prepared: Prepared, job: Job) -> dict[str, Trace]:
        """Return a trace for each metric; the score is 1 outside of the limits."""
        del job
        found = {}
        for name in self.config.detect.metrics:
            if name not in prepared.values or name not in self.static_limits:
                continue
            low, high = self.static_limits[name]
            means = minute_means(prepared.values[name])[WINDOW - 1 :]
            trace = Trace.empty(*means.shape)
            trace.present[:] = known_windows(prepared.masked[name])
            trace.sums[:] = means
            trace.above[:] = np.maximum(low - means, means - high)
            trace.scores[:] = trace.above > 0
            found[name] = trace
        return found


def minute_means(values: F32) -> F32:
    """Return the mean of the last 60 s at each second [T, N]; of fewer at the beginning.

    Example:
        >>> minute_means(np.array([[1.0], [3.0]], np.float32)).ravel()
        array([1., 2.], dtype=float32)
    """
    total = np.cumsum(values, axis=0, dtype=np.float64)
    total[STATIC_SECONDS:] -= total[:-STATIC_SECONDS].copy()
    count = np.minimum(np.arange(1, len(values) + 1), STATIC_SECONDS)
    means: F32 = (total / count[:, None]).astype(np.float32)
    return means


def static_limits(healthy: Sequence[Prepared], *, tail: float = 0.01) -> StaticLimits:
    """Return the quantiles of the minute means of healthy jobs as limits.

    Args:
        healthy: prepared frames.
        tail: share of the minutes of healthy machines that lies below, and above.
    """
    limits = {}
    for name in sorted({name for one in healthy for name in one.values}):
        means = [
            minute_means(one.values[name])[STATIC_SECONDS::STATIC_SECONDS].ravel()
            for one in healthy
            if name in one.values
        ]
        low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
        limits[name] = (float(low), float(high))
    return limits


def mahalanobis(vectors: F64, present: Mask) -> F64:
    """Return each machine's distance from the mean of all, covariance after Ledoit and Wolf.

    Args:
        vectors: [W, N, F], window by window.
        present: [W, N], machines that count.

    Returns:
        [W, N]; 0 where not present.

    Example:
        >>> square = np.array([[[1.0, 1], [1, -1], [-1, 1], [-1, -1]]])
        >>> mahalanobis(square, np.ones((1, 4), bool)).round(3)
        array([[1.414, 1.414, 1.414, 1.414]])
    """
    weight = present[..., None]
    count = np.maximum(present.sum(axis=1), 1)
    centre = np.where(weight, vectors, 0.0).sum(axis=1, keepdims=True) / count[:, None, None]
    x = np.where(weight, vectors - centre, 0.0)
    solved = np.linalg.solve(ledoit_wolf(x, count), x.transpose(0, 2, 1))
    squares = np.einsum("wnf,wfn->wn", x, solved)
    distances: F64 = np.sqrt(np.maximum(squares, 0.0))
    return distances


def ledoit_wolf(x: F64, count: I64) -> F64:
    """Return shrunken covariances [W, F, F] of centred vectors.

    Args:
        x: [W, N, F], centred; rows of zeros are no observations.
        count: [W], observations of each window.

    A multiple of the identity is added so that alike machines have a covariance with an inverse.
    """
    features = x.shape[2]
    identity = np.eye(features)
    n = count[:, None, None].astype(np.float64)
    sample = x.transpose(0, 2, 1) @ x / n
    mean = np.trace(sample, axis1=1, axis2=2)[:, None, None] / features
    spread = ((sample - mean * identity) ** 2).sum(axis=(1, 2)) / features
    fourth = ((x**2).sum(axis=2) ** 2).sum(axis=1) / count
    error = (fourth - (sample**2).sum(axis=(1, 2))) / (count * features)
    error = np.clip(error, 0.0, spread)
    share = np.divide(error, spread, out=np.ones_like(error), where=spread > 0)[:, None, None]
    covariance: F64 = (1 - share) * sample + share * mean * identity + 1e-9 * identity
    return covariance


def _embed(denoiser: Denoiser, windows: F32) -> F32:
    """Return [W, N, d] of [W, N, k]."""
    flat = np.ascontiguousarray(windows, np.float32).reshape(-1, windows.shape[2])
    return denoiser.embed(flat).reshape(*windows.shape[:2], -1)
