"""Values: what the critic said about responses that go on in the next iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.ragged import Array, Ragged
from planish.records.schema import Record, column, record


@record
class ValueSet(Record):
    """One row per response that its window cut, sorted by (ordinal, sample_index).

    A token keeps the value that it was given in the iteration that sampled it: the value loss clips
    around it once the response is finished.

    Example:
        >>> values = ValueSet(
        ...     ordinal=np.array([4, 4]), sample_index=np.arange(2, dtype=np.int32),
        ...     values=Ragged.from_lists([[0.5, 0.25], [0.125]], np.float32))
        >>> values.validate(), values.num_rows
        (None, 2)
    """

    SCHEMA: ClassVar[str] = "values/1"
    REMEDY: ClassVar[str] = "the train stage writes this set"

    ordinal: npt.NDArray[np.int64] = column("int64", "place of the prompt in the stream of prompts")
    sample_index: npt.NDArray[np.int32] = column("int32", "position in the group")
    values: Ragged = column("list<float32>", "of the state before each response token so far")

    @classmethod
    def from_rows(cls, rows: Mapping[tuple[int, int], Array]) -> ValueSet:
        """Build from (ordinal, sample_index) to values; rows are sorted."""
        keys = sorted(rows)
        return cls(
            ordinal=np.array([ordinal for ordinal, _ in keys], np.int64),
            sample_index=np.array([sample for _, sample in keys], np.int32),
            values=Ragged.from_lists([rows[key] for key in keys], np.float32),
        )

    def to_rows(self) -> dict[tuple[int, int], Array]:
        """Return (ordinal, sample_index) to values."""
        keys = zip(self.ordinal.tolist(), self.sample_index.tolist(), strict=True)
        return {key: self.values.row(row) for row, key in enumerate(keys)}

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""
        faults = []
        for name in ("ordinal", "sample_index"):
            lowest = getattr(self, name).min(initial=0)
            if lowest < 0:
                faults.append(f"`{name}` must be 0 or more, got {lowest}")
        step, rise = np.diff(self.ordinal), np.diff(self.sample_index)
        stuck = np.flatnonzero((step < 0) | ((step == 0) & (rise <= 0)))
        if len(stuck):
            faults.append(
                "rows must rise by (`ordinal`, `sample_index`), got "
                f"({self.ordinal[stuck[0] + 1]}, {self.sample_index[stuck[0] + 1]}) after "
                f"({self.ordinal[stuck[0]]}, {self.sample_index[stuck[0]]})"
            )
        wrong = ~np.isfinite(self.values.values)
        if wrong.any():
            faults.append(
                f"`values` must be finite, got {self.values.values[wrong][0]} "
                f"({wrong.sum()} values)"
            )
        return faults
