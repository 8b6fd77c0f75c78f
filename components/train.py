"""Interface of the stage that updates the policy."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["train"], packages_to_install=[], install_kfp_package=False)
def train(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    rewards: dsl.Input[dsl.Dataset],
    train_state: dsl.Output[dsl.Model],
    train_metrics: dsl.Output[dsl.Metrics],
) -> NamedTuple("Trained", [("state_pin", str)]):  # type: ignore[valid-type]
    """Update the policy on one iteration's rollouts. Writes train-state/2 and update/1.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: 1, 2, ... in this run.
        offset: Iterations of the chain before this run.
        num_shards: Rollout shards of an iteration.
        policy_pin: URI and digest of the policy before this iteration.
        state_pin: URI and digest of the train state before it; empty before the first update.
        rewards: Ref of the rewards.
    """
    from planish.stages.train.stage import run

    return run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        offset=offset,
        num_shards=num_shards,
        policy_pin=policy_pin,
        state_pin=state_pin,
        rewards=rewards,
        state=train_state,
        metrics=train_metrics,
    )
