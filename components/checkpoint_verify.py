"""Interface of the stage that reads a checkpoint back and compares it with its source."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def checkpoint_verify(
    root: str,
    source_pin: str,
    checkpoint: dsl.Input[dsl.Model],
    verification: dsl.Output[dsl.Markdown],
) -> None:
    """Check every block of a checkpoint or policy, and every tensor against its source.

    Args:
        root: URI of the run.
        source_pin: URI and digest of the checkpoint that it was made from.
        checkpoint: Ref of the checkpoint or policy to check.
    """
    from planish.stages.reshard.verify import run

    run(
        root=root,
        source_pin=source_pin,
        checkpoint=checkpoint,
        summary=verification,
    )
