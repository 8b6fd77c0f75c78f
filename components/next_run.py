"""Interface of the stage that submits the following run of a chain."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def next_run(
    root: str,
    config_sha256: str,
    chain_index: int,
    chain: str,
) -> None:
    """Submit run chain_index + 1 on the same root, once, until `runs` of chain or the stop file.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        chain_index: Place of this run in its chain, from 0.
        chain: JSON of the chain; see the run parameter.
    """
    from planish.stages.next_run.stage import run

    run(
        root=root,
        config_sha256=config_sha256,
        chain_index=chain_index,
        chain=chain,
    )
