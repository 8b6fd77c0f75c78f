"""The programs of Prometheus and Alertmanager accept what we give them."""

import re
import subprocess

import pytest
import yaml

from planish.base import telemetry
from planish.minder.service.own_metrics import OwnMetrics
from tests.golden.write_rules import MONITORING, RULES
from tests.servers.program import require

pytestmark = pytest.mark.server


def program(name):
    require(name, remedy="install it with `make tools`")
    return name


def run(*line, folder=MONITORING):
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=120)


def test_names_and_helps_of_our_metrics_are_as_prometheus_wants_them(monkeypatch):
    monkeypatch.setattr(telemetry, "_series", {})
    record = {
        "counter": telemetry.count,
        "gauge": telemetry.set_level,
        "histogram": telemetry.observe,
    }
    for metric in telemetry.METRICS:
        record[metric.kind](metric.name, 1.0, **dict.fromkeys(metric.labels, "x"))
    text = telemetry.metrics_text() + OwnMetrics().text().decode()
    line = (program("promtool"), "check", "metrics")
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_rules_are_valid():
    files = sorted(RULES.glob("*.yaml"))
    done = run(program("promtool"), "check", "rules", "--lint-fatal", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SUCCESS") == len(files) == 4


@pytest.mark.parametrize("path", sorted((RULES / "tests").glob("*.yaml")), ids=lambda p: p.stem)
def test_rules_do_what_their_cases_say(path):
    done = run(program("promtool"), "test", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("are_services", [False, True])
def test_alertmanager_takes_its_configuration_also_with_the_receivers_of_its_comments(
    are_services, tmp_path
):
    text = (MONITORING / "alertmanager.yaml").read_text("utf-8")
    if are_services:
        head, _, tail = text.partition("receivers:")
        tail = re.sub(r"    webhook_configs:\n.*/(operations|page)\n", "", tail)
        text = f"{head}receivers:" + re.sub(r"(?m)^    # (?!In place)", "    ", tail)
        kinds = [set(one) - {"name"} for one in yaml.safe_load(text)["receivers"]]
        assert kinds == [{"slack_configs"}, {"pagerduty_configs"}, {"webhook_configs"}]
    path = tmp_path / "alertmanager.yaml"
    path.write_text(text)
    done = run(program("amtool"), "check-config", path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["prometheus.yaml", "prometheus-local.yaml"])
def test_scrape_configurations_are_valid(name, tmp_path):
    config = yaml.safe_load((MONITORING / name).read_text("utf-8"))
    config["rule_files"] = [str(RULES / "*.yaml")]
    for scrape in config["scrape_configs"]:
        # Debian builds Prometheus without the discovery of Kubernetes.
        if scrape.pop("kubernetes_sd_configs", None):
            scrape["static_configs"] = [{"targets": ["localhost:1"]}]
    path = tmp_path / name
    path.write_text(yaml.safe_dump(config))
    done = run(program("promtool"), "check", "config", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "valid prometheus config" in done.stdout
