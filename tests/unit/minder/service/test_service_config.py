"""The configuration of the service: what it means, and what is refused by which key."""

import pytest

from planish.base.errors import ConfigError
from planish.minder.detect.metrics_table import PUBLISHED_ORDER
from planish.minder.service.config import load_service_config, service_settings

LEAST = {"prometheus": {"url": "http://p:9090"}}


def test_the_least_configuration_watches_the_published_metrics_and_touches_nothing():
    settings = service_settings(LEAST)
    assert tuple(settings.sources) == PUBLISHED_ORDER
    assert settings.kubernetes is None
    assert (settings.act.mode, settings.act.dry_run, settings.alertmanager.url) == (
        "observe", True, "",
    )  # fmt: skip
    assert settings.service.interval_seconds == 60


def test_a_file_changes_queries_jobs_and_detection(tmp_path):
    path = tmp_path / "minder.toml"
    path.write_text(
        """
        profile = "paper"
        [prometheus]
        url = "https://p"
        headers = {X-Scope-OrgID = "team"}
        series_labels = ["job"]
        [detect]
        metrics = ["cpu_usage", "gpu_duty_cycle"]
        [metrics.cpu_usage]
        promql = "load{$job_selector}"
        node_label = "instance"
        node_regex = "([^:]+):.*"
        kind = "gauge"
        scale = 2.0
        offset = 0.0
        agg = "max"
        required = true
        [kubernetes]
        namespaces = ["team"]
        [server]
        leader_election = true
        [[jobs]]
        name = "pretrain"
        machines = ["n2", "n1"]
        """
    )
    settings = load_service_config(path)
    cpu = settings.sources["cpu_usage"]
    assert (cpu.series, cpu.node_label, cpu.machine_of("n1:9")) == (
        "load{$job_selector}", "instance", "n1",
    )  # fmt: skip
    assert (cpu.kind, cpu.scale, cpu.offset, cpu.agg, cpu.required) == (
        "gauge", 2.0, 0.0, "max", True,
    )  # fmt: skip
    assert settings.service.interval_seconds == 480
    assert settings.jobs[0].machines == ("n2", "n1")
    assert settings.prometheus.headers == {"X-Scope-OrgID": "team"}


@pytest.mark.parametrize(
    ("raw", "key"),
    [
        ({}, "prometheus.url"),
        ({**LEAST, "promtheus": {}}, "`promtheus`.*did you mean `prometheus`"),
        ({"prometheus": {"url": "http://p", "urll": 1}}, "prometheus.urll"),
        ({"prometheus": {"url": 5}}, "prometheus.url"),
        ({**LEAST, "server": {"port": 70_000}}, "server.port"),
        ({**LEAST, "server": {"leader_election": True}}, "server.leader_election"),
        ({**LEAST, "act": {"mode": "delete"}}, "act.mode"),
        ({**LEAST, "act": {"mode": "cordon"}}, r"alertmanager\.url.*honour_silences = false"),
        ({**LEAST, "alertmanager": {"send": True}}, "alertmanager.send"),
        ({**LEAST, "act": {"recheck": False}}, "act.recheck"),
        ({**LEAST, "detect": {"theta": -1.0}}, "detect.theta"),
        ({**LEAST, "alerts": {"keep_firing": 5}}, "`alerts` is not a known key"),
        ({**LEAST, "metrics": {"cpu": {}}}, "metrics.cpu.*did you mean `cpu_usage`"),
        ({**LEAST, "metrics": {"cpu_usage": {"promql": "load"}}}, "metrics.cpu_usage.promql"),
        ({**LEAST, "metrics": {"cpu_usage": {"limits": [0.0, 50.0]}}}, "metrics.cpu_usage.limits"),
        ({**LEAST, "jobs": {"name": "x"}}, "jobs"),
        ({**LEAST, "jobs": [{"name": "x"}]}, r"jobs.0.machines"),
        ({**LEAST, "jobs": [{"name": "x", "machines": ["a"]}] * 2}, "different names"),
        ({**LEAST, "profile": "papers"}, "profile"),
        ({**LEAST, "prometheus": "http://p"}, "prometheus"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_by_its_key(raw, key):
    with pytest.raises(ConfigError, match=key) as caught:
        service_settings(raw)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_none_or_no_toml_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="readable"):
        load_service_config(tmp_path / "none.toml")
    (tmp_path / "x.toml").write_text("[a")
    with pytest.raises(ConfigError, match="valid TOML"):
        load_service_config(tmp_path / "x.toml")
