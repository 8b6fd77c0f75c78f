"""Denoisers: what is compared between machines in place of the raw window.

Source: Minder, arXiv 2411.01791, section 4.2 (one model for each metric).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

WINDOW = 8
"""Samples of a window (section 4.2)."""
_SAMPLED_WINDOWS = 256
"""About so many windows tell how well a model restores what it sees now."""


class Denoiser(Protocol):
    """Turns windows of one metric into vectors that are compared."""

    name: str
    """vae, pca or none."""
    metric: str
    """Canonical name of the metric."""
    version: str
    """Identifies the model in results."""
    quality: str
    """good, or degraded when it did not pass its gate."""

    def embed(self, windows: F32) -> F32:
        """Return [M, d] for windows [M, 8] of values in 0 .. 1."""


def windows_of(values: F32) -> F32:
    """Return the windows of all machines, one for each start.

    Args:
        values: [T, N].

    Returns:
        [T - 7, N, 8], a view; empty when T < 8.

    Example:
        >>> windows_of(np.arange(20, dtype=np.float32).reshape(10, 2)).shape
        (3, 2, 8)
    """
    if len(values) < WINDOW:
        return np.zeros((0, values.shape[1], WINDOW), np.float32)
    return np.lib.stride_tricks.sliding_window_view(values, WINDOW, axis=0)


def restoration_error(denoiser: Denoiser, values: F32, known: NDArray[np.bool_]) -> float:
    """Return the mean squared error of a denoiser on a spread sample of windows; NaN without any.

    Args:
        denoiser: gives windows back; others than such (`embedding: latent`) have no error, NaN.
        values: [T, N] in 0 .. 1.
        known: [T - 7, N], windows that count.
    """
    rows = np.flatnonzero(known.ravel())
    rows = rows[:: max(1, len(rows) // _SAMPLED_WINDOWS)]
    windows = windows_of(values).reshape(-1, WINDOW)[rows] if len(rows) else np.zeros((0, WINDOW))
    restored = denoiser.embed(windows.astype(np.float32))
    if not len(rows) or restored.shape != windows.shape:
        return float("nan")
    return float(np.mean((restored - windows) ** 2))


class Identity:
    """Compares the windows themselves: no denoising.

    Example:
        >>> Identity("cpu_usage").embed(np.zeros((2, 8), np.float32)).shape
        (2, 8)
    """

    name = "none"
    quality = "good"

    def __init__(self, metric: str) -> None:
        """Of one metric."""
        self.metric, self.version = metric, "raw"

    def embed(self, windows: F32) -> F32:
        """Return the windows."""
        return windows


class Pca:
    """Projects windows on their first principal components and back.

    Example:
        >>> waves = np.sin(np.arange(400) / 5)[:, None].astype(np.float32) / 2 + 0.5
        >>> training = windows_of(waves)[:, 0]
        >>> pca = Pca.fit("cpu_usage", training, components=3)
        >>> bool(np.abs(pca.embed(training) - training).max() < 1e-3)
        True
    """

    name = "pca"
    quality = "good"

    def __init__(self, metric: str, mean: F32, components: F32) -> None:
        """Take a fitted projection: mean [8], components [k, 8] with orthonormal rows."""
        self.metric, self.mean, self.components = metric, mean, components
        self.version = f"pca{len(components)}"
        self._projection = (components.T @ components).astype(np.float32)

    @classmethod
    def fit(cls, metric: str, windows: F32, *, components: int = 4) -> Pca:
        """Fit to windows [M, 8]."""
        mean = windows.mean(axis=0, dtype=np.float64)
        centred = windows.astype(np.float64) - mean
        covariance = centred.T @ centred / max(1, len(windows))
        found = np.linalg.eigh(covariance)[1][:, ::-1][:, :components].T.astype(np.float32)
        return cls(metric, mean.astype(np.float32), np.ascontiguousarray(found))

    def embed(self, windows: F32) -> F32:
        """Return the projected windows [M, 8]."""
        restored = (windows - self.mean) @ self._projection + self.mean
        return restored.astype(np.float32, copy=False)
