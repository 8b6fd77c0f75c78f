"""The rollout stage: sample one shard of the groups of an iteration and write them."""

from __future__ import annotations

import logging
import time
from typing import Any

from planish.errors import ConfigError
from planish.records import layout
from planish.records.io import finished, read_manifest, read_set, write_set
from planish.records.prompts import PromptSet
from planish.records.refs import Ref, parse_pin
from planish.records.rollouts import RolloutSet
from planish.records.stream import Cursor, assign, fresh_cursor, parse_cursor
from planish.rollout.config import RolloutConfig
from planish.rollout.groups import as_rollouts
from planish.rollout.metrics import batch_metrics
from planish.rollout.sampler import Batch, draw_batch
from planish.stage import Artifact, Context, Outcome, execute, is_stopped, mark_stopped

logger = logging.getLogger(__name__)


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


def read_cursor(state_pin: str) -> Cursor:
    """Return the prompt cursor of a train state; a fresh one for ""."""
    if not state_pin:
        return fresh_cursor()
    from planish.checkpoint.api import read_state_info

    data = read_state_info(state_pin)["data"]
    return parse_cursor({"next": data["next"], "pending": data["pending"]})


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
    cursor = read_cursor(state_pin)
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
    ready = _ready(context, parents, facts)
    if ready is not None:
        return ready
    if mark_stopped(context.root, context.iteration):
        attributes = {**facts, "stopped": True, "consumed": [], "metrics": {}}
        return _write(context, RolloutSet.empty(), parents, attributes, {})
    prompts = read_set(PromptSet, prompts_uri, sha256=prompts_digest)
    batch, version, timing = _sample(context, config, prompts, policy_pin, cursor, num_shards)
    numbers = batch_metrics(batch)
    attributes = {
        **facts,
        "stopped": False,
        "policy_version": version,
        "consumed": batch.consumed(),
        "metrics": numbers,
    }
    return _write(context, as_rollouts(batch.kept, prompts), parents, attributes, timing)


def _ready(context: Context, parents: dict[str, str], facts: dict[str, Any]) -> Outcome | None:
    """Return the outcome of an earlier attempt with the same inputs."""
    uri = layout.rollouts(context.root, context.iteration, context.shard)
    ref = finished(uri, RolloutSet.SCHEMA, parents=parents, config_sha256=context.config_sha256)
    if ref is None:
        return None
    attributes = read_manifest(uri, sha256=ref.manifest_sha256).attributes
    if any(attributes.get(name) != value for name, value in facts.items()):
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
) -> tuple[Batch, int, dict[str, float]]:
    """Return the batch, the policy version, and timings for the eyes of people."""
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
        batch = draw_batch(ordinals, sample, room, config)
        seconds = time.monotonic() - loaded
        version = engine.version()
        tokens = sum(group.num_tokens for group in batch.generated())
        occupancy = float(engine.stats().get("occupancy", 0.0))
    timing = {
        "load_seconds": loaded - begin,
        "sample_seconds": seconds,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "engine_occupancy": occupancy,
    }
    return batch, version, timing


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
