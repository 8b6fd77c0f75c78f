"""Run a pipeline on this machine through kfp's local runner, from code or from the command line."""

from __future__ import annotations

import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from kfp import local


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
    try:
        local.init(
            local.SubprocessRunner(use_venv=False), pipeline_root=artifacts, raise_on_error=True
        )
        pipeline(**parameters)
    finally:
        shutil.rmtree(artifacts, ignore_errors=True)


def exit_status(run: Callable[..., None], arguments: Mapping[str, Any]) -> int:
    """Run with the arguments of a command line; 0 when every task succeeded, else 1."""
    # The runner warns that our image is not a bare Python image, once a task.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task")
    try:
        run(**arguments)
    except RuntimeError as error:
        # The log of a run that failed ends with the failed task.
        sys.stdout.write(f"{error}\n")
        return 1
    return 0
