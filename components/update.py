"""Interface of the task that rewards, trains and exports, for profiles that are `compact`."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["train"], packages_to_install=[], install_kfp_package=False)
def update(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    train_state: dsl.Output[dsl.Model],
    train_metrics: dsl.Output[dsl.Metrics],
) -> NamedTuple("Updated", [("policy_pin", str), ("state_pin", str)]):  # type: ignore[valid-type]
    """Run the stages reward, train and checkpoint in turn; each writes what it always writes.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: 1, 2, ... in this run.
        offset: Iterations of the chain before this run.
        num_shards: Rollout shards of an iteration.
        policy_pin: URI and digest of the policy before this iteration.
        state_pin: URI and digest of the train state before it; empty before the first update.
    """
    from planish.run.update import run

    return run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        offset=offset,
        num_shards=num_shards,
        policy_pin=policy_pin,
        state_pin=state_pin,
        state=train_state,
        metrics=train_metrics,
    )
