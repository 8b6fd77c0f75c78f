"""Run the post-training pipeline on this machine through kfp's local runner.

    python -m pipelines.local --root file:///tmp/run --preset dapo-tiny --iterations 2

The runner's chatter goes to standard output. The same call again resumes what was cut off.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

from kfp import local

from pipelines.post_train import build_post_train, profile_named


def run_parameters(parser: argparse.ArgumentParser, *, root_required: bool = True) -> None:
    """Add the run parameters of `post_train` that mean something on one machine."""
    parser.add_argument("--root", required=root_required, help="file:///... or s3://...")
    parser.add_argument("--preset", default="dapo-tiny")
    parser.add_argument("--config", default="", help="TOML file laid over the preset")
    parser.add_argument("--overrides", default="", help="section.key=value, separated by spaces")
    parser.add_argument("--skip-bad", action="store_true", help="drop malformed lines of the data")
    parser.add_argument("--model", default="", help="hub id or folder; empty trains from scratch")
    parser.add_argument("--dataset", default="", help="file or hub id; empty generates tasks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume-from", default="", help="root of an earlier run to start from")
    parser.add_argument("--chain-index", type=int, default=0)
    parser.add_argument("--allow-config-change", action="store_true")
    parser.add_argument("--webhook", default="", help="URL that gets the summary at the end")
    parser.add_argument("--profile", default="cpu-tiny", help="name of a compiled profile")
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--shards", type=int, default=None)


def run_local(
    *,
    profile: str = "cpu-tiny",
    iterations: int | None,
    shards: int | None,
    skip_bad: bool = False,
    **parameters: Any,
) -> None:
    """Run the pipeline to its end.

    Args:
        profile: name in `components.images.PROFILES`.
        iterations: iterations of this run; None keeps the profile's number.
        shards: rollout shards of an iteration; None keeps the profile's number.
        skip_bad: drop malformed lines of the data instead of refusing the file.
        parameters: run parameters of `post_train`.

    Raises:
        RuntimeError: a task failed; the exit task has run.
        ValueError: a count outside its limits.
    """
    chosen = profile_named(profile, num_iterations=iterations, num_shards=shards)
    if skip_bad:
        parameters["overrides"] = f"{parameters['overrides']} curate.skip_bad=true".strip()
    # Artifacts here are Refs of a few bytes; the data lie under the run root.
    artifacts = tempfile.mkdtemp(prefix="planish-kfp-")
    try:
        local.init(
            local.SubprocessRunner(use_venv=False), pipeline_root=artifacts, raise_on_error=True
        )
        build_post_train(chosen)(**parameters)
    finally:
        shutil.rmtree(artifacts, ignore_errors=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when every task succeeded, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    run_parameters(parser)
    arguments = vars(parser.parse_args(argv))
    # The runner warns that our image is not a bare Python image, once a task.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task")
    try:
        run_local(**arguments)
    except RuntimeError as error:
        print(error)  # noqa: T201 - the log of a run that failed ends with the failed task
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
