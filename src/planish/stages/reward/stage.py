"""The reward stage: read the rollouts of all shards, score, write one reward set."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.records import layout
from planish.records.files import WEIGHTS, weights_name
from planish.records.io import finished, read_manifest, read_set, write_set
from planish.records.refs import Ref
from planish.records.rewards import MAX_ITERATIONS_WITHOUT_SIGNAL, RewardSet, nothing_learnt
from planish.records.rollouts import RolloutSet
from planish.run.stage import Artifact, Context, Outcome, execute
from planish.stages.reward.config import RewardConfig
from planish.stages.reward.score import score
from planish.stages.reward.signal import groups_without_signal

logger = logging.getLogger(__name__)


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    num_shards: int,
    policy_pin: str,
    rewards: Artifact,
    metrics: Artifact,
) -> None:
    """Score the rollouts of one iteration.

    `components/reward.py` describes the parameters.
    """
    execute(
        "reward",
        lambda context: reward(context, num_shards, policy_pin),
        root=root,
        config_sha256=config_sha256,
        iteration=offset + number,
        outputs={"rewards": rewards, "metrics": metrics},
    )


def reward(context: Context, num_shards: int, policy_pin: str) -> Outcome:
    """Score the shards of an iteration unless an earlier attempt has."""
    config = context.section(RewardConfig, "reward")
    target = layout.rewards(context.root, context.iteration)
    version, weights = weights_name(policy_pin)
    wanted = {
        "config_sha256": context.config_sha256,
        "policy_version": version,
        WEIGHTS: weights,
    }
    digests = [_shard_digest(context, shard, wanted) for shard in range(num_shards)]
    parents = {f"rollouts-{shard:02d}": digest for shard, digest in enumerate(digests)}
    ready = finished(target, RewardSet.SCHEMA, parents=parents, config_sha256=context.config_sha256)
    if ready is not None:
        numbers = read_manifest(target, sha256=ready.manifest_sha256).attributes["metrics"]
        return _outcome(context, ready, dict(numbers), already_done=True)
    shards: list[RolloutSet] = []
    sampled: list[dict[str, float]] = []
    for shard, digest in enumerate(digests):
        uri = layout.rollouts(context.root, context.iteration, shard)
        shards.append(read_set(RolloutSet, uri, sha256=digest, with_optional=False))
        sampled.append(read_manifest(uri, sha256=digest).attributes.get("metrics", {}))
    rollouts = RolloutSet.concat(shards)
    scores = score(rollouts, config)
    lacking = groups_without_signal(rollouts, scores.rewards, sampled)
    if lacking:
        try:
            before = read_manifest(layout.rewards(context.root, context.iteration - 1)).attributes
        except ObjectMissing:
            before = {}
        row = before.get("metrics", {}).get("iterations_without_signal", 0.0) + 1.0
        scores.metrics.update(lacking, iterations_without_signal=row)
    ref = write_set(
        target,
        scores.rewards,
        parents=parents,
        attributes={
            "config_sha256": context.config_sha256,
            "iteration": context.iteration,
            "metrics": scores.metrics,
        },
    )
    logger.info(
        "scored iteration=%d rollouts=%d kept=%d accuracy=%.4f",
        context.iteration,
        scores.rewards.num_rows,
        scores.metrics["num_kept_rollouts"],
        scores.metrics.get("accuracy_mean", 0.0),
    )
    return _outcome(context, ref, scores.metrics)


def _outcome(
    context: Context, ref: Ref, metrics: dict[str, float], *, already_done: bool = False
) -> Outcome:
    """Return the outcome, with a failure after too many iterations in a row without signal."""
    outcome = Outcome(refs={"rewards": ref}, metrics=metrics, already_done=already_done)
    told = nothing_learnt(metrics)
    if not told:
        return outcome
    logger.warning("iteration %d: %s", context.iteration, told)
    row = int(metrics["iterations_without_signal"])
    setting = "max_iterations_without_signal"
    limit = int(context.config.get("rollout", {}).get(setting, MAX_ITERATIONS_WITHOUT_SIGNAL))
    if limit and row >= limit:
        outcome.failure = ConfigError(
            f"{told}. So it went in {row} iterations in a row, and `rollout.{setting}` = {limit} "
            "ends the run; 0 never ends it"
        )
    return outcome


def _shard_digest(context: Context, shard: int, wanted: Mapping[str, Any]) -> str:
    """Return the manifest digest of a shard; its attributes must have the `wanted` values."""
    uri = layout.rollouts(context.root, context.iteration, shard)
    try:
        manifest = read_manifest(uri)
    except ObjectMissing:
        raise RecordError(
            f"rollout shard {shard} must be complete before reward runs, got no manifest at "
            f"`{uri}`; the rollout task of that shard has not finished: run it again"
        ) from None
    for name, expected in wanted.items():
        seen = manifest.attributes.get(name)
        if seen != expected:
            raise RecordError(
                f"rollout shard {shard} (manifest {manifest.sha256}) must have {name} "
                f"{expected}, got {seen}; it was sampled in another run: choose a new root or "
                f"run the rollout task of shard {shard} again"
            )
    return manifest.sha256
