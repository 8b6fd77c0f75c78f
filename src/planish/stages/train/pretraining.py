"""Value pretraining: the first iterations of a run train the critic while the policy is frozen.

The rule that ends it looks at each rollout batch before the critic has trained on it, so that it
judges what the critic knows of responses that are new to it.

Source: VAPO, arXiv 2504.05118, section 4.1; VC-PPO, arXiv 2503.01491, section 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planish.stages.train.config import CriticConfig
from planish.stages.train.progress import Progress


def judge(config: CriticConfig, progress: Progress, scalars: Mapping[str, float]) -> Progress:
    """Decide whether the rollout batch at hand still belongs to value pretraining.

    Args:
        config: of the critic.
        progress: before the iteration.
        scalars: measured on the batch with the critic before it; `fresh_value_loss` and
            `explained_variance` are missing where no token has a target.

    Returns:
        Counters with `pretrain_done` 1 where the batch trains the policy too.
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
    """Return the critic's rate of the iteration after `progress`: linear, then constant.

    Args:
        config: of the critic.
        progress: as `judge` returned it.
    """
    rate = config.learning_rate
    if not progress.pretrain_done and config.pretrain_learning_rate is not None:
        rate = config.pretrain_learning_rate
    if config.warmup_iterations == 0:
        return rate
    return rate * min(1.0, (progress.critic_iterations + 1) / config.warmup_iterations)
