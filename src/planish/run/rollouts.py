"""The rollout shards of one task: with fewer tasks than shards, each runs several in turn.

The first task of an iteration also evaluates the policy, if the configuration says so.
"""

from __future__ import annotations

from planish.run.__main__ import stage_run
from planish.run.stage import Artifact


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    shard: int,
    num_tasks: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    rollouts: Artifact,
    metrics: Artifact,
) -> None:
    """Run the shards `shard`, `shard + num_tasks`, ...; each writes its own records and log.

    A retry after an interrupted attempt skips finished shards.
    The arguments are those of the stage; `rollouts` and `metrics` are those of the last shard.
    """
    sample = stage_run("rollout")
    for index in range(shard, num_shards, num_tasks):
        sample(
            root=root,
            config_sha256=config_sha256,
            number=number,
            offset=offset,
            shard=index,
            num_shards=num_shards,
            policy_pin=policy_pin,
            state_pin=state_pin,
            rollouts=rollouts,
            metrics=metrics,
        )
    if shard == 0:
        stage_run("evaluate_iteration")(
            root=root,
            config_sha256=config_sha256,
            number=number,
            offset=offset,
            policy_pin=policy_pin,
        )
