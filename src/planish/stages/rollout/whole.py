"""Sample whole responses: dynamic sampling, and surplus groups from one batch to the next."""

from __future__ import annotations

from typing import Any

from planish.base.errors import ConfigError
from planish.records import layout
from planish.records.prompts import PromptSet
from planish.records.stream import assign
from planish.stages.rollout.carry import read_carry
from planish.stages.rollout.extra_groups import group_facts, read_surplus, settle, share, take_over
from planish.stages.rollout.groups import as_set, judged
from planish.stages.rollout.job import RolloutJob, Sampled
from planish.stages.rollout.metrics import batch_metrics, engine_metrics, staleness_metrics
from planish.stages.rollout.sampler import draw_batch
from planish.stages.rollout.side_sets import write_side_set


def sample_whole(job: RolloutJob, prompts: PromptSet) -> Sampled:
    """Fill the batch from earlier surplus, then draw the missing groups.

    Raises:
        ConfigError: too few groups under the starvation policy `raise`, or unfinished responses of
        the last iteration.
    """
    config, context = job.config, job.context
    carried = read_carry(job.data.carry, context.config_sha256)
    num_left = sum(group.num_open for groups in carried for group in groups)
    if num_left:
        raise ConfigError(
            f"`rollout.window_tokens` must be above 0 while responses go on from the iteration "
            f"before, got 0 and {num_left} of them; set it to `rollout.max_response_tokens` to "
            "finish them, or start from the policy alone"
        )
    limit = config.max_staleness
    surplus = read_surplus(job.data.surplus, context.config_sha256)
    mine = judged(share(surplus, context.shard, job.num_shards), job.judging)
    version = job.start.version
    with job.serve(prompts) as session:
        taken = take_over(mine, room=job.num_groups, version=version, max_staleness=limit)
        ordinals = assign(job.data.cursor, context.shard, job.num_shards)
        room = job.num_groups - len(taken.used)
        session.sampler.go_on(room)
        batch = draw_batch(ordinals, session.sampler, room, config, num_prompts=prompts.num_rows)
    exchange = None
    attributes: dict[str, Any] = {"consumed": batch.consumed(with_surplus=limit > 0)}
    if job.has_surplus:
        # The policy of the next iteration has the number of this iteration as its version.
        exchange = settle(taken, batch.surplus, next_version=context.iteration, max_staleness=limit)
        attributes["surplus_sha256"] = ""
        if exchange.carried:
            uri = layout.surplus(context.root, context.iteration, context.shard)
            rows, columns = as_set(exchange.carried), group_facts(exchange.carried)
            digest = write_side_set(uri, rows, job.parents, job.facts(), columns)
            attributes["surplus_sha256"] = digest
    rollouts = as_set([*taken.used, *batch.kept])
    num_tokens = sum(group.num_tokens for group in batch.generated())
    attributes["metrics"] = {
        **batch_metrics(batch, exchange),
        "num_live_slots": float(session.stats["most_rows"]),
        **dict.fromkeys(("num_continued", "num_waiting", "num_prefix_tokens"), 0.0),
        **engine_metrics(session.stats, num_tokens),
        **staleness_metrics(rollouts, version + job.start.lag),
    }
    return Sampled(rollouts, attributes, session.timing(num_tokens))
