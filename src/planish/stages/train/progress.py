"""Counters of a training: how far policy and critic are, and what has been skipped."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from planish.base.errors import CheckpointError

logger = logging.getLogger(__name__)

_CRITIC = ("critic_", "pretrain_")


@dataclass(frozen=True)
class Progress:
    """Counters of a training; part of the train state.

    Example:
        >>> Progress(step=32, updates=31, iterations=2).to_json()["skipped_in_row"]
        0
    """

    step: int = 0
    """Mini-batches seen; an iteration without a rollout counts as one empty mini-batch."""
    updates: int = 0
    """Optimizer steps of the policy: `step` without empty, skipped and pretraining ones."""
    iterations: int = 0
    """Rollout batches that the policy was trained on; drives its warm-up."""
    skipped_in_row: int = 0
    """Mini-batches with non-finite gradients of the policy since the last good one."""
    skipped_total: int = 0
    """Mini-batches with non-finite gradients of the policy so far."""
    critic_iterations: int = 0
    """Rollout batches that the critic was trained on; drives its warm-up."""
    critic_updates: int = 0
    """Optimizer steps of the critic."""
    critic_skipped_in_row: int = 0
    """As `skipped_in_row`, of the critic."""
    critic_skipped_total: int = 0
    """As `skipped_total`, of the critic."""
    pretrain_iterations: int = 0
    """Rollout batches of value pretraining."""
    pretrain_good_in_row: int = 0
    """Rollout batches in a row that met the rules for the end of value pretraining."""
    pretrain_done: int = 0
    """1 once the policy is trained."""

    def to_json(self) -> dict[str, int]:
        """Return the counters as JSON; those of the critic only where there is one."""
        counters = asdict(self)
        if any(counters[name] for name in counters if name.startswith(_CRITIC)):
            return counters
        return {name: n for name, n in counters.items() if not name.startswith(_CRITIC)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Progress:
        """Read the counters from the JSON part of a train state.

        Raises:
            CheckpointError: a counter is missing or no count.
        """
        names = [n for n in asdict(cls()) if n in raw or not n.startswith(_CRITIC)]
        bad = {n: raw.get(n) for n in names if type(raw.get(n)) is not int or raw[n] < 0}
        if bad:
            raise CheckpointError(
                f"a train state must hold the counters {names} as counts, got {bad}; resume from "
                "an earlier state"
            )
        return cls(**{name: raw[name] for name in names})

    def after_policy_step(self, *, skipped: bool, alarm_after: int) -> Progress:
        """Count an optimizer step of the policy; log one that was skipped."""
        if not skipped:
            return replace(self, updates=self.updates + 1, skipped_in_row=0)
        in_row = self.skipped_in_row + 1
        _log_skipped("policy", self.step, in_row, alarm_after, "train.learning_rate")
        return replace(self, skipped_in_row=in_row, skipped_total=self.skipped_total + 1)

    def after_critic_step(self, *, skipped: bool, alarm_after: int) -> Progress:
        """Count an optimizer step of the critic; log one that was skipped."""
        if not skipped:
            return replace(self, critic_updates=self.critic_updates + 1, critic_skipped_in_row=0)
        in_row = self.critic_skipped_in_row + 1
        _log_skipped("critic", self.step, in_row, alarm_after, "critic.learning_rate")
        total = self.critic_skipped_total + 1
        return replace(self, critic_skipped_in_row=in_row, critic_skipped_total=total)


def _log_skipped(who: str, step: int, in_row: int, alarm_after: int, key: str) -> None:
    log = logger.error if in_row >= alarm_after else logger.warning
    log(
        "gradient not finite, optimizer step skipped model=%s step=%d in_row=%d; lower `%s` or "
        "look at the rollouts of this iteration",
        *(who, step, in_row, key),
    )
