"""Successive batching: each slot generates one window, and unfinished responses go on next time.

A response continues under the newest policy, and the engine recomputes its prefix. Its noise
depends on seed and position only, so windows change nothing while the policy stays the same.

Source: T-PPO, arXiv 2506.15050 (windowed generation and successive batching).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planish.base.errors import ConfigError
from planish.records import layout
from planish.records.prompts import PromptSet
from planish.records.rollouts import FinishReason
from planish.records.stream import assign
from planish.stages.rollout.carry import deal, place, read_carry, refill, settle
from planish.stages.rollout.groups import Group, as_set, group_facts, judged
from planish.stages.rollout.job import RolloutJob, Sampled
from planish.stages.rollout.metrics import Growth, engine_metrics, staleness_metrics, window_metrics
from planish.stages.rollout.progress import SamplingProgress
from planish.stages.rollout.side_sets import write_side_set

if TYPE_CHECKING:
    from planish.stages.rollout.generate import GroupSampler


def sample_windows(job: RolloutJob, prompts: PromptSet) -> Sampled:
    """Let every slot of the shard grow by one window; write unfinished responses as the carry set.

    A response whose requests all failed keeps its slot and its tokens. Surplus sets of an earlier
    run stay unused: `max_staleness` is 0 with windows, so they are too old.

    Raises:
        ConfigError: a response is longer than allowed, or no prompt fits.
    """
    context = job.context
    sets = read_carry(job.data.carry, context.config_sha256)
    carried = deal(sets, context.shard, job.num_shards)
    with job.serve(prompts) as session:
        sampler = session.sampler
        _check_carried(carried, sampler, job)
        drawn: list[int] = []
        groups = refill(carried, job.num_slots, _new_groups(job, sampler, prompts, drawn))
        num_new = len(groups) - len(carried)
        places = place(groups, job.num_slots)
        flight = sampler.flight
        for g, mine in itertools.groupby(places, key=lambda at: at[0]):
            flight.enter(groups[g], [s for _, s in mine])
        progress = SamplingProgress(len(places))
        while flight.num_running:
            flight.advance()
            progress.look(
                kept=len(places) - flight.num_running,
                dropped=0,
                num_rows=flight.num_rows,
                stats=flight.stats,
            )
    after = {}
    for g, s in places:
        slot = flight.group(groups[g].ordinal).slots[s]
        if slot.finish is not FinishReason.ABORT:  # what failed stays as it was
            after[g, s] = replace(slot, text=sampler.text_of(groups[g], slot))
    grown = [
        replace(group, slots=tuple(after.get((g, s), slot) for s, slot in enumerate(group.slots)))
        for g, group in enumerate(groups)
    ]
    grown = judged(grown, job.judging)
    growths = [Growth(groups[g], groups[g].slots[s], grown[g].slots[s]) for g, s in places]
    given, kept = settle(grown, job.config.unfinished)
    rollouts = as_set(given)
    uri = layout.carry(context.root, context.iteration, context.shard)
    digest = write_side_set(uri, as_set(kept), job.parents, job.facts(), group_facts(kept))
    metrics = {
        **window_metrics(growths, given, kept),
        "num_drawn_groups": num_new,
        "group_dropped_incomplete": len(drawn) - num_new,
        **staleness_metrics(rollouts, job.start.version),
    }
    num_tokens = int(metrics["num_generated_tokens"])
    attributes = {
        "consumed": sorted(drawn),
        "ordinals": [group.ordinal for group in given],
        "carry_sha256": digest,
        "metrics": {**metrics, **engine_metrics(session.stats, num_tokens)},
    }
    return Sampled(rollouts, attributes, session.timing(num_tokens))


def _check_carried(carried: Sequence[Group], sampler: GroupSampler, job: RolloutJob) -> None:
    limit, algorithm = job.config.max_response_tokens, job.context.config.get("algorithm", {})
    # With windows of the longest response the configuration alone does not show them.
    is_whole = job.config.unfinished != "train" and algorithm.get("correction") == "off"
    num_tokens = sum(group.num_tokens for group in carried) if is_whole else 0
    if num_tokens:
        raise ConfigError(
            "`algorithm.correction` must not be 'off' while responses go on from the iteration "
            f"before, got 'off' and {num_tokens} tokens of older policies; take 'token_truncate' "
            "or 'bypass' until they are finished"
        )
    for group in carried:
        sampler.check_room(group)
        longest = max((s.num_tokens for s in group.slots if s.is_open), default=0)
        if longest >= limit:
            raise ConfigError(
                f"`rollout.max_response_tokens` must exceed the responses that go on, got {limit} "
                f"and {longest} tokens for prompt {group.prompt_id}; go on with the limit that "
                "they were begun with"
            )


def _new_groups(
    job: RolloutJob, sampler: GroupSampler, prompts: PromptSet, drawn: list[int]
) -> Iterator[Group]:
    """Yield a group for each prompt that fits; `drawn` gets all ordinals, also of long prompts."""
    num_missed = 0
    for ordinal in assign(job.data.cursor, job.context.shard, job.num_shards):
        group = sampler.draft(ordinal)
        drawn.append(ordinal)
        if group.slots:
            num_missed = 0
            yield group
            continue
        num_missed += 1
        if num_missed >= prompts.num_rows:
            raise ConfigError(
                f"prompts must have at most `rollout.max_prompt_tokens` = "
                f"{job.config.max_prompt_tokens} tokens, got {num_missed} in a row with more; "
                "raise it, or curate shorter prompts"
            )
