"""Interface of the stage that exports a train state as a policy."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["train"], packages_to_install=[], install_kfp_package=False)
def checkpoint(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    policy_pin: str,
    state: dsl.Input[dsl.Model],
    policy: dsl.Output[dsl.Model],
) -> NamedTuple("Exported", [("policy_pin", str)]):  # type: ignore[valid-type]
    """Export the train state as a Hugging Face folder. Reads train-state/2, writes policy/1.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: 1, 2, ... in this run.
        offset: Iterations of the chain before this run.
        policy_pin: URI and digest of the policy before this iteration.
        state: Ref of the train state.
    """
    from planish.stages.export.stage import run

    return run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        offset=offset,
        policy_pin=policy_pin,
        state=state,
        policy=policy,
    )
