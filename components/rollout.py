"""Interface of the stage that samples responses."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["rollout"], packages_to_install=[], install_kfp_package=False)
def rollout(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    shard: int,
    num_tasks: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    rollouts: dsl.Output[dsl.Dataset],
    rollout_metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Sample and judge every num_tasks-th shard of the batch in turn. Writes rollouts/2.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: 1, 2, ... in this run.
        offset: Iterations of the chain before this run.
        shard: This task, from 0.
        num_tasks: Rollout tasks of the iteration.
        num_shards: Rollout shards of an iteration.
        policy_pin: URI and digest of the policy before this iteration.
        state_pin: URI and digest of the train state before it; empty before the first update.
    """
    from planish.run.rollouts import run

    run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        offset=offset,
        shard=shard,
        num_tasks=num_tasks,
        num_shards=num_shards,
        policy_pin=policy_pin,
        state_pin=state_pin,
        rollouts=rollouts,
        metrics=rollout_metrics,
    )
