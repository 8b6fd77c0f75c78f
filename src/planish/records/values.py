"""Values: the critic's estimates for responses that go on in the next iteration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.ragged import Array, Ragged
from planish.records.schema import Record, column, record


@record
class ValueSet(Record):
    """One row per response that was cut at the end of a window, by (ordinal, sample_index).

    A token keeps its value from the iteration that sampled it. The value loss clips around this
    value once the response is finished.

    Example:
        >>> values = ValueSet(
        ...     ordinal=np.array([4, 4]), sample_index=np.arange(2, dtype=np.int32),
        ...     values=Ragged.from_lists([[0.5, 0.25], [0.125]], np.float32))
        >>> values.num_rows
        2
    """

    SCHEMA: ClassVar[str] = "values/1"

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
