from __future__ import annotations

import pytest

from tests.unit.stages.report.synthetic_run import build_run


@pytest.fixture(scope="session")
def healthy_root(tmp_path_factory):
    """A finished run of eight iterations; tests must not change it."""
    root = f"file://{tmp_path_factory.mktemp('run')}/arithmetic"
    build_run(root)
    return root


@pytest.fixture
def short_root(tmp_path):
    """A run of two iterations that a test may damage."""
    root = f"file://{tmp_path}/short"
    build_run(root, iterations=2)
    return root
