"""Interface of the supervised cold start."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["train"], packages_to_install=[], install_kfp_package=False)
def sft(
    root: str,
    config_sha256: str,
    prompts: dsl.Input[dsl.Dataset],
    start_policy: dsl.Output[dsl.Model],
    sft_metrics: dsl.Output[dsl.Metrics],
) -> NamedTuple(  # type: ignore[valid-type]
    "Start", [("policy_pin", str), ("state_pin", str)]
):
    """Give the policy that the first iteration starts from. Writes policy/1.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        prompts: Ref of the training prompts.
    """
    from planish.stages.sft.stage import run

    return run(
        root=root,
        config_sha256=config_sha256,
        prompts=prompts,
        policy=start_policy,
        metrics=sft_metrics,
    )
