"""Interface of the stage that turns sources into prompts."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["rollout"], packages_to_install=[], install_kfp_package=False)
def curate(
    root: str,
    config_sha256: str,
    prompts: dsl.Output[dsl.Dataset],
    curation_report: dsl.Output[dsl.Markdown],
) -> None:
    """Read sources, clean, deduplicate, filter and split them; writes prompts/1.

    Where pass rates are measured, the engine of the run samples them.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
    """
    from planish.stages.curate.stage import run

    run(root=root, config_sha256=config_sha256, prompts=prompts, report=curation_report)
