"""A trained LSTM-VAE as a denoiser, in numpy: a call needs no torch, and is faster without.

Source: Minder, arXiv 2411.01791, section 4.2 (the model; its latent variable is its mean here).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from planish.minder.detect.denoise import F32, WINDOW

_BLOCK = 2_048
"""Windows that go through the network together: their gates stay in the cache."""


def shapes(hidden: int, latent: int) -> dict[str, tuple[int, ...]]:
    """Return the weights that a model of one metric has.

    Example:
        >>> shapes(4, 8)["encoder.weight_hh_l0"]
        (16, 4)
    """
    gates = 4 * hidden
    found: dict[str, tuple[int, ...]] = {}
    for part, width in (("encoder", 1), ("decoder", latent)):
        found[f"{part}.weight_ih_l0"] = (gates, width)
        found[f"{part}.weight_hh_l0"] = (gates, hidden)
        found[f"{part}.bias_ih_l0"] = found[f"{part}.bias_hh_l0"] = (gates,)
    for part in ("mean", "logvar"):
        found |= {f"{part}.weight": (latent, hidden), f"{part}.bias": (latent,)}
    return found | {"output.weight": (1, hidden), "output.bias": (1,)}


@dataclass(frozen=True)
class _Lstm:
    """Weights of one layer; gates in the order input, forget, output, cell, the first three halved.

    sigmoid(x) = (1 + tanh(x / 2)) / 2, so that one call of tanh serves all gates.
    """

    inputs: F32
    """[4 * hidden, width]."""
    state: F32
    """[4 * hidden, hidden]."""
    bias: F32
    """[4 * hidden, 1]."""

    @classmethod
    def of(cls, weights: Mapping[str, F32], part: str) -> _Lstm:
        hidden = weights[f"{part}.weight_hh_l0"].shape[1]
        gates = np.arange(4 * hidden).reshape(4, hidden)
        order = gates[[0, 1, 3, 2]].ravel()
        scale = np.repeat(np.array([0.5, 1.0], np.float32), [3 * hidden, hidden])[:, None]
        bias = weights[f"{part}.bias_ih_l0"] + weights[f"{part}.bias_hh_l0"]
        return cls(
            weights[f"{part}.weight_ih_l0"][order] * scale,
            weights[f"{part}.weight_hh_l0"][order] * scale,
            bias[order, None] * scale,
        )

    def step(self, h: F32, c: F32, inputs: F32, gates: F32) -> None:
        """Advance h and c [hidden, M] in place; inputs [4 * hidden, M] are projected already."""
        hidden = len(h)
        np.matmul(self.state, h, out=gates)
        gates += inputs
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
    """A trained model as a denoiser.

    Example:
        >>> weights = {name: np.zeros(s, np.float32) for name, s in shapes(4, 8).items()}
        >>> Vae("cpu_usage", weights, version="v").embed(np.ones((3, 8), np.float32)).shape
        (3, 8)
    """

    name = "vae"

    def __init__(
        self,
        metric: str,
        weights: Mapping[str, F32],
        *,
        version: str,
        quality: str = "good",
        latent: bool = False,
    ) -> None:
        """Take weights named as in `shapes`; `latent` compares latent means."""
        self.metric, self.version, self.quality, self.latent = metric, version, quality, latent
        self._encoder, self._decoder = _Lstm.of(weights, "encoder"), _Lstm.of(weights, "decoder")
        self._mean, self._mean_bias = weights["mean.weight"], weights["mean.bias"][:, None]
        self._output, self._output_bias = weights["output.weight"], weights["output.bias"]

    def embed(self, windows: F32) -> F32:
        """Return [M, 8] reconstructions, or latent means, of windows [M, 8]."""
        width = len(self._mean) if self.latent else WINDOW
        result = np.empty((len(windows), width), np.float32)
        for start in range(0, len(windows), _BLOCK):
            block = np.ascontiguousarray(windows[start : start + _BLOCK].T, np.float32)
            result[start : start + _BLOCK] = self._block(block).T
        return result

    def _block(self, x: F32) -> F32:
        """Return [d, M] of windows [8, M]."""
        count, hidden = x.shape[1], self._encoder.state.shape[1]
        h, c = np.zeros((hidden, count), np.float32), np.zeros((hidden, count), np.float32)
        gates, inputs = (np.empty((4 * hidden, count), np.float32) for _ in range(2))
        for row in x:
            np.multiply(self._encoder.inputs, row, out=inputs)
            inputs += self._encoder.bias
            self._encoder.step(h, c, inputs, gates)
        z: F32 = self._mean @ h + self._mean_bias
        if self.latent:
            return z
        # The decoder sees the same vector at every step.
        np.matmul(self._decoder.inputs, z, out=inputs)
        inputs += self._decoder.bias
        h[:], c[:] = 0.0, 0.0
        restored = np.empty_like(x)
        for row in restored:
            self._decoder.step(h, c, inputs, gates)
            row[:] = (self._output @ h)[0]
            row += self._output_bias
        return restored
