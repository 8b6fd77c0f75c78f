"""Successive batching: each slot generates one window, and unfinished responses go on next time.

A response continues under the newest policy: the engine computes its prefix anew, and its noise
depends on seed and position only, so that windows change nothing where the policy stays the same.

Source: T-PPO, arXiv 2506.15050 (windowed generation and successive batching).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from planish.base.errors import ConfigError
from planish.engines.requests import Output, Request
from planish.records import layout
from planish.records.prompts import PromptSet
from planish.records.rollouts import FinishReason
from planish.records.stream import assign
from planish.stages.rollout.carry import deal, group_facts, place, read_carry, refill, settle
from planish.stages.rollout.groups import FINISH
from planish.stages.rollout.metrics import Growth, engine_metrics, staleness_metrics, window_metrics
from planish.stages.rollout.side_sets import write_side_set
from planish.stages.rollout.slots import Slot, SlotGroup, as_set
from planish.stages.rollout.task import Sampled, Task
from planish.verifiers import Verdict, verify_many

if TYPE_CHECKING:
    from planish.stages.rollout.generate import GroupSampler


def sample_windows(task: Task, prompts: PromptSet) -> Sampled:
    """Let every slot of the shard grow by one window; write what goes on as the carry set.

    A response whose requests all failed keeps its slot and its tokens. Surplus sets of an earlier
    run are left alone: they are too old by the rule that nothing is reused here.

    Raises:
        ConfigError: a response is longer than allowed, or no prompt fits.
    """
    context = task.context
    sets = read_carry(task.data.carry, task.data.cursor)
    carried = deal(sets, context.shard, task.num_shards)
    with task.serve(prompts) as session:
        sampler = session.sampler
        _check_carried(carried, sampler, task.config.max_response_tokens)
        drawn: list[int] = []
        draw = _new_groups(task, sampler, prompts, drawn)
        groups = refill(carried, task.num_slots, draw)
        num_new = len(groups) - len(carried)
        placed = place(groups, task.num_slots)
        requests = [_request(task, sampler, groups[g], groups[g].slots[s]) for g, s in placed]
        outputs = sampler.generate(requests)
        growths = [
            _grow(task, sampler, groups[g], groups[g].slots[s], outputs[request.request_id])
            for (g, s), request in zip(placed, requests, strict=True)
        ]
    grown = _with_growths(groups, placed, growths)
    given, kept = settle(grown, task.config.unfinished)
    rollouts, carry = as_set(given), as_set(kept)
    facts = {**task.facts(), "policy_version": session.version}
    uri = layout.carry(context.root, context.iteration, context.shard)
    digest = write_side_set(uri, carry, task.parents, facts, group_facts(kept))
    metrics = {
        **window_metrics(growths, given, kept, _judge(growths)),
        "num_drawn_groups": num_new,
        "group_dropped_incomplete": len(drawn) - num_new,
        **staleness_metrics(rollouts, session.version),
    }
    num_tokens = int(metrics["num_generated_tokens"])
    attributes = {
        "policy_version": session.version,
        "consumed": sorted(drawn),
        "ordinals": [group.ordinal for group in given],
        "carry_sha256": digest,
        "metrics": {**metrics, **engine_metrics(session.stats, num_tokens)},
    }
    return Sampled(rollouts, attributes, session.timing(num_tokens))


def _check_carried(carried: Sequence[SlotGroup], sampler: GroupSampler, limit: int) -> None:
    for group in carried:
        sampler.check_room(group.prompt_tokens, group.prompt_id)
        longest = max((s.num_tokens for s in group.slots if s.is_open), default=0)
        if longest >= limit:
            raise ConfigError(
                f"`rollout.max_response_tokens` must exceed the responses that go on, got {limit} "
                f"and {longest} tokens for prompt {group.prompt_id}; go on with the limit that "
                "they were begun with"
            )


def _new_groups(
    task: Task, sampler: GroupSampler, prompts: PromptSet, drawn: list[int]
) -> Iterator[SlotGroup]:
    """Yield a group for each prompt that fits; `drawn` gets every ordinal that was looked at."""
    num_missed = 0
    for ordinal in assign(task.data.cursor, task.context.shard, task.num_shards):
        draft = sampler.draft(ordinal)
        drawn.append(ordinal)
        if sampler.is_too_long(draft):
            num_missed += 1
            if num_missed >= prompts.num_rows:
                raise ConfigError(
                    f"prompts must have at most `rollout.max_prompt_tokens` = "
                    f"{task.config.max_prompt_tokens} tokens, got {num_missed} in a row with more; "
                    "raise it, or curate shorter prompts"
                )
            continue
        num_missed = 0
        yield SlotGroup(
            ordinal=ordinal,
            drawn=task.context.iteration,
            prompt_id=prompts.prompt_id[draft.prompt],
            prompt_tokens=draft.prompt_tokens,
            answer=prompts.answer[draft.prompt],
            verifier=prompts.verifier[draft.prompt],
            slots=tuple(Slot(sample) for sample in range(task.config.group_size)),
        )


def _request(task: Task, sampler: GroupSampler, group: SlotGroup, slot: Slot) -> Request:
    left = task.config.max_response_tokens - slot.num_tokens
    return sampler.request(
        group.ordinal,
        slot.sample,
        group.prompt_id,
        group.prompt_tokens,
        prefix=tuple(slot.tokens.tolist()),
        max_new_tokens=min(task.config.window_tokens, left),
        drawn=group.drawn,
    )


def _grow(
    task: Task, sampler: GroupSampler, group: SlotGroup, slot: Slot, output: Output
) -> Growth:
    """Add a window to a response; one that failed stays as it is."""
    if output.finish_reason not in FINISH:
        return Growth(group, slot, slot)
    finish = FINISH[output.finish_reason]
    length = slot.num_tokens + output.num_tokens
    if finish is FinishReason.LENGTH and length < task.config.max_response_tokens:
        finish = FinishReason.WINDOW
    text = sampler.decode([*slot.tokens.tolist(), *output.token_ids])
    grown = slot.extended(output.token_ids, output.logprobs, output.versions, finish, text)
    return Growth(group, slot, grown)


def _with_growths(
    groups: Sequence[SlotGroup], placed: Sequence[tuple[int, int]], growths: Sequence[Growth]
) -> list[SlotGroup]:
    after: Mapping[tuple[int, int], Slot] = {
        at: growth.after for at, growth in zip(placed, growths, strict=True)
    }
    return [
        replace(group, slots=tuple(after.get((g, s), slot) for s, slot in enumerate(group.slots)))
        for g, group in enumerate(groups)
    ]


def _judge(growths: Sequence[Growth]) -> list[Verdict]:
    """Return the verdicts on the responses that this iteration has finished."""
    return verify_many(
        [
            (growth.group.verifier, growth.after.text, growth.group.answer)
            for growth in growths
            if not growth.after.is_open
        ]
    )
