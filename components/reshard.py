"""Interface of the stage that writes a checkpoint anew for another layout."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def reshard(
    root: str,
    config_sha256: str,
    result: dsl.Output[dsl.Model],
    reshard_report: dsl.Output[dsl.HTML],
) -> NamedTuple(  # type: ignore[valid-type]
    "Resharded", [("source_pin", str), ("result_pin", str)]
):
    """Write the state of the run for other ranks, or merged as a Hugging Face folder.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
    """
    from planish.stages.reshard.reshard import run

    return run(root=root, config_sha256=config_sha256, result=result, report=reshard_report)
