"""Fixtures that all suites share: stores, a real MinIO server, free ports, fixed seeds."""

import gc
import itertools
import json
import logging
import os
import random
import signal
import socket
from collections import Counter
from pathlib import Path

import hypothesis
import numpy as np
import pytest

from planish.models.library import load_transformers
from planish.store.base import STORES
from tests import thin
from tests.servers.program import free_port
from tests.servers.run_alertmanager import AlertmanagerServer, require_alertmanager
from tests.servers.run_control_plane import ControlPlane, require_kubernetes
from tests.servers.run_minio import Minio, require_minio
from tests.servers.run_prometheus import PrometheusServer, require_prometheus

# By itself Python looks for garbage after every 700 new objects: a fifth of the time of imports.
gc.set_threshold(20_000, 20, 20)

# The same examples in every run, and no failure because another process was using the machine.
hypothesis.settings.register_profile("planish", deadline=None, derandomize=True)
hypothesis.settings.load_profile("planish")

# What a shell starts in its background is deaf to SIGINT, and so would be what tests start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

STORES["mem"] = "tests.stores.memory:connect"

_bucket_numbers = itertools.count()

DURATIONS = Path(__file__).parent / "durations.json"
"""Seconds of each file of tests, on an idle machine; `make durations` renews it."""
MAX_SECOND_TRIES = 3
"""Of one run; more means that something is wrong beside the machine."""


def pytest_addoption(parser):
    """Add what `make test-all` and `make durations` ask for."""
    parser.addoption("--full", action="store_true", help="all cases and examples, not a sample")
    parser.addoption("--second-try", action="store_true", help="try a failed `server` test again")
    parser.addoption("--save-durations", action="store_true", help=f"renew {DURATIONS.name}")


def pytest_configure(config):
    """Tell `tests.thin` before tests, whose decorators ask it, are imported."""
    thin.full = config.getoption("--full")
    if hasattr(config, "workerinput"):
        # Each worker loads it for some test, and without this with what nobody uses.
        load_transformers()


@pytest.fixture(autouse=True)
def same_log_handlers():
    """Take back what a command that a test ran in this process did to the log: its stream ends."""
    root = logging.getLogger()
    handlers = list(root.handlers)
    levels = {name: logging.getLogger(name).level for name in ("root", "planish")}
    yield
    root.handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Thin out; begin with the files that take longest, so that no worker is left with one.

    With `--second-try` a failed test against a real server is tried once more: it shares the
    machine with others.
    """
    items[:], left = thin.spread(items)
    config.hook.pytest_deselected(items=left)
    seconds = json.loads(DURATIONS.read_text())["seconds"]
    items.sort(key=lambda item: -seconds.get(_file(item.nodeid), 0.0))
    if config.getoption("second_try"):
        for item in items:
            if item.get_closest_marker("server"):
                item.add_marker(pytest.mark.flaky(reruns=1))


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0].removeprefix("tests/")


def pytest_terminal_summary(terminalreporter):
    """Print every first failure as if it were the last one."""
    for report in terminalreporter.stats.get("rerun", ()):
        terminalreporter.section(f"first failure, tried again: {report.nodeid}")
        terminalreporter.line(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail a run in which too many tests needed a second try; write the durations if asked to."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(session.config, "workerinput"):
        return
    if len(reporter.stats.get("rerun", ())) > MAX_SECOND_TRIES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if session.config.getoption("save_durations"):
        _save_durations(report for reports in reporter.stats.values() for report in reports)


def _save_durations(reports) -> None:
    """Replace the seconds of the files that ran; those of other runs stay, if the file is there."""
    found: Counter[str] = Counter()
    for report in reports:
        if isinstance(report, pytest.TestReport):
            found[_file(report.nodeid)] += report.duration
    kept = json.loads(DURATIONS.read_text())["seconds"]
    merged = {name: kept[name] for name in kept if (DURATIONS.parent / name).is_file()}
    merged |= {name: round(value, 1) for name, value in found.items()}
    ordered = dict(sorted(merged.items(), key=lambda pair: (-pair[1], pair[0])))
    command = "make durations"
    DURATIONS.write_text(json.dumps({"command": command, "seconds": ordered}, indent=0) + "\n")


@pytest.fixture(autouse=True)
def _seeds():
    random.seed(0)
    np.random.seed(0)


@pytest.fixture(name="free_port")
def _free_port() -> int:
    """A TCP port that nobody listens on."""
    return free_port()


@pytest.fixture
def closed_port():
    """A TCP port that nobody listens on, or can while the test runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture(scope="session")
def minio_server(tmp_path_factory):
    """A MinIO server of this test process; one per pytest-xdist worker."""
    require_minio()
    server = Minio(tmp_path_factory.mktemp("minio") / "data")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def minio(minio_server, monkeypatch) -> Minio:
    """The server, with the environment of this test set to use it."""
    for name, value in minio_server.environment.items():
        monkeypatch.setenv(name, value)
    return minio_server


@pytest.fixture
def s3_root(minio) -> str:
    """An empty bucket of a real server, as a URI; the environment is set to use it."""
    name = f"runs-{os.getpid()}-{next(_bucket_numbers)}"
    minio.make_bucket(name)
    return f"s3://{name}"


@pytest.fixture(scope="module")
def control_plane(tmp_path_factory):
    """A Kubernetes API server with its controllers; each file of tests finds it empty."""
    require_kubernetes()
    plane = ControlPlane(tmp_path_factory.mktemp("control-plane"))
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


@pytest.fixture
def prometheus(tmp_path):
    """A Prometheus that is not started: set its `config` or `backfill` it, then `start()`."""
    require_prometheus()
    server = PrometheusServer(tmp_path / "prometheus")
    yield server
    server.stop()


@pytest.fixture
def alertmanager(tmp_path):
    """An Alertmanager that is not started: set its `config` if need be, then `start()`."""
    require_alertmanager()
    server = AlertmanagerServer(tmp_path / "alertmanager")
    yield server
    server.stop()


@pytest.fixture
def file_root(tmp_path) -> str:
    """An empty folder as a URI."""
    return f"file://{tmp_path}/root"


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.server)])
def store_root(request) -> str:
    """The root of an empty store: the test runs once per kind of store."""
    return request.getfixturevalue(f"{request.param}_root")
