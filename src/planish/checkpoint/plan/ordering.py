"""Small array idioms that planning repeats: packed sort keys, ranges, runs of equal values."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from planish.checkpoint.format.geometry import I64

Flags = NDArray[np.bool_]
"""One truth value for each row."""
_LIMIT = 1 << 62


def order_by(*columns: I64) -> I64:
    """Return the stable order of rows by non-negative columns, the first one most important.

    Columns are packed into one word where they fit, which sorts several times faster.

    Example:
        >>> order_by(np.array([1, 0, 1]), np.array([2, 3, 1])).tolist()
        [1, 2, 0]
    """
    spans = [int(column.max(initial=0)) + 1 for column in columns]
    if math.prod(spans) >= _LIMIT:
        return np.lexsort(columns[::-1]).astype(np.int64)
    key = columns[0]
    for column, span in zip(columns[1:], spans[1:], strict=True):
        key = key * span + column
    return np.argsort(key, kind="stable").astype(np.int64)


def ranges(starts: I64, counts: I64) -> I64:
    """Return `start, start + 1, ...` for each start, one after the other.

    Example:
        >>> ranges(np.array([5, 0]), np.array([2, 3])).tolist()
        [5, 6, 0, 1, 2]
    """
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    result: I64 = np.repeat(starts - (ends - counts), counts)
    result += np.arange(total)
    return result


def fresh(*columns: I64) -> Flags:
    """Return [k]: whether a row differs from the one before in any column.

    Example:
        >>> fresh(np.array([4, 4, 5])).tolist()
        [True, False, True]
    """
    result = np.ones(len(columns[0]), bool)
    if len(result):
        result[1:] = False
        for column in columns:
            result[1:] |= column[1:] != column[:-1]
    return result


def run_sums(values: I64, starts: I64) -> I64:
    """Return the sum of `values` from each start to the next; exact, and 0 rows are fine."""
    if not len(starts):
        return np.zeros(0, np.int64)
    return np.add.reduceat(values, starts).astype(np.int64)


def before(counts: I64) -> I64:
    """Return [k]: the sum of all counts before each row.

    Example:
        >>> before(np.array([2, 3, 1])).tolist()
        [0, 2, 5]
    """
    return np.cumsum(counts) - counts


def strides_of(lengths: I64) -> I64:
    """Return [k, n]: elements from one index to the next in row-major boxes of `lengths` [k, n].

    Example:
        >>> strides_of(np.array([[2, 3, 4]])).tolist()
        [[12, 4, 1]]
    """
    strides = np.ones_like(lengths)
    for dim in range(lengths.shape[1] - 2, -1, -1):
        strides[:, dim] = strides[:, dim + 1] * lengths[:, dim + 1]
    return strides


def fit(sides: I64, width: int, fill: int) -> I64:
    """Return padded coordinates [k, n] with another number of dimensions, [k, width].

    Dimensions over `width` must be padding.
    """
    if sides.shape[1] >= width:
        return sides[:, :width]
    missing = width - sides.shape[1]
    return np.pad(sides, ((0, 0), (0, missing)), constant_values=fill)
