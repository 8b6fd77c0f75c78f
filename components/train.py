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
    """Update the policy on one iteration's rollouts. Writes train-state/2 and update/1."""
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
