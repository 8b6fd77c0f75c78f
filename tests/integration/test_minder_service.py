"""The whole service on real servers: a fault in the scraped fleet, alerts, restart, end."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.integration.minder_service import Served, raw_settings, serving, write_toml
from tests.integration.waiting import wait_for
from tests.servers.exporter_fleet import Fault, Fleet
from tests.servers.program import free_port
from tests.servers.run_prometheus import PrometheusServer, require_prometheus

pytestmark = [pytest.mark.server, pytest.mark.slow]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A fleet and a Prometheus that scrapes it every second, with some seconds of history."""
    require_prometheus()
    fleet = Fleet(tuple(f"node-{i:03d}" for i in range(8)))
    server = PrometheusServer(tmp_path_factory.mktemp("site") / "prometheus", fleet.scrape_config())
    try:
        server.start()
        wait_for(lambda: len(server.query("up == 1")) == len(fleet.machines), 20)
        time.sleep(5)
        yield server, fleet
    finally:
        server.stop()
        fleet.close()


@pytest.fixture
def scraped(site):
    yield site[0]
    site[1].heal()


@pytest.fixture
def fleet(site):
    return site[1]


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


def test_a_fault_becomes_an_alert_outlives_a_restart_and_is_resolved(
    scraped, fleet, tmp_path, ended
):
    served = serving(tmp_path, raw_settings(tmp_path, scraped.url, fleet.machines))
    ended.append(served)
    wait_for(lambda: served.get("/readyz")[0] == 200, 20, lambda: served.log)
    wait_for(lambda: served.metric('minder_calls_total{job_name="job",outcome="ok"}'), 60)
    time.sleep(3)
    faulty = 'minder_machine_faulty{job_name="job",kind="dissimilar",namespace="",node="node-003"}'
    assert served.metric(faulty) == 0
    began = time.time()
    fleet.inject(Fault("node-003", "shift", "gpu_duty_cycle", -40.0))
    wait_for(lambda: served.metric(faulty) == 1, 60, lambda: served.log)
    delay = time.time() - began
    assert "machine=node-003 kind=dissimilar metric=gpu_duty_cycle" in served.log
    # 10 s of continuity, a window of 8 s, a call every second and samples of a second ago.
    assert 10 <= delay <= 40
    code, seconds = served.terminate()
    assert (code, seconds < 10) == (0, True)
    again = Served(served.config, port=served.port)
    ended.append(again)
    again.start()
    wait_for(lambda: again.get("/readyz")[0] == 200, 60, lambda: again.log)
    wait_for(lambda: again.metric(faulty) == 1, 20, lambda: again.log)
    fleet.heal()
    wait_for(lambda: again.metric(faulty) == 0, 90, lambda: again.log)
    assert again.log.count("alert state=firing name=MinderFaultyMachine") == 1
    assert again.log.count("alert state=resolved name=MinderFaultyMachine") == 1


def test_a_machine_that_says_nothing_is_told_as_silent(scraped, fleet, tmp_path, ended):
    raw = raw_settings(tmp_path, scraped.url, fleet.machines)
    served = serving(tmp_path, raw)
    ended.append(served)
    wait_for(lambda: served.metric('minder_last_success_timestamp_seconds{job_name="job"}'), 60)
    fleet.inject(Fault("node-006", "silent"))
    silent = 'minder_machine_faulty{job_name="job",kind="silent",namespace="",node="node-006"}'
    wait_for(lambda: served.metric(silent) == 1, 60, lambda: served.log)
    assert served.metric('minder_silent_machines{job_name="job"}') == 1
    text = served.get("/metrics")[1]
    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")


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


def test_a_configuration_is_checked_against_prometheus_in_one_line(scraped, fleet, tmp_path):
    path = tmp_path / "minder.toml"
    raw = raw_settings(tmp_path, scraped.url, fleet.machines)
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
