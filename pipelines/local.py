"""Run the post-training pipeline on this machine through kfp's local runner.

    python -m pipelines.local --root file:///tmp/run --preset dapo-tiny --iterations 2

The runner's chatter goes to standard output. The same call again resumes what was cut off.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from pipelines.monitor import monitor_of
from pipelines.post_train import build_post_train, profile_named
from pipelines.runner import exit_status, run_here
from planish.run.lock import acquire, current_holder
from planish.store import normal_uri


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
    parser.add_argument("--profile", default="cpu-tiny", help="name of a compiled profile")
    parser.add_argument("--iterations", type=int, default=None)
    parser.add_argument("--shards", type=int, default=None)


def monitor_parameters(parser: argparse.ArgumentParser) -> None:
    """Add what decides on the tasks that look for a faulty machine; without, there are none."""
    parser.add_argument("--monitor", default="", metavar="URI", help="TOML of monitor_check")
    parser.add_argument(
        "--monitor-trace", default="", metavar="URI", help="recorded trace that it looks at"
    )


def run_local(
    *,
    profile: str = "cpu-tiny",
    iterations: int | None,
    shards: int | None,
    skip_bad: bool = False,
    monitor: str = "",
    monitor_trace: str = "",
    **parameters: Any,
) -> None:
    """Run the pipeline to its end.

    Args:
        profile: name in `components.images.PROFILES`.
        iterations: iterations of this run; None keeps the profile's number.
        shards: rollout shards of an iteration; None keeps the profile's number.
        skip_bad: drop malformed lines of the data instead of refusing the file.
        monitor: URI of the settings of a task beside each train task that looks once for a
            faulty machine; empty for what is built in.
        monitor_trace: URI of a recorded trace that it looks at; empty for the servers that the
            settings name. Without both there is no such task.
        parameters: run parameters of `post_train`.

    Raises:
        RuntimeError: a task failed; the exit task has run.
        PlanishError: a count outside its limits, a root that cannot be or is in use.
    """
    chosen = profile_named(profile, num_iterations=iterations, num_shards=shards)
    if skip_bad:
        parameters["overrides"] = f"{parameters['overrides']} curate.skip_bad=true".strip()
    # Tasks run one after the other here: one that watched would hold up what it watches.
    parameters["root"] = normal_uri(parameters["root"])
    looks = monitor_of(monitor, monitor_trace, watches=False)
    # Before the first stage writes anything: a run that is refused leaves no trace.
    acquire(parameters["root"], current_holder())
    run_here(build_post_train(chosen, monitor=looks), parameters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when every task succeeded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    run_parameters(parser)
    monitor_parameters(parser)
    arguments = vars(parser.parse_args(argv))
    return exit_status(run_local, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
