"""A pipeline whose tasks run where they are told to: kfp's local runner says what runs when."""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kfp import local
from kfp.local import status, subprocess_task_handler

from pipelines.local import output_restored


def run_tasks(
    pipeline: Callable[..., Any],
    parameters: Mapping[str, Any],
    folder: Path,
    run_task: Callable[[str, Sequence[str], Mapping[str, str]], int],
) -> None:
    """Run a pipeline to its end.

    Args:
        pipeline: as `dsl.pipeline` decorates it.
        parameters: its inputs.
        folder: where tasks give each other artifacts; all of them see it.
        run_task: takes image, command and variables of a task, returns its exit code.

    Raises:
        RuntimeError: a task failed.
    """

    class Handler(subprocess_task_handler.SubprocessTaskHandler):
        def run(self) -> status.Status:
            sys.stdout.flush()
            code = run_task(self.image, self.full_command, self.env_vars)
            return status.Status.FAILURE if code else status.Status.SUCCESS

    # The runner says of every task that its image is not a bare Python image.
    warnings.filterwarnings("ignore", message="You may be attemping to run a task")
    local.init(
        local.SubprocessRunner(use_venv=False), pipeline_root=str(folder), raise_on_error=True
    )
    handled = mock.patch.object(subprocess_task_handler, "SubprocessTaskHandler", Handler)
    with output_restored(), handled:
        pipeline(**parameters)
