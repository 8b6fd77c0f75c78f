"""The rollout stage: sample and judge one shard of an iteration, and write one rollout set."""

from __future__ import annotations

import functools
import logging
from typing import Any

from planish import store
from planish.engines import OpenEngine, open_engine
from planish.records import layout
from planish.records.io import read_manifest, read_set, write_set
from planish.records.manifest import manifest_uri
from planish.records.prompts import PromptSet
from planish.records.rollouts import RolloutSet
from planish.run.stage import Artifact, Context, Outcome, execute, is_stopped, mark_stopped
from planish.stages.rollout.job import (
    RolloutJob,
    Sampled,
    Start,
    read_data,
    rollout_config,
    start_of,
)
from planish.stages.rollout.side_sets import is_there
from planish.stages.rollout.whole import sample_whole
from planish.stages.rollout.windows import sample_windows

logger = logging.getLogger(__name__)

_SIDE_SETS = {"surplus_sha256": layout.surplus, "carry_sha256": layout.carry}
"""Attribute of the rollout set to the function that places the named set."""


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
        lambda context: sample(context, num_shards, start_of(policy_pin, read_data(state_pin))),
        root=root,
        config_sha256=config_sha256,
        iteration=offset + number,
        shard=shard,
        outputs={"rollouts": rollouts, "metrics": metrics},
    )


def sample(
    context: Context, num_shards: int, start: Start, opened: OpenEngine = open_engine
) -> Outcome:
    """Sample one shard unless an earlier attempt has.

    Arguments are those of `run`; `opened` opens the engine, only if something is left to sample.
    """
    config = rollout_config(context.config)
    digest = read_manifest(layout.prompts(context.root)).sha256
    job = RolloutJob(context, config, num_shards, start, digest, opened)
    facts = job.facts()
    ready = _ready(job, facts)
    if ready is not None:
        job.commits().clear()
        return ready
    if mark_stopped(context.root, context.iteration):
        attributes: dict[str, Any] = {"stopped": True, "consumed": [], "metrics": {}}
        attributes |= {"surplus_sha256": ""} if job.has_surplus else {}
        # the state before, which stays, still names the carry sets
        attributes |= {"carry_sha256": ""} if config.window_tokens else {}
        sampled = Sampled(RolloutSet.empty(), attributes, {})
    else:
        prompts = _prompts(layout.prompts(context.root), digest)
        sampled = (sample_windows if config.window_tokens else sample_whole)(job, prompts)
    uri = layout.rollouts(context.root, context.iteration, context.shard)
    attributes = {"stopped": False, **facts, **sampled.attributes}
    ref = write_set(uri, sampled.rollouts, parents=job.parents, attributes=attributes)
    job.commits().clear()
    metrics: dict[str, float] = sampled.attributes["metrics"]
    logger.info(
        "sampled iteration=%d shard=%d groups=%d generated_groups=%d rounds=%d",
        context.iteration,
        context.shard,
        sampled.rollouts.num_groups,
        int(metrics.get("num_generated_groups", 0)),
        int(metrics.get("ds/gen_rounds", 0)),
    )
    return Outcome(refs={"rollouts": ref}, metrics={**metrics, **sampled.timing})


@functools.lru_cache(maxsize=1)
def _prompts(uri: str, digest: str) -> PromptSet:
    """Return the prompts of a run, which all iterations of a task share."""
    return read_set(PromptSet, uri, sha256=digest)


def _ready(job: RolloutJob, facts: dict[str, Any]) -> Outcome | None:
    """Return the outcome of an earlier attempt with the same inputs."""
    context = job.context
    place = (context.root, context.iteration, context.shard)
    uri = layout.rollouts(*place)
    if not store.exists(manifest_uri(uri)):
        return None
    manifest = read_manifest(uri)
    attributes = manifest.attributes
    # Sets of earlier releases also name the manifest of their policy as a parent.
    is_same = (
        manifest.schema in (RolloutSet.SCHEMA, *RolloutSet.OLDER)
        and job.parents.items() <= manifest.parents.items()
        and all(attributes.get(name) == value for name, value in facts.items())
    )
    if not is_same:
        return None
    if not all(is_there(at(*place), attributes.get(name, "")) for name, at in _SIDE_SETS.items()):
        return None
    if attributes["stopped"] and not is_stopped(context.root, context.iteration):
        return None
    refs = {"rollouts": manifest.ref(uri)}
    return Outcome(refs=refs, metrics=dict(attributes["metrics"]), already_done=True)
