"""Rewards: the scores of a rollout set, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.ragged import Array
from planish.records.schema import (
    Column,
    ColumnData,
    column_faults,
    raise_faults,
    records_equal,
)

_TOLERANCE = 1e-5


@dataclass(frozen=True, eq=False)
class RewardSet:
    """Row `r` scores row `r` of the rollout set that the manifest names as a parent.

    Example:
        >>> one = np.ones(1, np.float32)
        >>> rewards = RewardSet(
        ...     accuracy=one, outcome=one, length_penalty=-0.25 * one, reward=0.75 * one,
        ...     has_reward=np.array([True]), keep=np.array([True]), extracted=["42"])
        >>> rewards.validate(), rewards.num_rows
        (None, 1)
    """

    SCHEMA: ClassVar[str] = "rewards/1"
    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("accuracy", "float32", "the verifier's verdict, 0 or 1"),
        Column("outcome", "float32", "the reward of that verdict"),
        Column("length_penalty", "float32", "0 or less"),
        Column("reward", "float32", "outcome + length_penalty: what trains"),
        Column("has_reward", "bool", "false for responses that are not finished"),
        Column("keep", "bool", "false: takes no part in the update"),
        Column("extracted", "text", "the answer that the verifier saw"),
    )

    accuracy: npt.NDArray[np.float32]
    """[R] float32, 0 or 1."""
    outcome: npt.NDArray[np.float32]
    """[R] float32, reward of the verdict alone."""
    length_penalty: npt.NDArray[np.float32]
    """[R] float32, 0 or less."""
    reward: npt.NDArray[np.float32]
    """[R] float32, outcome + length_penalty."""
    has_reward: npt.NDArray[np.bool_]
    """[R] bool, False for unfinished responses."""
    keep: npt.NDArray[np.bool_]
    """[R] bool, False: takes no part in the update."""
    extracted: list[str]
    """[R] the answers that the verifier saw, for audits."""

    @property
    def num_rows(self) -> int:
        """Number of rollouts R."""
        return len(self.extracted)

    def columns(self) -> dict[str, ColumnData]:
        """Return the data of every column."""
        return {column.name: getattr(self, column.name) for column in self.COLUMNS}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> RewardSet:
        """Build the set from its columns."""
        return cls(**columns)

    def group_starts(self) -> Array:
        """Every row may begin a row group."""
        return np.ones(self.num_rows, dtype=np.bool_)

    def validate(self) -> None:
        """Check every rule of the schema.

        Raises:
            RecordError: with every fault.
        """
        kinds = {column.name: column.kind for column in self.COLUMNS}
        faults = column_faults(self.columns(), kinds, self.num_rows)
        if not faults:
            faults = self._value_faults()
        raise_faults(self.SCHEMA, faults, remedy="the reward stage writes this set")

    def _value_faults(self) -> list[str]:
        faults = []
        for name in ("outcome", "length_penalty", "reward"):
            values = getattr(self, name)
            faults += [
                f"`{name}` must be finite, got {values[row]} in row {row}"
                for row in np.flatnonzero(~np.isfinite(values))
            ]
        unknown = np.flatnonzero((self.accuracy != 0) & (self.accuracy != 1))
        faults += [
            f"`accuracy` must be 0 or 1, got {self.accuracy[row]} in row {row}" for row in unknown
        ]
        faults += [
            f"`length_penalty` must be 0 or less, got {self.length_penalty[row]} in row {row}"
            for row in np.flatnonzero(self.length_penalty > 0)
        ]
        if not faults:
            total = self.outcome + self.length_penalty
            wrong = np.flatnonzero(np.abs(total - self.reward) > _TOLERANCE)
            faults = [
                f"`reward` must be outcome + length_penalty = {total[row]}, "
                f"got {self.reward[row]} in row {row}"
                for row in wrong
            ]
        return faults

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RewardSet):
            return NotImplemented
        return records_equal(self.columns(), other.columns())

    __hash__ = None  # type: ignore[assignment]
