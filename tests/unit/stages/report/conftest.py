from __future__ import annotations

import pytest

from planish.stages.report import page, webhook
from tests.unit.stages.report.synthetic_run import build_run


@pytest.fixture(scope="session", autouse=True)
def drawn():
    """Charts by the facts that they show: runs of equal facts are drawn once."""
    known, draw = {}, page.all_charts

    def charts(facts):
        key = repr(facts).replace(facts.root, "")
        if key not in known:
            known[key] = draw(facts)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "all_charts", charts)
        patch.setattr(webhook, "TIMEOUT_SECONDS", 60.0)
        yield known


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
