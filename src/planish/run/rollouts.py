"""The rollout shards of one task: with fewer tasks than shards, each runs several in turn.

The first task of an iteration also evaluates the policy, where the configuration asks for it.
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

    An attempt after one that was cut off finds the finished shards done and goes on behind them.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        number: iteration within this run, from 1.
        offset: iterations before this run.
        shard: index of the first shard.
        num_tasks: rollout tasks of the iteration.
        num_shards: shards of the iteration; they share the groups evenly.
        policy_pin: pinned URI of the policy that samples.
        state_pin: pinned URI of the train state that holds the prompt cursor; "" at the beginning.
        rollouts: gets the Ref of the last of these rollout sets.
        metrics: gets the counts, shares and lengths of the same.
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
