"""Interface of the exit task, which runs after success and after failure."""

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["core"], packages_to_install=[], install_kfp_package=False)
def report(
    root: str,
    max_restarts: int,
    status: dsl.PipelineTaskFinalStatus,
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
) -> None:
    """Write the report of the run from its root, whatever the state of the run.

    Args:
        root: URI of the run.
        max_restarts: How often a failed run starts again without a faulty machine.
        status: How the run ended.
    """
    from planish.stages.report.stage import run

    run(
        root=root,
        state=status.state,
        failed_task=status.pipeline_task_name,
        error_message=status.error_message or "",
        max_restarts=max_restarts,
        report=report,
        summary=summary,
    )
