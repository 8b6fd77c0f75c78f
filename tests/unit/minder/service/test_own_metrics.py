"""What the monitor tells about itself: exact names, no series of jobs that are gone, few series."""

import numpy as np
import pytest

from planish.minder.act.alerts import Alert
from planish.minder.detect.frame import Frame
from planish.minder.detect.metrics_table import PUBLISHED_ORDER
from planish.minder.detect.result import Candidate, Result
from planish.minder.service.own_metrics import OwnMetrics
from tests import pages

NAMES = {
    "minder_calls_total", "minder_call_duration_seconds", "minder_last_success_timestamp_seconds",
    "minder_machine_faulty", "minder_machine_score", "minder_candidate_seconds",
    "minder_metric_usable", "minder_metric_skipped_total", "minder_missing_ratio",
    "minder_silent_machines", "minder_sample_interval_seconds", "minder_clipped_ratio",
    "minder_model_info", "minder_model_mse", "minder_model_recent_mse",
    "minder_actions_total",
    "minder_evictions_blocked_total", "minder_prometheus_errors_total",
    "minder_duplicate_series_total", "minder_build_info",
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


def filled(count=8, job="job"):
    metrics = OwnMetrics()
    machines = tuple(f"node-{i:04d}" for i in range(count))
    values = {name: np.zeros((10, count), np.float32) for name in PUBLISHED_ORDER}
    values["cpu_usage"][:3] = np.nan
    metrics.pulled(Frame(job, np.arange(10), machines, values), {"cpu_usage": 1.0})
    candidates = tuple(Candidate(m, "cpu_usage", 0, 120, 2.0) for m in machines[:5])
    scores = {name: {m: float(i) for i, m in enumerate(machines)} for name in PUBLISHED_ORDER}
    metrics.called(result(job, machines, candidates), 900.0, scores)
    faulty = Alert("1", job, machines[0], "dissimilar", "cpu_usage", 0.0, 1.0)
    metrics.alerts(job, "team", machines, [faulty])
    for stage in ("pull", "preprocess", "denoise", "detect", "total"):
        metrics.took(stage, 0.3)
    metrics.count("calls", job, "ok")
    metrics.count("actions", "cordon", "done", "true")
    for _ in range(2):
        metrics.count("prometheus_errors", "503")
    for _ in range(3):
        metrics.count("duplicate_series")
    for name in PUBLISHED_ORDER:
        metrics.set("model_info", 1.0, name, "1", "good", "pca")
        metrics.set("model_mse", 1e-3, name)
    metrics.restored(job, dict.fromkeys(PUBLISHED_ORDER, 2e-3))
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
