"""The real node_exporter, started as the page says, scraped as `prometheus.yaml` says."""

import re
import threading
import time
import tomllib
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import yaml

from planish.minder.detect.metrics_table import METRICS
from planish.minder.service.config import service_settings
from planish.minder.service.http import Deadline
from planish.minder.service.prometheus import Prometheus, PrometheusConfig
from planish.minder.service.pull import Puller
from tests.integration.waiting import wait_for
from tests.servers.program import Program, few_variables, free_port, require

pytestmark = [pytest.mark.server, pytest.mark.slow]

MONITORING = Path(__file__).resolve().parents[2] / "monitoring"
PAGE = (MONITORING / "README.md").read_text("utf-8")
NAMES = Path(__file__).resolve().parents[1] / "contract" / "exporter_names.yaml"
NODES = ("node-0", "node-1")
TICKS_PER_SECOND = 10_000


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n", "utf-8")


@pytest.fixture
def sysfs(tmp_path):
    """What the kernel tells of one InfiniBand port that has to wait all the time."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    for name, text in {
        "state": "4: ACTIVE",
        "phys_state": "5: LinkUp",
        "rate": "200 Gb/sec (4X HDR)",
        "counters/port_xmit_wait": "0",
        "counters/port_xmit_data": "0",
    }.items():
        put(port / name, text)
    for name in ("board_id", "fw_ver", "hca_type"):
        put(port.parents[1] / name, "x")
    begun, is_over = time.time(), threading.Event()

    def count():
        waiting = port / "counters/port_xmit_wait"
        while not is_over.wait(0.1):
            put(waiting.with_suffix(".new"), int((time.time() - begun) * TICKS_PER_SECOND))
            waiting.with_suffix(".new").replace(waiting)

    thread = threading.Thread(target=count)
    thread.start()
    yield tmp_path / "sys"
    is_over.set()
    thread.join()


@pytest.fixture
def exporter(tmp_path, sysfs):
    """The address of a node_exporter that has the flags of the page."""
    name = "prometheus-node-exporter"
    require(name, remedy=f"apt-get install {name}, or `make tools`")
    (flags,) = re.findall(r"`(--collector\.ethtool .+?)`", PAGE)
    program, address = Program(tmp_path / "exporter.log"), f"127.0.0.1:{free_port()}"
    program.start(
        [name, f"--web.listen-address={address}", f"--path.sysfs={sysfs}", *flags.split()],
        environment=few_variables(tmp_path),
    )
    program.wait_for(f"http://{address}/metrics")
    yield address
    program.kill()


def scraping(address):
    """Return a configuration with our job for two machines, and a chart's that knows no node."""
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text("utf-8"))
    (job,) = (one for one in config["scrape_configs"] if one["job_name"] == "node")
    del job["kubernetes_sd_configs"]
    pod = {
        "__meta_kubernetes_pod_label_app_kubernetes_io_name": "prometheus-node-exporter",
        "__meta_kubernetes_pod_container_port_name": "http-metrics",
    }
    job["static_configs"] = [
        {"targets": [address], "labels": {**pod, "__meta_kubernetes_pod_node_name": node}}
        for node in NODES
    ]
    labels = {"namespace": "monitoring", "pod": "x", "service": "x", "endpoint": "http-metrics"}
    chart = {
        "job_name": "node-exporter",
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "static_configs": [{"targets": [address], "labels": labels}],
    }
    return yaml.safe_dump({"scrape_configs": [job, chart]})


def test_the_names_of_the_list_are_those_of_the_exporter(exporter):
    with urllib.request.urlopen(f"http://{exporter}/metrics", timeout=10) as answer:
        given = set(re.findall(r"^(\w+)[{ ]", answer.read().decode(), re.MULTILINE))
    listed = yaml.safe_load(NAMES.read_text("utf-8"))["node_exporter"]["names"]
    lacking = {name for name in listed if not name.startswith("node_infiniband_")} - given
    assert lacking == set()
    assert {name for name in given if name.startswith("node_infiniband_")} <= set(listed)
    assert "node_infiniband_port_transmit_wait_total" in given


def test_machines_are_told_by_node_beside_a_scrape_that_does_not_know_it(exporter, prometheus):
    prometheus.config = scraping(exporter)
    prometheus.start()
    wait_for(lambda: len(prometheus.query("up == 1")) == 3, 20)
    time.sleep(14)
    (block,) = re.findall(r"```toml\n(.+?)```", PAGE, re.DOTALL)
    raw = {"prometheus": {"url": prometheus.url}, **tomllib.loads(block)}
    names = ("cpu_usage", "memory_usage", "disk_usage", "tcp_throughput")
    sources = {name: METRICS[name] for name in names}
    sources["pfc_tx_packet_rate"] = service_settings(raw).sources["pfc_tx_packet_rate"]
    client = Prometheus(PrometheusConfig(url=prometheus.url, delay_seconds=1))
    duplicates = []
    one = Puller(client, sources, "job", on_duplicate=lambda: duplicates.append(1))
    frame = one.pull(NODES, 12, Deadline.after(20))
    for name in sources:
        assert np.isfinite(frame.values[name][-4:]).all(axis=1).any(), name
    assert duplicates == []
    assert 1 < np.nanmedian(frame.values["memory_usage"]) < 100
    ticks = np.nanmedian(frame.values["pfc_tx_packet_rate"])
    assert ticks == pytest.approx(TICKS_PER_SECOND, rel=0.2)
