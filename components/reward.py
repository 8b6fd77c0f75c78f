"""Interface of the stage that scores rollouts."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def reward(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    num_shards: int,
    policy_pin: str,
    rewards: dsl.Output[dsl.Dataset],
    reward_metrics: dsl.Output[dsl.Metrics],
) -> None:
    """Make rewards of the verdicts on all shards. Reads rollouts/2, writes rewards/1. CPU only.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: 1, 2, ... in this run.
        offset: Iterations of the chain before this run.
        num_shards: Rollout shards of an iteration.
        policy_pin: URI and digest of the policy before this iteration.
    """
    from planish.stages.reward.stage import run

    run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        offset=offset,
        num_shards=num_shards,
        policy_pin=policy_pin,
        rewards=rewards,
        metrics=reward_metrics,
    )
