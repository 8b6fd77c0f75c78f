"""The configuration of the service: what it means, and what is refused by which key."""

import numpy as np
import pytest

from planish.base.errors import ConfigError
from planish.minder.act.alerts import Alert
from planish.minder.act.kube.objects import JobInfo
from planish.minder.detect.frame import Frame
from planish.minder.detect.metrics_table import PUBLISHED_ORDER
from planish.minder.detect.result import Candidate, Result
from planish.minder.service.config import load_service_config, service_settings
from planish.minder.service.own_metrics import OwnMetrics
from tests import pages

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


NAMES = {
    "minder_calls_total", "minder_call_duration_seconds", "minder_last_success_timestamp_seconds",
    "minder_machine_faulty", "minder_alert_info", "minder_machine_score",
    "minder_candidate_seconds",
    "minder_metric_usable", "minder_metric_skipped_total", "minder_missing_ratio",
    "minder_silent_machines", "minder_sample_interval_seconds", "minder_clipped_ratio",
    "minder_model_info",
    "minder_actions_total",
    "minder_evictions_blocked_total", "minder_prometheus_errors_total",
    "minder_duplicate_series_total", "minder_build_info",
    "minder_leading", "minder_jobs", "minder_last_discovery_timestamp_seconds",
}  # fmt: skip


def result(job, machines, candidates=()):
    return Result(
        *(job, "ok", 0, 900, len(machines), "default", 2.0, "euclidean"),
        skipped={"pfc_tx_packet_rate": "missing"},
        model_ids=dict.fromkeys(PUBLISHED_ORDER[1:], "pca:1"),
        silent=tuple(machines[:1]),
        candidates=candidates,
        clipped={"cpu_usage": 0.02},
    )


def filled(count=8):
    metrics, job = OwnMetrics(), "job"
    machines = tuple(f"node-{i:04d}" for i in range(count))
    values = {name: np.zeros((10, count), np.float32) for name in PUBLISHED_ORDER}
    values["cpu_usage"][:3] = np.nan
    metrics.pulled(Frame(job, np.arange(10), machines, values), {"cpu_usage": 1.0})
    candidates = tuple(Candidate(m, "cpu_usage", 0, 120, 2.0) for m in machines[:5])
    scores = {name: {m: float(i) for i, m in enumerate(machines)} for name in PUBLISHED_ORDER}
    metrics.called(result(job, machines, candidates), 900.0, scores)
    faulty = Alert("1", job, machines[0], "dissimilar", "cpu_usage", 0.0, 1.0)
    work = JobInfo("job", "team", machines, run_id="r7", stage="train")
    metrics.alerts(job, "team", machines, [(faulty, work)])
    for stage in ("pull", "preprocess", "denoise", "detect", "total"):
        metrics.took(stage, 0.3)
    metrics.count("calls", job, "ok")
    metrics.count("actions", "cordon", "done", "true")
    for _ in range(2):
        metrics.count("prometheus_errors", "503")
    for _ in range(3):
        metrics.count("duplicate_series")
    for name in PUBLISHED_ORDER:
        metrics.set("model_info", 1.0, name, "1", "good", "pca", "package")
    return metrics


def value(metrics, line):
    return pages.samples(metrics.text().decode()).get(line)


def test_the_names_are_exactly_those_that_are_documented():
    lines = filled().text().decode().splitlines()
    names = {line.split()[2] for line in lines if line.startswith("# TYPE")}
    assert {name for name in names if not name.endswith("_created")} == NAMES


def test_values_are_what_a_call_found():
    metrics = filled()
    assert value(metrics, 'minder_missing_ratio{job_name="job",metric="cpu_usage"}') == (
        pytest.approx(0.3)
    )
    faulty = 'minder_machine_faulty{{job_name="job",kind="{}",namespace="team",node="node-000{}"}}'
    assert [value(metrics, faulty.format("dissimilar", i)) for i in (0, 1)] == [1.0, 0.0]
    assert value(metrics, 'minder_metric_usable{job_name="job",metric="pfc_tx_packet_rate"}') == 0
    assert value(metrics, 'minder_clipped_ratio{job_name="job",metric="cpu_usage"}') == 0.02
    assert value(metrics, 'minder_prometheus_errors_total{code="503"}') == 2
    assert value(metrics, "minder_duplicate_series_total") == 3
    info = 'minder_alert_info{job_name="job",kind="dissimilar",metric="cpu_usage",namespace="team",'
    info += 'node="node-0000",nodes="",run_id="r7",since="1970-01-01T00:00:00Z",stage="train"}'
    assert value(metrics, info) == 1
    score = 'minder_machine_score{{job_name="job",metric="cpu_usage",node="node-000{}"}}'
    assert [value(metrics, score.format(i)) for i in (7, 6, 5, 4)] == [7.0, 6.0, 5.0, None]


def test_series_of_a_job_go_with_it_and_those_of_others_stay():
    metrics = filled()
    metrics.alerts("other", "team", ("x",), [])
    metrics.called(result("other", ("x",)), 5.0, {})
    assert metrics.text().decode().count('job_name="job"') > 20
    metrics.end_job("job")
    text = metrics.text().decode()
    assert 'job_name="job"' not in text
    assert 'job_name="other"' in text
    metrics.end_job("job")


def test_a_thousand_machines_are_less_than_5000_series():
    text = filled(1000).text().decode()
    count = sum(not line.startswith("#") for line in text.splitlines())
    assert 2000 < count < 5000
