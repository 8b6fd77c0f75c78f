"""Sample whole responses: dynamic sampling, and surplus groups from one batch to the next."""

from __future__ import annotations

from planish.base.errors import ConfigError
from planish.records import layout
from planish.records.prompts import PromptSet
from planish.records.rollouts import RolloutSet
from planish.records.stream import assign
from planish.stages.rollout.carry import num_open, read_carry
from planish.stages.rollout.groups import as_rollouts
from planish.stages.rollout.metrics import batch_metrics, engine_metrics, staleness_metrics
from planish.stages.rollout.sampler import Batch, draw_batch
from planish.stages.rollout.side_sets import write_side_set
from planish.stages.rollout.surplus import Exchange, Surplus, Taken, read_surplus, settle, take_over
from planish.stages.rollout.task import Sampled, Task


def sample_whole(task: Task, prompts: PromptSet) -> Sampled:
    """Fill the batch from earlier surplus, then draw what is missing.

    Raises:
        ConfigError: starved under the policy `raise`, or responses of the last iteration go on.
    """
    _refuse_carry(task)
    config, context = task.config, task.context
    mine = read_surplus(task.data.surplus).share(context.shard, task.num_shards)
    with task.serve(prompts) as session:
        room, version = task.num_groups, session.version
        taken = take_over(mine, room=room, version=version, max_staleness=config.max_staleness)
        ordinals = assign(task.data.cursor, context.shard, task.num_shards)
        batch = draw_batch(ordinals, session.sampler, room - len(taken.used), config)
    exchange = _settle(task, prompts, batch, taken, version) if task.has_surplus else None
    attributes = {
        "policy_version": version,
        "consumed": batch.consumed(with_surplus=config.max_staleness > 0),
    }
    rollouts = as_rollouts(batch.kept, prompts)
    if exchange is not None:
        attributes["surplus_sha256"] = _write_surplus(task, exchange.carried, version)
        rollouts = RolloutSet.concat([exchange.used.rollouts, rollouts])
    num_tokens = sum(group.num_tokens for group in batch.generated())
    attributes["metrics"] = {
        **batch_metrics(batch, exchange),
        "num_live_slots": float(session.stats.get("most_rows", 0)),
        **dict.fromkeys(("num_continued", "num_waiting", "num_prefix_tokens"), 0.0),
        **engine_metrics(session.stats, num_tokens),
        **staleness_metrics(rollouts, version),
    }
    return Sampled(rollouts, attributes, session.timing(num_tokens))


def _refuse_carry(task: Task) -> None:
    """Refuse to lose responses that go on."""
    sets = read_carry(task.data.carry, task.data.cursor)
    num_left = sum(num_open(groups) for groups in sets)
    if num_left:
        raise ConfigError(
            f"`rollout.window_tokens` must be above 0 while responses go on from the iteration "
            f"before, got 0 and {num_left} of them; set it to `rollout.max_response_tokens` to "
            "finish them, or start from the policy alone"
        )


def _settle(task: Task, prompts: PromptSet, batch: Batch, taken: Taken, version: int) -> Exchange:
    """Decide about the surplus; the policy of the next iteration is this iteration's version."""
    keep = task.config.max_staleness > 0
    return settle(
        taken,
        Surplus.of(batch.surplus if keep else [], prompts, version),
        next_version=task.context.iteration,
        max_staleness=task.config.max_staleness,
        num_undrawn=0 if keep else len(batch.surplus),
    )


def _write_surplus(task: Task, surplus: Surplus, version: int) -> str:
    """Write the groups for the next iteration; returns the digest, "" for none."""
    if not len(surplus):
        return ""
    uri = layout.surplus(task.context.root, task.context.iteration, task.context.shard)
    facts = {**task.facts(), "policy_version": version}
    return write_side_set(uri, surplus.rollouts, task.parents, facts, surplus.attributes())
