"""Run a pipeline on this machine through kfp's local runner, from code or from the command line."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from kfp import local

from planish.base.errors import EXIT_FAILED, PlanishError, exit_code
from planish.run.signals import end_descendants, on_signal

STOP_SECONDS = 25.0
"""A task that was asked to end gets so long, its stage and what clears up after it together."""


def run_here(pipeline: Callable[..., Any], parameters: Mapping[str, Any]) -> None:
    """Run a pipeline to its end.

    Args:
        pipeline: as `dsl.pipeline` decorates it.
        parameters: its inputs.

    Raises:
        RuntimeError: a task failed; the exit task has run.
    """
    # Artifacts here are Refs of a few bytes; the data lie where the stages put them.
    artifacts = tempfile.mkdtemp(prefix="planish-kfp-")

    def stop(number: int) -> None:
        # kfp would go on with the tasks that wait, and with the exit task: nothing returns to it.
        end_descendants(STOP_SECONDS)
        shutil.rmtree(artifacts, ignore_errors=True)
        os._exit(128 + number)

    try:
        local.init(
            local.SubprocessRunner(use_venv=False), pipeline_root=artifacts, raise_on_error=True
        )
        with on_signal(stop):
            pipeline(**parameters)
    finally:
        shutil.rmtree(artifacts, ignore_errors=True)


def exit_status(run: Callable[..., None], arguments: Mapping[str, Any]) -> int:
    """Run with the arguments of a command line.

    Returns:
        0 when every task succeeded, 1 when one failed, else the code of the error that kept the run
        from its first task; the last line of the output tells the reason.
    """
    # The runner warns that our image is not a bare Python image, once a task.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task")
    try:
        run(**arguments)
    except RuntimeError as error:
        # The log of a run that failed ends with the failed task.
        sys.stdout.write(f"{error}\n")
        return EXIT_FAILED
    except PlanishError as error:
        sys.stdout.write(f"error: {error}\n")
        return exit_code(error)
    return 0
