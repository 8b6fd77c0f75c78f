"""Interface of the exit task that removes older checkpoints of a folder."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def checkpoint_retain(
    root: str,
    folder: str,
    keep_last: int,
    keep_every: int,
    status: dsl.PipelineTaskFinalStatus,
    retention: dsl.Output[dsl.Markdown],
) -> None:
    """Keep the newest checkpoints below a folder, after success only; clear up leftovers.

    Args:
        root: URI of the run.
        folder: URI below which checkpoints lie; empty for none.
        keep_last: Checkpoints that stay; 0 removes none.
        keep_every: Multiples of this step stay as well; 0 for no such rule.
        status: How the run ended.
    """
    from planish.stages.reshard.retain import run

    run(
        root=root,
        state=status.state,
        folder=folder,
        keep_last=keep_last,
        keep_every=keep_every,
        summary=retention,
    )
