"""Interface of the stage that pins the source of a reshard run."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def reshard_prepare(
    root: str,
    source: str,
    target_layout: str,
    target: str,
    parts: str,
    role: str,
    policy: str,
    plan: dsl.Output[dsl.Markdown],
) -> NamedTuple("ReshardPrepared", [("config_sha256", str)]):  # type: ignore[valid-type]
    """Check source, layout and target of a reshard run; write run.json; say what will happen.

    Args:
        root: URI of the run.
        source: URI or pin of a checkpoint.
        target_layout: `merged`, or degrees such as `tp=4`.
        target: URI of the result; empty for a folder below the root.
        parts: `all`, or `model` alone.
        role: One role of several; empty for all.
        policy: Pin of a policy with configuration and tokenizer.
    """
    from planish.stages.reshard.prepare import run

    return run(
        root=root,
        source=source,
        target_layout=target_layout,
        target=target,
        parts=parts,
        role=role,
        policy=policy,
        summary=plan,
    )
