"""Denoisers: turn windows of one metric into the vectors that are compared between machines.

The trained LSTM-VAE runs in numpy, which is faster here than torch. Source: Minder, arXiv
2411.01791, section 4.2. In place of a sample of the latent variable we use its mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from planish.minder.detect.frame import F32, Mask

T = TypeVar("T", bound=np.generic)

WINDOW = 8
"""Samples per window (section 4.2)."""
_BLOCK_WINDOWS = 4_096
"""Windows of one batch, small enough that the gates of the LSTM stay in the cache."""


class Denoiser(Protocol):
    """Turns windows of one metric into the vectors that are compared."""

    name: str
    """`vae`, `pca` or `none`."""
    metric: str
    version: str
    """Identifier of the model in results."""
    quality: str
    """`good`, or `degraded` if the model failed its quality gate."""

    def embed(self, windows: F32) -> F32:
        """Return the vectors [M, d] to compare, for windows [M, 8] of values in 0 .. 1."""


@dataclass(frozen=True)
class Models:
    """Models that the detector needs besides frame and configuration."""

    denoisers: Mapping[str, Denoiser]
    """Denoiser by metric; a metric without a denoiser is skipped."""
    limits: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Map from metric to the transformed values that scale to 0 and 1, where they are fitted."""


def windows_of(values: NDArray[T]) -> NDArray[T]:
    """Return [T - 7, N, 8], a view of the windows of all machines, from values [T, N]."""
    if len(values) < WINDOW:
        return np.zeros((0, values.shape[1], WINDOW), values.dtype)
    return np.lib.stride_tricks.sliding_window_view(values, WINDOW, axis=0)


def touching(flags: Mask) -> Mask:
    """Return [T - 7, N], True for windows with a flagged second, from flags [T, N]."""
    count = max(0, len(flags) - WINDOW + 1)
    # A window of eight is two windows of four, and so on.
    for reach in (1, 2, 4):
        flags = flags[:-reach] | flags[reach:]
    return flags[:count]


class Identity:
    """Returns the windows as they are: no denoising."""

    name = "none"
    quality = "good"

    def __init__(self, metric: str) -> None:
        self.metric, self.version = metric, "raw"

    def embed(self, windows: F32) -> F32:
        """Return the windows."""
        return windows


class Pca:
    """Projects windows onto their first principal components and back."""

    name = "pca"
    quality = "good"

    def __init__(self, metric: str, mean: F32, components: F32) -> None:
        """Set a fitted projection: mean [8], components [k, 8] with orthonormal rows."""
        self.metric, self.mean, self.components = metric, mean, components
        self.version = f"pca{len(components)}"
        self._projection = (components.T @ components).astype(np.float32)

    @classmethod
    def fit(cls, metric: str, windows: F32, *, components: int = 4) -> Pca:
        """Return the projection fitted to windows [M, 8]."""
        mean = windows.mean(axis=0, dtype=np.float64)
        centred = windows.astype(np.float64) - mean
        covariance = centred.T @ centred / max(1, len(windows))
        axes = np.linalg.eigh(covariance)[1][:, ::-1][:, :components].T.astype(np.float32)
        return cls(metric, mean.astype(np.float32), np.ascontiguousarray(axes))

    def embed(self, windows: F32) -> F32:
        """Return the projected windows [M, 8]."""
        restored = (windows - self.mean) @ self._projection + self.mean
        return restored.astype(np.float32, copy=False)


def shapes(hidden: int, latent: int) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights in one metric's model."""
    gates = 4 * hidden
    result: dict[str, tuple[int, ...]] = {}
    for part, width in (("encoder", 1), ("decoder", latent)):
        result[f"{part}.weight_ih_l0"] = (gates, width)
        result[f"{part}.weight_hh_l0"] = (gates, hidden)
        result[f"{part}.bias_ih_l0"] = result[f"{part}.bias_hh_l0"] = (gates,)
    for part in ("mean", "logvar"):
        result |= {f"{part}.weight": (latent, hidden), f"{part}.bias": (latent,)}
    return result | {"output.weight": (1, hidden), "output.bias": (1,)}


@dataclass(frozen=True)
class _Lstm:
    """Weights of one LSTM layer; gates are in the order input, forget, output, cell.

    The weights of the first three gates are halved: sigmoid(x) = (1 + tanh(x / 2)) / 2, so one call
    of tanh serves all gates.
    """

    weights: F32
    """[4 * hidden, hidden + width + 1]: columns for the hidden state, the inputs and the bias."""

    @classmethod
    def of(cls, weights: Mapping[str, F32], part: str) -> _Lstm:
        state = weights[f"{part}.weight_hh_l0"]
        hidden = state.shape[1]
        gates = np.arange(4 * hidden).reshape(4, hidden)
        order = gates[[0, 1, 3, 2]].ravel()
        scale = np.repeat(np.array([0.5, 1.0], np.float32), [3 * hidden, hidden])[:, None]
        bias = weights[f"{part}.bias_ih_l0"] + weights[f"{part}.bias_hh_l0"]
        whole = np.concatenate([state, weights[f"{part}.weight_ih_l0"], bias[:, None]], axis=1)
        return cls(whole[order] * scale)

    def step(self, seen: F32, c: F32, gates: F32) -> None:
        """Advance the hidden state by one step, in place.

        The first rows of `seen` [hidden + width + 1, M] are the hidden state; then come the inputs
        and a row of ones. The cells `c` are [hidden, M]. `gates` [4 * hidden, M] is a work
        buffer.
        """
        hidden = len(c)
        h = seen[:hidden]
        np.matmul(self.weights, seen, out=gates)
        np.tanh(gates, out=gates)
        open_ = gates[: 3 * hidden]
        open_ *= 0.5
        open_ += 0.5
        c *= gates[hidden : 2 * hidden]
        gates[:hidden] *= gates[3 * hidden :]
        c += gates[:hidden]
        np.tanh(c, out=h)
        h *= gates[2 * hidden : 3 * hidden]


class Vae:
    """A trained LSTM-VAE of one metric."""

    name = "vae"

    def __init__(
        self,
        metric: str,
        weights: Mapping[str, F32],
        *,
        version: str,
        quality: str = "good",
    ) -> None:
        """Set weights with the names of `shapes`."""
        self.metric, self.version, self.quality = metric, version, quality
        self._encoder, self._decoder = _Lstm.of(weights, "encoder"), _Lstm.of(weights, "decoder")
        self._mean, self._mean_bias = weights["mean.weight"], weights["mean.bias"][:, None]
        self._output, self._output_bias = weights["output.weight"], weights["output.bias"]

    def embed(self, windows: F32) -> F32:
        """Return the reconstructions [M, 8] of windows [M, 8]."""
        hidden = self._mean.shape[1]
        result = np.empty((len(windows), WINDOW), np.float32)
        for start in range(0, len(windows), _BLOCK_WINDOWS):
            block = slice(start, start + _BLOCK_WINDOWS)
            x = np.ascontiguousarray(windows[block].T, np.float32)
            count = x.shape[1]
            gates = np.empty((4 * hidden, count), np.float32)
            c = np.zeros((hidden, count), np.float32)
            seen = np.ones((hidden + 2, count), np.float32)
            seen[:hidden] = 0.0
            for row in x:
                seen[hidden] = row
                self._encoder.step(seen, c, gates)
            z: F32 = self._mean @ seen[:hidden] + self._mean_bias
            # The decoder has the same input at every step.
            seen = np.concatenate([np.zeros_like(c), z, np.ones((1, count), np.float32)])
            c[:] = 0.0
            for row in x:
                self._decoder.step(seen, c, gates)
                row[:] = (self._output @ seen[:hidden])[0]
                row += self._output_bias
            result[block] = x.T
        return result
