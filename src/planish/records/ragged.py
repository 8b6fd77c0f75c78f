"""Ragged arrays: the rows of a list column as an array of values and an array of offsets."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths; row `r` is `values[offsets[r]:offsets[r + 1]]`.

    Example:
        >>> ragged = Ragged.from_lists([[1, 2, 3], [], [4]], np.int32)
        >>> ragged.row(2).tolist(), ragged.lengths.tolist()
        ([4], [3, 0, 1])
    """

    values: Array
    """[N], any numeric dtype: all rows one after another."""
    offsets: npt.NDArray[np.int64]
    """[R + 1] int64, from 0 to N, never decreasing."""

    @classmethod
    def from_lists(cls, rows: Iterable[Sequence[float] | Array], dtype: npt.DTypeLike) -> Ragged:
        """Put rows one after another."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        lengths = np.fromiter((len(a) for a in arrays), dtype=np.int64, count=len(arrays))
        values = np.concatenate(arrays) if arrays else np.empty(0, dtype=dtype)
        return cls(values, _offsets(lengths))

    @classmethod
    def empty(cls, dtype: npt.DTypeLike) -> Ragged:
        """Return an array of no rows."""
        return cls(np.empty(0, dtype=dtype), np.zeros(1, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __eq__(self, other: object) -> bool:
        """Same dtype, same rows; NaN equals NaN."""
        if not isinstance(other, Ragged):
            return NotImplemented
        return np.array_equal(self.offsets, other.offsets) and same_numbers(
            self.values, other.values
        )

    __hash__ = None  # type: ignore[assignment]

    def row(self, index: int) -> Array:
        """Return row `index` as a view, 0 <= index < R."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[R] int64."""
        return np.diff(self.offsets)

    def take(self, indices: Sequence[int] | Array) -> Ragged:
        """Return the rows `indices` in that order; rows may repeat.

        Args:
            indices: [K] int, each in 0..R-1, or [R] bool.
        """
        rows = np.asarray(indices)
        rows = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows.astype(np.int64)
        # An index of each value would take 16 times the bytes of a column of small integers.
        return Ragged.from_lists(map(self.row, rows.tolist()), self.values.dtype)

    def slice(self, start: int, stop: int) -> Ragged:
        """Return rows start..stop-1; the values are a view."""
        first, last = self.offsets[start], self.offsets[stop]
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    @staticmethod
    def concat(items: Sequence[Ragged]) -> Ragged:
        """Put the rows of all items one after another; at least one item, equal dtypes."""
        lengths = np.concatenate([item.lengths for item in items])
        return Ragged(np.concatenate([item.values for item in items]), _offsets(lengths))


def same_numbers(one: Any, other: Any) -> bool:
    """Return whether two arrays have the same dtype and numbers; NaN equals NaN."""
    is_float = one.dtype.kind == "f"
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=is_float)


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
