"""The program of the service: its end by a signal, and its settings held against Prometheus."""

import ctypes
import os
import signal
import subprocess
import sys

import pytest

from tests.integration.minder_service import Served, raw_settings, serving, write_toml
from tests.integration.waiting import wait_for
from tests.servers.program import free_port

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture
def ended():
    """Ends every service that a test has started."""
    found: list[Served] = []
    yield found
    for one in found:
        one.kill()


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "planish", "minder", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_signal_that_another_thread_takes_ends_it_as_well(tmp_path, ended):
    raw = raw_settings(tmp_path, f"http://127.0.0.1:{free_port()}", ["a", "b", "c", "d"])
    served = serving(tmp_path, raw)
    ended.append(served)
    process = served.program.process
    wait_for(lambda: len(os.listdir(f"/proc/{process.pid}/task")) > 2, 20)
    threads = sorted(int(name) for name in os.listdir(f"/proc/{process.pid}/task"))
    assert ctypes.CDLL(None).tgkill(process.pid, threads[-1], signal.SIGTERM) == 0
    assert process.wait(12) == 0
    assert "stopped seconds=" in served.log


def test_a_configuration_is_checked_against_prometheus_in_one_line(prometheus, tmp_path):
    prometheus.start()
    path = tmp_path / "minder.toml"
    raw = raw_settings(tmp_path, prometheus.url, ["a", "b", "c", "d"])
    done = command("validate-config", "--config", str(write_toml(path, raw)))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("valid: 3 metrics, 3 models")
    bad = {**raw, "metrics": {"cpu_usage": {"promql": "rate(m{$job_selector})", "kind": "gauge"}}}
    done = command("validate-config", "--config", str(write_toml(path, bad)))
    assert done.returncode == 3
    assert "metrics.cpu_usage.promql" in done.stderr
    assert done.stderr.count("\n") == 1
    assert command("serve", "--config", str(path)).returncode == 3
    gone = {**raw, "prometheus": {"url": "http://127.0.0.1:9"}}
    done = command("validate-config", "--config", str(write_toml(path, gone)))
    assert done.returncode == 4
    done = command("validate-config", "--offline", "--config", str(path))
    assert done.returncode == 0
