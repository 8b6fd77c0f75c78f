"""Interface of the task that runs several iterations, whose ranks keep trainer and engine."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["rollout"], packages_to_install=[], install_kfp_package=False)
def iterate(
    root: str,
    config_sha256: str,
    number: int,
    count: int,
    policy_pin: str,
    state_pin: str,
) -> NamedTuple("Iterated", [("policy_pin", str), ("state_pin", str)]):  # type: ignore[valid-type]
    """Run rollout, reward, train and checkpoint of several iterations. Writes what they write.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: First of the iterations, 1, 2, ... in this run.
        count: Iterations of this task.
        policy_pin: URI and digest of the policy before these iterations.
        state_pin: URI and digest of the train state before them; empty before the first update.
    """
    from planish.stages.iterate.stage import run

    return run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        count=count,
        policy_pin=policy_pin,
        state_pin=state_pin,
    )
