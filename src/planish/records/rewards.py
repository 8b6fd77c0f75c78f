"""Rewards: the scores of a rollout set, row by row."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.schema import Record, column, record

_TOLERANCE = 1e-5


@record
class RewardSet(Record):
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
    REMEDY: ClassVar[str] = "the reward stage writes this set"

    accuracy: npt.NDArray[np.float32] = column("float32", "the verifier's verdict, 0 or 1")
    outcome: npt.NDArray[np.float32] = column("float32", "the reward of that verdict")
    length_penalty: npt.NDArray[np.float32] = column("float32", "0 or less")
    reward: npt.NDArray[np.float32] = column("float32", "outcome + length_penalty: what trains")
    has_reward: npt.NDArray[np.bool_] = column("bool", "false for responses that are not finished")
    keep: npt.NDArray[np.bool_] = column("bool", "false: takes no part in the update")
    extracted: list[str] = column("text", "the answer that the verifier saw")

    @property
    def num_rows(self) -> int:
        """Number of rollouts R."""
        return len(self.extracted)

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""
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
