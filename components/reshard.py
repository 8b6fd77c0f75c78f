"""Interface of the stage that writes a checkpoint anew for another layout, and checks it."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def reshard(
    root: str,
    source: str,
    target_layout: str,
    target: str,
    parts: str,
    role: str,
    policy: str,
    retain_folder: str,
    keep_last: int,
    keep_every: int,
    result: dsl.Output[dsl.Model],
    verification: dsl.Output[dsl.Markdown],
) -> NamedTuple("Resharded", [("result_pin", str)]):  # type: ignore[valid-type]
    """Write a checkpoint for other ranks, or merged; read it back; remove older ones.

    Args:
        root: URI of the run.
        source: URI or pin of a checkpoint.
        target_layout: `merged`, or degrees such as `tp=4`.
        target: URI of the result; empty for a folder below the root.
        parts: `all`, or `model` alone.
        role: One role of several; empty for all.
        policy: Pin of a policy with configuration and tokenizer.
        retain_folder: URI below which older checkpoints are removed; empty for none.
        keep_last: Checkpoints that stay there; 0 removes none.
        keep_every: Multiples of this step stay as well; 0 for no such rule.
    """
    from planish.stages.reshard.stage import run

    return run(
        root=root,
        source=source,
        target_layout=target_layout,
        target=target,
        parts=parts,
        role=role,
        policy=policy,
        retain_folder=retain_folder,
        keep_last=keep_last,
        keep_every=keep_every,
        result=result,
        summary=verification,
    )
