import shutil

import pytest

from planish.stages.report import webhook
from tests.unit.stages.report.synthetic_run import build_run


@pytest.fixture(scope="session", autouse=True)
def patient_webhook():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(webhook, "TIMEOUT_SECONDS", 60.0)
        yield


@pytest.fixture(scope="session")
def healthy_root(tmp_path_factory):
    """A finished run of eight iterations; tests must not change it."""
    root = f"file://{tmp_path_factory.mktemp('run')}/arithmetic"
    build_run(root)
    return root


@pytest.fixture(scope="session")
def short_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "short"
    build_run(f"file://{folder}", iterations=2)
    return folder


@pytest.fixture
def short_root(short_run, tmp_path):
    """A run of two iterations that a test may damage."""
    shutil.copytree(short_run, tmp_path / "short")
    return f"file://{tmp_path}/short"
