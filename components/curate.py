"""Interface of the stage that turns sources into prompts."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def curate(
    root: str,
    config_sha256: str,
    prompts: dsl.Output[dsl.Dataset],
    curation_report: dsl.Output[dsl.Markdown],
) -> None:
    """Read sources, clean, deduplicate, filter and split them. Writes prompts/1. CPU only."""
    from planish.stages.curate.stage import run

    run(root=root, config_sha256=config_sha256, prompts=prompts, report=curation_report)
