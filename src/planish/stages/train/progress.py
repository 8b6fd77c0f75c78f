"""Counters of a training, and the decisions from them: value pretraining, the critic's warm-up.

In value pretraining the first iterations of a run train the critic, while the policy is frozen. The
rule that ends it measures each rollout batch before the critic trains on it, so it judges the
critic on responses that are new to it.

Source: VAPO, arXiv 2504.05118, section 4.1; VC-PPO, arXiv 2503.01491, section 3.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from planish.base.errors import CheckpointError
from planish.stages.train.config import CriticConfig

logger = logging.getLogger(__name__)

_CRITIC = ("critic_", "pretrain_")
_ALARM_AFTER = 3
"""Steps skipped in a row from which the log line is an error."""


@dataclass(frozen=True)
class Progress:
    """Counters of a training; part of the train state."""

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
    critic_skipped_total: int = 0
    pretrain_iterations: int = 0
    """Rollout batches of value pretraining."""
    pretrain_good_in_row: int = 0
    """Rollout batches in a row that met the rules for the end of value pretraining."""
    pretrain_done: int = 0
    """1 once the policy is trained."""

    def to_json(self) -> dict[str, int]:
        """Return the counters as JSON; those of the critic only if one of them is not 0."""
        counters = asdict(self)
        if any(counters[name] for name in counters if name.startswith(_CRITIC)):
            return counters
        return {name: n for name, n in counters.items() if not name.startswith(_CRITIC)}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> Progress:
        """Read the counters from the JSON part of a train state.

        Raises:
            CheckpointError: a counter is missing, as in a state of another release. A default of 0
                would start warm-up and pretraining again.
        """
        names = cls().to_json()
        bad = {name: raw.get(name) for name in names if type(raw.get(name)) is not int}
        if bad:
            raise CheckpointError(
                f"a train state must hold the counters {list(names)} as whole numbers, got {bad}; "
                "go on with the release that wrote it"
            )
        return cls(**{name: raw[name] for name in asdict(cls()) if name in raw})

    def after_step(self, step: Mapping[str, float]) -> Progress:
        """Count the optimizer steps of one mini-batch; log those that were skipped.

        Args:
            step: metrics of the mini-batch, with `skipped` if it trains the policy and
                `value_skipped` if it trains the critic; 1 marks a skipped step.
        """
        counted = self
        for model, prefix, name in (
            ("critic", "critic_", "value_skipped"),
            ("policy", "", "skipped"),
        ):
            if name not in step:
                continue
            if not step[name]:
                updates = getattr(counted, f"{prefix}updates") + 1
                changes = {f"{prefix}updates": updates, f"{prefix}skipped_in_row": 0}
            else:
                in_row = getattr(counted, f"{prefix}skipped_in_row") + 1
                total = getattr(counted, f"{prefix}skipped_total") + 1
                changes = {f"{prefix}skipped_in_row": in_row, f"{prefix}skipped_total": total}
                logger.log(
                    logging.ERROR if in_row >= _ALARM_AFTER else logging.WARNING,
                    "gradient not finite, optimizer step skipped model=%s step=%d in_row=%d; "
                    "lower `%s.learning_rate` or look at the rollouts of this iteration",
                    model,
                    self.step,
                    in_row,
                    "train" if model == "policy" else "critic",
                )
            counted = replace(counted, **changes)
        return counted


def judge(config: CriticConfig, progress: Progress, scalars: Mapping[str, float]) -> Progress:
    """Decide whether the rollout batch at hand still belongs to value pretraining.

    Args:
        config: settings of the critic.
        progress: counters before the iteration.
        scalars: metrics of the batch under the critic before this iteration; without a target
            token they lack `fresh_value_loss` and `explained_variance`.

    Returns:
        Counters with `pretrain_done` 1 if the batch trains the policy too.
    """
    if progress.pretrain_done or progress.pretrain_iterations >= config.pretrain_iterations:
        return replace(progress, pretrain_done=1)
    rules = [
        (config.pretrain_explained_variance, scalars.get("explained_variance"), 1.0),
        (config.pretrain_value_loss, scalars.get("fresh_value_loss"), -1.0),
    ]
    given = [(limit, seen, sign) for limit, seen, sign in rules if limit is not None]
    if not given or any(seen is None for _, seen, _ in given):
        return progress
    good = all(seen is not None and sign * seen >= sign * limit for limit, seen, sign in given)
    in_row = progress.pretrain_good_in_row + 1 if good else 0
    done = int(in_row >= config.pretrain_patience)
    return replace(progress, pretrain_good_in_row=in_row, pretrain_done=done)


def critic_learning_rate(config: CriticConfig, progress: Progress) -> float:
    """Return the critic's learning rate by `judge`'s counters: linear warm-up, then constant."""
    rate = config.learning_rate
    if not progress.pretrain_done and config.pretrain_learning_rate is not None:
        rate = config.pretrain_learning_rate
    if config.warmup_iterations == 0:
        return rate
    return rate * min(1.0, (progress.critic_iterations + 1) / config.warmup_iterations)
