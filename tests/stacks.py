"""A cheaper `inspect.stack`, for tests that compile pipelines, and cheaper starts of programs."""

import inspect
import os
import sys
from pathlib import Path

import pytest


def stack(context=1):
    """Return the frames of the callers without their lines of source, as `inspect.stack` does."""
    found, frame = [], sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        found.append(
            inspect.FrameInfo(frame, code.co_filename, frame.f_lineno, code.co_name, None, None)
        )
        frame = frame.f_back
    return found


@pytest.fixture(scope="session", autouse=True)
def stacks_without_sources():
    """Let kfp ask who called it without looking for the source file of every frame.

    It does so for each task, and wants a name only; in a test process, with a deep stack and
    thousands of modules, the search takes three times as long as the compilation itself.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "stack", stack)
        yield


@pytest.fixture(scope="module", autouse=True)
def packages_of_an_image():
    """Let what a test starts find the packages of an image; see `stage_path/sitecustomize.py`."""
    folder = Path(__file__).parent / "integration" / "stage_path"
    with pytest.MonkeyPatch.context() as patch:
        # Before what is there: a work tree beside the installed one is tested with its own code.
        patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        yield
