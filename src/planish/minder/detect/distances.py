"""How unlike its peers each machine is, window by window.

Source: Minder, arXiv 2411.01791, section 4.4 (sum of pairwise distances, normal score).
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
Mask = NDArray[np.bool_]

Distance = Literal["euclidean", "manhattan", "chebyshev"]

_BLOCK_BYTES = 256 << 10
"""Pairwise distances of one block stay in the cache."""


def distance_sums(
    embeddings: F32, distance: Distance = "euclidean", present: Mask | None = None
) -> F32:
    """Return the sum of the distances from each machine to all others.

    Euclidean distances come from products, after the windows' mean over the machines has been
    taken away: without that the squares of equal machines would cancel badly.

    Args:
        embeddings: [W, N, d].
        distance: between two embeddings.
        present: [W, N], False for machines that are not compared in a window.

    Returns:
        [W, N]; 0 where not present.

    Example:
        >>> distance_sums(np.array([[[0.0], [3.0], [4.0]]], np.float32))
        array([[7., 4., 5.]], dtype=float32)
    """
    windows, machines, _ = embeddings.shape
    here = np.ones((windows, machines), np.float32)
    if present is not None:
        here = present.astype(np.float32)
    sums = np.empty((windows, machines), np.float32)
    if distance == "euclidean":
        left, right = _factors(embeddings, here)
    rows = max(1, min(machines, _BLOCK_BYTES // (4 * machines)))
    pairs = np.empty((rows, machines), np.float32)
    for window in range(windows):
        for start in range(0, machines, rows):
            stop = min(machines, start + rows)
            block = pairs[: stop - start]
            if distance == "euclidean":
                np.matmul(left[window, start:stop], right[window], out=block)
                np.maximum(block, 0.0, out=block)
                # Rounding must not give a machine a distance from itself.
                block[np.arange(stop - start), np.arange(start, stop)] = 0.0
                np.sqrt(block, out=block)
            else:
                _grid_distances(embeddings[window], start, distance, block)
            np.matmul(block, here[window], out=sums[window, start:stop])
    sums *= here
    return sums


def _factors(x: F32, here: F32) -> tuple[F32, F32]:
    """Return [W, N, d + 2] and [W, d + 2, N] whose products are the squared distances."""
    weight = here[..., None]
    x = x - (x * weight).sum(1, keepdims=True) / np.maximum(weight.sum(1, keepdims=True), 1)
    x = (x * weight).astype(np.float32)
    squares = np.einsum("wnd,wnd->wn", x, x)[..., None]
    ones = np.ones_like(squares)
    left = np.concatenate([-2 * x, squares, ones], axis=2)
    right = np.concatenate([x, ones, squares], axis=2).transpose(0, 2, 1)
    return left, np.ascontiguousarray(right)


def _grid_distances(x: F32, start: int, distance: Distance, out: F32) -> None:
    """Write the distances of some machines from all others, one coordinate at a time."""
    out[:] = 0.0
    for place in range(x.shape[1]):
        gap = np.abs(x[start : start + len(out), None, place] - x[None, :, place])
        if distance == "manhattan":
            out += gap
        else:
            np.maximum(out, gap, out=out)


def normal_scores(sums: F32, present: Mask | None = None) -> F32:
    """Return how many standard deviations each machine's sum lies above the mean of all.

    Args:
        sums: [W, N] of `distance_sums`.
        present: [W, N], machines that are compared.

    Returns:
        [W, N]; 0 in windows whose machines are all alike.

    Example:
        >>> normal_scores(np.array([[1.0, 1.0, 1.0, 5.0]], np.float32)).round(3)
        array([[-0.577, -0.577, -0.577,  1.732]], dtype=float32)
    """
    exact = sums.astype(np.float64)
    here = np.ones(sums.shape, bool) if present is None else present
    count = np.maximum(here.sum(axis=1, keepdims=True), 1)
    mean = (exact * here).sum(axis=1, keepdims=True) / count
    centred = np.where(here, exact - mean, 0.0)
    deviation = np.sqrt((centred**2).sum(axis=1, keepdims=True) / count)
    # Sums that differ by rounding alone are equal.
    alike = deviation <= 1e-6 * np.maximum(mean, 1e-12)
    scores = np.divide(centred, deviation, out=np.zeros_like(centred), where=~alike)
    result: F32 = scores.astype(np.float32)
    return result


def distances_above_median(sums: F32, length: int, present: Mask | None = None) -> F32:
    """Return each machine's sum above the median one, per peer and per sample of a window.

    Args:
        sums: [W, N].
        length: samples of a window, so that the unit is that of the normalised metric.
        present: [W, N], machines that are compared.
    """
    here = np.ones(sums.shape, bool) if present is None else present
    if here.all():
        median = np.median(sums, axis=1, keepdims=True)
    else:
        # A window of which nothing is known has no median, and needs none.
        known = here | ~here.any(axis=1, keepdims=True)
        median = np.nanmedian(np.where(known, sums, np.nan), axis=1, keepdims=True)
    count = here.sum(axis=1, keepdims=True)
    peers = np.maximum(count - 1, 1) * np.float32(np.sqrt(length))
    return np.where(here, (sums - median) / peers, 0.0).astype(np.float32)


def threshold(theta: float, kappa: float | None, machines: int) -> float:
    """Return the score above which a machine of a job with N is a candidate.

    No score of N machines exceeds sqrt(N - 1), which one odd machine among equal ones has, so a
    fixed theta could never fire in a small job.

    Example:
        >>> round(threshold(2.0, 0.9, 4), 3), threshold(2.0, 0.9, 64)
        (1.559, 2.0)
    """
    if kappa is None:
        return theta
    return min(theta, kappa * math.sqrt(machines - 1))
