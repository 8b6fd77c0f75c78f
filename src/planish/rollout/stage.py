"""The rollout stage: sample one shard of the groups of an iteration and write them."""

from __future__ import annotations

import logging
import time
from typing import Any

from planish.errors import ConfigError, ObjectMissing
from planish.records import layout
from planish.records.io import finished, read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.refs import Ref, parse_pin
from planish.records.rollouts import RolloutSet
from planish.records.stream import Cursor, assign, fresh_cursor, parse_data
from planish.rollout.config import RolloutConfig
from planish.rollout.groups import as_rollouts
from planish.rollout.metrics import batch_metrics
from planish.rollout.sampler import Batch, draw_batch
from planish.rollout.surplus import Exchange, Surplus, Taken, read_surplus, settle, take_over
from planish.stage import Artifact, Context, Outcome, execute, is_stopped, mark_stopped

logger = logging.getLogger(__name__)

_STATES = layout.state("", 0).rpartition("/")[0] + "/"


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    shard: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    rollouts: Artifact,
    metrics: Artifact,
) -> None:
    """Sample one shard of the rollouts of one iteration.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        number: iteration within this run, from 1.
        offset: iterations before this run.
        shard: index of this shard.
        num_shards: shards of the iteration; they share the groups evenly.
        policy_pin: pinned URI of the policy that samples.
        state_pin: pinned URI of the train state that holds the prompt cursor; "" at the beginning.
        rollouts: gets the Ref of the rollout set.
        metrics: gets counts, shares and lengths.
    """
    execute(
        "rollout",
        lambda context: _work(context, num_shards, policy_pin, state_pin),
        root=root,
        config_sha256=config_sha256,
        iteration=offset + number,
        shard=shard,
        outputs={"rollouts": rollouts, "metrics": metrics},
    )


def read_data(state_pin: str) -> tuple[Cursor, list[str]]:
    """Return prompt cursor and pins of surplus sets of a train state; fresh ones for ""."""
    if not state_pin:
        return fresh_cursor(), []
    from planish.checkpoint.api import read_state_info

    data = parse_data(read_state_info(state_pin)["data"])
    # A forked run begins with the state of another root, whose surplus lies there too.
    root = parse_pin(state_pin)[0].rpartition(_STATES)[0]
    return data.cursor, [f"{root}/{pin}" for pin in data.surplus]


def shard_groups(num_groups: int, shard: int, num_shards: int) -> int:
    """Return how many groups a shard keeps; the first ones take the remainder.

    Example:
        >>> [shard_groups(7, shard, 3) for shard in range(3)]
        [3, 2, 2]
    """
    return num_groups // num_shards + (shard < num_groups % num_shards)


def _work(context: Context, num_shards: int, policy_pin: str, state_pin: str) -> Outcome:
    config = context.section(RolloutConfig, "rollout")
    if not 0 <= context.shard < num_shards <= config.prompts_per_iteration:
        raise ConfigError(
            f"shards must number 0..{num_shards - 1}, at most one per group of the "
            f"{config.prompts_per_iteration} in an iteration, got shard {context.shard} of "
            f"{num_shards}; set fewer rollout shards"
        )
    cursor, pins = read_data(state_pin)
    prompts_uri = layout.prompts(context.root)
    prompts_digest = read_manifest(prompts_uri).sha256
    parents = {"prompts": prompts_digest, "policy": parse_pin(policy_pin)[1]}
    facts = {
        "config_sha256": context.config_sha256,
        "iteration": context.iteration,
        "seed": context.seed,
        "shard": context.shard,
        "num_shards": num_shards,
        "cursor": dict(cursor),
    }
    reuse = config.max_staleness > 0 or bool(pins)
    if reuse:
        facts["surplus_sources"] = [parse_pin(pin)[1] for pin in pins]
    ready = _ready(context, parents, facts)
    if ready is not None:
        return ready
    if mark_stopped(context.root, context.iteration):
        attributes = {**facts, "stopped": True, "consumed": [], "metrics": {}}
        attributes |= {"surplus_sha256": ""} if reuse else {}
        return _write(context, RolloutSet.empty(), parents, attributes, {})
    prompts = read_set(PromptSet, prompts_uri, sha256=prompts_digest)
    mine = read_surplus(pins).share(context.shard, num_shards)
    batch, taken, version, timing = _sample(
        context, config, prompts, policy_pin, cursor, num_shards, mine
    )
    facts |= {"policy_version": version}
    exchange = _settle(context, config, prompts, batch, taken, version) if reuse else None
    attributes = {
        **facts,
        "stopped": False,
        "consumed": batch.consumed(with_surplus=config.max_staleness > 0),
        "metrics": batch_metrics(batch, exchange),
    }
    rollouts = as_rollouts(batch.kept, prompts)
    if exchange is not None:
        attributes["surplus_sha256"] = _write_surplus(context, exchange.carried, parents, facts)
        rollouts = RolloutSet.concat([exchange.used.rollouts, rollouts])
    return _write(context, rollouts, parents, attributes, timing)


def _settle(
    context: Context,
    config: RolloutConfig,
    prompts: PromptSet,
    batch: Batch,
    taken: Taken,
    version: int,
) -> Exchange:
    """Decide about the surplus; the policy of the next iteration is this iteration's version."""
    keep = config.max_staleness > 0
    return settle(
        taken,
        Surplus.of(batch.surplus if keep else [], prompts, version),
        next_version=context.iteration,
        max_staleness=config.max_staleness,
        num_undrawn=0 if keep else len(batch.surplus),
    )


def _write_surplus(
    context: Context, surplus: Surplus, parents: dict[str, str], facts: dict[str, Any]
) -> str:
    """Write the groups for the next iteration; returns the digest, "" for none."""
    if not len(surplus):
        return ""
    names = ("config_sha256", "iteration", "seed", "shard", "num_shards", "policy_version")
    attributes = {**{name: facts[name] for name in names}, **surplus.attributes()}
    uri = layout.surplus(context.root, context.iteration, context.shard)
    return write_set(uri, surplus.rollouts, parents=parents, attributes=attributes).manifest_sha256


def _has_surplus(context: Context, digest: str) -> bool:
    """Tell whether the surplus set that the rollouts name is there; "" names none."""
    if not digest:
        return True
    uri = layout.surplus(context.root, context.iteration, context.shard)
    try:
        return read_manifest(uri).sha256 == digest
    except ObjectMissing:
        return False


def _ready(context: Context, parents: dict[str, str], facts: dict[str, Any]) -> Outcome | None:
    """Return the outcome of an earlier attempt with the same inputs."""
    uri = layout.rollouts(context.root, context.iteration, context.shard)
    ref = finished(uri, RolloutSet.SCHEMA, parents=parents, config_sha256=context.config_sha256)
    if ref is None:
        return None
    attributes = read_manifest(uri, sha256=ref.manifest_sha256).attributes
    if any(attributes.get(name) != value for name, value in facts.items()):
        return None
    if not _has_surplus(context, attributes.get("surplus_sha256", "")):
        return None
    if attributes["stopped"] and not is_stopped(context.root, context.iteration):
        return None
    return Outcome(refs={"rollouts": ref}, metrics=dict(attributes["metrics"]), already_done=True)


def _sample(
    context: Context,
    config: RolloutConfig,
    prompts: PromptSet,
    policy_pin: str,
    cursor: Cursor,
    num_shards: int,
    mine: Surplus,
) -> tuple[Batch, Taken, int, dict[str, float]]:
    """Fill the batch from `mine`, then draw what is missing.

    Returns:
        The drawn batch, what became of `mine`, the policy version, and timings for people.
    """
    import torch

    from planish.engines import open_engine
    from planish.records.io import fetch_files
    from planish.rollout.generate import GroupSampler
    from planish.tokens import load_tokenizer

    torch.set_num_threads(config.threads)
    uri, digest = parse_pin(policy_pin)
    tokenizer = load_tokenizer(fetch_files(uri, sha256=digest))
    begin = time.monotonic()
    options = {"max_rows": config.max_rows, "device": config.device}
    with open_engine(config.engine, policy_pin, **options) as engine:
        loaded = time.monotonic()
        sample = GroupSampler(
            engine, tokenizer, prompts, config, seed=context.seed, iteration=context.iteration
        )
        ordinals = assign(cursor, context.shard, num_shards)
        room = shard_groups(config.prompts_per_iteration, context.shard, num_shards)
        version = engine.version()
        taken = take_over(mine, room=room, version=version, max_staleness=config.max_staleness)
        batch = draw_batch(ordinals, sample, room - len(taken.used), config)
        seconds = time.monotonic() - loaded
        tokens = sum(group.num_tokens for group in batch.generated())
        occupancy = float(engine.stats().get("occupancy", 0.0))
    timing = {
        "load_seconds": loaded - begin,
        "sample_seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "engine_occupancy": occupancy,
    }
    return batch, taken, version, timing


def _write(
    context: Context,
    rollouts: RolloutSet,
    parents: dict[str, str],
    attributes: dict[str, Any],
    timing: dict[str, float],
) -> Outcome:
    uri = layout.rollouts(context.root, context.iteration, context.shard)
    ref: Ref = write_set(uri, rollouts, parents=parents, attributes=attributes)
    numbers: dict[str, float] = attributes["metrics"]
    logger.info(
        "sampled iteration=%d shard=%d groups=%d generated_groups=%d rounds=%d",
        *(context.iteration, context.shard, rollouts.num_groups),
        *(int(numbers.get(k, 0)) for k in ("num_generated_groups", "ds/gen_rounds")),
    )
    return Outcome(refs={"rollouts": ref}, metrics={**numbers, **timing})
