"""Verdicts come in their own time: other processes may be using the machine."""

import pytest

from planish import verifiers


@pytest.fixture(autouse=True)
def _patience():
    """Let an answer take longer, where a test sets no limit of its own."""
    usual = verifiers._DEFAULTS.timeout_seconds
    object.__setattr__(verifiers._DEFAULTS, "timeout_seconds", 120.0)
    yield
    object.__setattr__(verifiers._DEFAULTS, "timeout_seconds", usual)
