"""A cheaper `inspect.stack`, for tests that compile pipelines."""

import inspect
import sys

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
