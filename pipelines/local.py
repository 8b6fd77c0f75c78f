"""Run a pipeline on this machine through kfp's local runner; from the command line `post_train`.

    python -m pipelines.local --root /tmp/run --preset dapo-tiny --iterations 2

The log of the runner goes to standard output. The same call again resumes what was cut off.
"""

from __future__ import annotations

import argparse
import builtins
import contextlib
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pipelines.monitor import monitor_of, monitor_options
from pipelines.warm import warm_tasks
from planish import store
from planish.base.errors import EXIT_FAILED, PlanishError, exit_code
from planish.base.startup import spare_collections
from planish.records import layout
from planish.run.chain import with_settings
from planish.run.lock import acquire, current_holder
from planish.run.signals import RUN_STOP_SECONDS, Terminated, end_descendants, on_signal
from planish.run.stage import LOCAL_RUN
from planish.store import normal_pin, normal_uri
from planish.store.documents import read_json
from planish.submit.local.command import run_parameters
from planish.submit.local.run import chosen_preset


@contextlib.contextmanager
def output_restored() -> Iterator[None]:
    """Give the program its `print` and its root logger back when the block ends.

    kfp replaces both while a task runs. Of two at once the later one takes what the earlier one has
    put there for the program's own, and leaves that behind: every line would stay indented.
    """
    root, plain_print = logging.getLogger(), builtins.print
    level, handlers = root.level, root.handlers[:]
    try:
        yield
    finally:
        builtins.print = plain_print
        root.setLevel(level)
        root.handlers[:] = handlers


def run_here(pipeline: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Run a pipeline to its end.

    Args:
        pipeline: as `dsl.pipeline` decorates it.
        parameters: its inputs.

    Raises:
        RuntimeError: a task failed; the exit task has run.
    """
    from kfp import local

    # Artifacts here are Refs of a few bytes; the data lie where the stages put them.
    artifacts = tempfile.mkdtemp(prefix="planish-kfp-")

    def stop(number: int) -> None:
        # kfp would go on with the tasks that wait, and with the exit task: nothing returns to it.
        end_descendants(RUN_STOP_SECONDS)
        shutil.rmtree(artifacts, ignore_errors=True)
        stopped = Terminated(number, 128 + number)
        sys.stderr.write(f"{stopped}; the same command resumes\n")
        sys.stderr.flush()
        os._exit(128 + number)

    try:
        local.init(
            local.SubprocessRunner(use_venv=False), pipeline_root=artifacts, raise_on_error=True
        )
        # By this a second attempt knows that the first one failed for good.
        os.environ[LOCAL_RUN] = uuid.uuid4().hex
        with output_restored(), on_signal(stop), warm_tasks():
            pipeline(**parameters)
    finally:
        os.environ.pop(LOCAL_RUN, None)
        shutil.rmtree(artifacts, ignore_errors=True)


def exit_status(run: Callable[..., None], arguments: Mapping[str, Any]) -> int:
    """Run with the arguments of a command line.

    Returns:
        0 when every task succeeded, the code of the first stage that failed, or that of the error
        that kept the run from its first task; the last line of the output tells the reason.
    """
    began = time.time()
    # The runner warns that our image is not a bare Python image, once a task.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task")
    try:
        run(**arguments)
    except RuntimeError as error:
        # The log of a run that failed ends with the failed task.
        sys.stdout.write(f"{error}\n")
        return failed_code(arguments["root"], began)
    except PlanishError as error:
        sys.stdout.write(f"error: {error}\n")
        return exit_code(error)
    return 0


def failed_code(root: str, since: float) -> int:
    """Return the exit code of the first stage that failed after `since` (Unix seconds).

    kfp tells no codes: the stages write them into their logs. 1 where none has, and the code of the
    error where the store does not answer.
    """
    ended: list[tuple[float, int]] = []
    try:
        for uri in store.list_uris(layout.logs(normal_uri(root))):
            entry = read_json(uri) if uri.endswith(".json") else {}
            if entry.get("state") == "failed" and entry["start_seconds"] >= since:
                ended.append((entry["start_seconds"] + entry["seconds"], entry["exit_code"]))
    except PlanishError as error:
        return exit_code(error)
    return min(ended, default=(0.0, EXIT_FAILED))[1]


def run_local(
    *,
    profile: str = "cpu-tiny",
    iterations: int | None,
    shards: int | None,
    resident: int | None = None,
    skip_bad: bool = False,
    dataset_map: str = "",
    resume_from: str = "",
    chain_index: int = 0,
    allow_config_change: bool = False,
    monitor: str = "",
    monitor_trace: str = "",
    **parameters: Any,
) -> None:
    """Run the pipeline to its end.

    Args:
        profile: name in `components.images.PROFILES`.
        iterations: iterations of this run; None keeps the profile's number.
        shards: rollout shards of an iteration; None keeps the profile's number.
        resident: iterations of one task, whose ranks keep trainer and engine; None keeps the
            profile's number, 0 gives every stage a task.
        skip_bad: drop malformed lines of the data instead of refusing the file.
        dataset_map: which columns hold what, `prompt=question,answer=label`.
        resume_from: root of another run whose newest policy and state start this one.
        chain_index: place in a chain of runs on the root; -1 for the first unfinished.
        allow_config_change: go on when the root holds another configuration.
        monitor: URI of the settings of a task beside each train task that looks once for a
            faulty machine; empty for what is built in.
        monitor_trace: URI of a recorded trace that it looks at; empty for the servers that the
            settings name. Without both there is no such task.
        parameters: run parameters of `post_train`.

    Raises:
        RuntimeError: a task failed; the exit task has run.
        PlanishError: a count outside its limits, a root that cannot be or is in use.
    """
    from pipelines.post_train import build_post_train, profile_named
    from planish.submit.parameters import with_data

    chosen = profile_named(
        profile,
        num_iterations=iterations,
        num_shards=shards,
        iterations_per_task=resident,
    )
    if skip_bad:
        parameters["overrides"] = f"{parameters['overrides']} curate.skip_bad=true".strip()
    parameters = with_data(parameters, dataset_map)
    parameters["chain"] = with_settings(
        "",
        index=chain_index,
        resume_from=resume_from and normal_pin(resume_from),
        allow_config_change=allow_config_change,
    )
    # Tasks run one after the other here: one that watched would hold up what it watches.
    parameters["root"] = normal_uri(parameters["root"])
    looks = monitor_of(monitor, monitor_trace, watches=False)
    # Before the first stage writes anything: a run that is refused leaves no trace.
    acquire(parameters["root"], current_holder())
    run_here(build_post_train(chosen, monitor=looks, one_machine=True), parameters)


def main(argv: Sequence[str] | None = None) -> int:
    """Run from the command line; 0 when every task succeeded."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    run_parameters(parser, root_required=True)
    monitor_options(parser, on_cluster=False)
    arguments = vars(parser.parse_args(argv))
    arguments["overrides"] = " ".join(arguments["overrides"])
    arguments["preset"] = chosen_preset(arguments["preset"], arguments["model"])
    return exit_status(run_local, arguments)


if __name__ == "__main__":
    spare_collections()
    raise SystemExit(main())
