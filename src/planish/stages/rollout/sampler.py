"""Dynamic sampling: draw groups in rounds until the batch is full.

The filter looks at the verifier's scores only; the reward stage computes and shapes rewards. Kept
and dropped groups consume their prompts. Surplus groups do not, so their prompts are drawn again,
unless the groups are written for the next iteration.

Source: DAPO, arXiv 2503.14476, section 3.2 and algorithm 1.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from planish.base import telemetry
from planish.base.errors import ConfigError
from planish.records.rewards import nothing_learnt
from planish.stages.rollout.config import RolloutConfig
from planish.stages.rollout.groups import Fate, Group

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LookAhead:
    """Prompts of the next round, which may begin while the last responses of this one run.

    They do not change the kept or consumed groups, since a round counts only its own groups.
    """

    ordinals: Sequence[int]
    """All prompts that the next round can draw, in the order of the stream."""
    num_wanted: Callable[[Sequence[Group]], int]
    """Function from the ended groups of this round to the number of `ordinals` likely needed."""


Sample = Callable[[Sequence[int], LookAhead], list[Group]]
"""Generate and judge one group for each ordinal, in order."""

JUDGED = (Fate.MIXED, Fate.ALL_CORRECT, Fate.ALL_WRONG)
"""Fates of groups that are complete."""

_SPARE = 1.25
"""Room for bad luck when a round is sized by the share kept so far."""


@dataclass
class Batch:
    """The groups of one shard's rounds; kept + dropped + surplus = all that were generated."""

    kept: list[Group] = field(default_factory=list)
    """Groups to train on, in the order of the stream."""
    dropped: list[Group] = field(default_factory=list)
    """Groups without a signal, or incomplete."""
    surplus: list[Group] = field(default_factory=list)
    """Groups with a signal that the batch has no room for."""
    num_rounds: int = 0
    starved: bool = False
    """The rounds ended before the batch was full."""

    def generated(self) -> list[Group]:
        """Return all groups by ordinal."""
        return sorted([*self.kept, *self.dropped, *self.surplus], key=lambda g: g.ordinal)

    def consumed(self, *, with_surplus: bool = False) -> list[int]:
        """Return the sorted ordinals that must not be drawn again.

        `with_surplus` adds those of surplus groups, for a caller that keeps these groups.
        """
        surplus = self.surplus if with_surplus else []
        return sorted(group.ordinal for group in [*self.kept, *self.dropped, *surplus])


def draw_batch(
    ordinals: Iterator[int],
    sample: Sample,
    num_groups: int,
    config: RolloutConfig,
    *,
    num_prompts: int = 0,
) -> Batch:
    """Draw rounds of groups until `num_groups` qualify.

    Args:
        ordinals: endless ordinals of this shard.
        sample: generates and judges groups.
        num_groups: groups that the batch has room for.
        config: rounds, filter and starvation policy.
        num_prompts: rounds without a limit end after so many groups in a row that do not qualify;
            0 never ends them.

    Raises:
        ConfigError: too few groups under the policy `raise`, or none in rounds without a limit.
    """
    batch = Batch()
    qualified: list[Group] = []
    upcoming: list[int] = []
    num_missed = 0
    while len(qualified) < num_groups:
        limit = config.max_generation_rounds
        if limit == 0 and 0 < num_prompts <= num_missed:
            if not qualified:
                raise ConfigError(_nothing_qualifies(batch.dropped, config))
            batch.starved = True
            break
        if 0 < limit <= batch.num_rounds:
            batch.starved = True
            break
        tried = len(qualified) + len(batch.dropped)
        size = _round_size(num_groups, len(qualified), tried, config)
        is_last = batch.num_rounds + 1 == config.max_generation_rounds
        num_ahead = 0 if is_last else _largest_round(num_groups, config)
        upcoming += itertools.islice(ordinals, max(0, size + num_ahead - len(upcoming)))
        now, upcoming = upcoming[:size], upcoming[size:]
        wanted = partial(_num_wanted, num_groups, len(qualified), tried, size, config)
        groups = sample(now, LookAhead(upcoming[:num_ahead], wanted))
        batch.num_rounds += 1
        for group in groups:
            telemetry.count("planish_rollout_groups_total", fate=group.fate.name.lower())
            is_kept = qualifies(group, config)
            (qualified if is_kept else batch.dropped).append(group)
            num_missed = 0 if is_kept else num_missed + 1
    batch.kept, batch.surplus = qualified[:num_groups], qualified[num_groups:]
    if batch.starved:
        _starve(batch, num_groups, config)
    return batch


def qualifies(group: Group, config: RolloutConfig) -> bool:
    """Return True if the batch takes a judged group; only its scores count."""
    return group.fate in ((Fate.MIXED,) if config.dynamic_sampling else JUDGED)


def _nothing_qualifies(dropped: Sequence[Group], config: RolloutConfig) -> str:
    fates = [group.fate for group in dropped]
    wrong, right = fates.count(Fate.ALL_WRONG), fates.count(Fate.ALL_CORRECT)
    told = f"{wrong} all wrong, {right} all right, {len(fates) - wrong - right} incomplete"
    remedy = (
        f"raise `rollout.max_prompt_tokens` ({config.max_prompt_tokens}) if the prompts are longer"
    )
    if wrong or right:
        counts = {"num_groups_wrong": wrong, "num_groups_right": right}
        remedy = nothing_learnt({"iterations_without_signal": 1, **counts})
    return (
        "a group must qualify in one pass over the prompts, where "
        f"`rollout.max_generation_rounds` = 0 sets no other limit, got {told}; {remedy}"
    )


def _largest_round(num_groups: int, config: RolloutConfig) -> int:
    factor = config.generation_prompts_factor if config.dynamic_sampling else 1.0
    return math.ceil(num_groups * factor)


def _round_size(num_groups: int, num_kept: int, num_tried: int, config: RolloutConfig) -> int:
    """Return the number of prompts that the next round draws."""
    missing = num_groups - num_kept
    if not config.dynamic_sampling:
        return missing
    full = _largest_round(num_groups, config)
    if not config.shrink_rounds or not num_kept:
        return full
    return min(full, math.ceil(missing * num_tried / num_kept * _SPARE))


def _num_wanted(
    num_groups: int,
    num_kept: int,
    num_tried: int,
    size: int,
    config: RolloutConfig,
    ended: Sequence[Group],
) -> int:
    """Return the likely number of prompts of the next round; this round has `size` groups.

    Groups of this round that are not in `ended` are assumed to qualify as often as earlier ones.
    """
    num_kept += sum(qualifies(group, config) for group in ended)
    num_tried += len(ended)
    num_left = size - len(ended)
    expected = num_kept + (num_left * num_kept // num_tried if num_tried else num_left)
    if expected >= num_groups:
        return 0
    return _round_size(num_groups, expected, num_tried + num_left, config)


def _starve(batch: Batch, num_groups: int, config: RolloutConfig) -> None:
    missing = num_groups - len(batch.kept)
    logger.warning(
        "dynamic_sampling_starved kept=%d missing=%d rounds=%d policy=%s",
        len(batch.kept),
        missing,
        batch.num_rounds,
        config.starvation_policy,
    )
    if config.starvation_policy == "raise":
        raise ConfigError(
            f"{num_groups} groups must qualify within {batch.num_rounds} generation rounds, got "
            f"{len(batch.kept)} of {len(batch.generated())}; give prompts whose pass rate is "
            "neither 0 nor 1, more rounds, or another `rollout.starvation_policy`"
        )
    if config.starvation_policy == "relax":
        filling = [g for g in batch.dropped if g.fate in JUDGED][:missing]
        chosen = {group.ordinal for group in filling}
        batch.dropped = [g for g in batch.dropped if g.ordinal not in chosen]
        batch.kept.extend(filling)
