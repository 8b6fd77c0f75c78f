"""Run what Kubeflow was asked to run: `python -m tests.integration.one_run PARAMETERS_JSON`."""

import dataclasses
import json
import sys
from typing import Any

from pipelines.local import exit_status, run_here
from pipelines.monitor import Monitor
from pipelines.post_train import build_post_train, profile_named


def run_once(trace: str, **parameters: Any) -> None:
    """Run an iteration of two shards; a killed train task fails its run, which may restart."""
    profile = profile_named("cpu-tiny", num_iterations=1, num_shards=2)
    train = dataclasses.replace(profile.stages["train"], retries=0)
    profile = dataclasses.replace(profile, stages={**profile.stages, "train": train})
    monitor = Monitor(trace=trace, watches=False, max_restarts=1)
    run_here(build_post_train(profile, monitor=monitor, one_machine=True), parameters)


if __name__ == "__main__":
    raise SystemExit(exit_status(run_once, json.loads(sys.argv[1])))
