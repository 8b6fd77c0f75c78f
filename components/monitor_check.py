"""Interface of the stage that looks for a faulty machine while another stage works."""

from typing import NamedTuple

from kfp import dsl

from components.images import IMAGES


@dsl.component(base_image=IMAGES["monitor"], packages_to_install=[], install_kfp_package=False)
def monitor_check(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    settings: str,
    trace: str,
    job: str,
    watch_seconds: int,
    monitor_result: dsl.Output[dsl.Artifact],
    monitor_metrics: dsl.Output[dsl.Metrics],
) -> NamedTuple("Checked", [("faulty_machine", str)]):  # type: ignore[valid-type]
    """Look for a faulty machine in Prometheus or in a recorded trace. A fault does not fail it.

    Args:
        root: URI of the run.
        config_sha256: Digest of the configuration in run.json.
        number: 1, 2, ... in this run.
        offset: Iterations of the chain before this run.
        settings: URI of the monitor's TOML; empty for what is built in.
        trace: URI of a recorded trace; empty for Prometheus.
        job: Job that is watched; empty for this run.
        watch_seconds: How long to look; 0 for one look.
    """
    from planish.stages.monitor_check.stage import run

    return run(
        root=root,
        config_sha256=config_sha256,
        number=number,
        offset=offset,
        settings=settings,
        trace=trace,
        job=job,
        watch_seconds=watch_seconds,
        result=monitor_result,
        metrics=monitor_metrics,
    )
