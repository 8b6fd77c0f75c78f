"""A real Alertmanager groups, routes and holds back alerts as our configuration says."""

import time
from datetime import UTC, datetime, timedelta

import pytest
import yaml

from tests.golden.write_rules import MONITORING
from tests.integration.waiting import wait_for
from tests.servers.scripted_http import Reply, ScriptedServer

pytestmark = pytest.mark.server

SAME = {"cluster": "c", "namespace": "n"}
FAULTY = {**SAME, "alertname": "MinderFaultyMachine", "severity": "critical"}


def faulty(job, node, kind="dissimilar"):
    return {**FAULTY, "job_name": job, "node": node, "kind": kind}


def explains(name, **labels):
    return {**SAME, "alertname": name, "severity": "warning", **labels}


ALERTS = [
    faulty("lost", "a-1"),
    faulty("lost", "a-2"),
    explains("MinderTelemetryOutage", job_name="lost", kind="outage"),
    faulty("wide", "b-1"),
    explains("MinderJobWide", job_name="wide", kind="job_wide"),
    faulty("well", "c-1"),
    faulty("well", "c-2", "silent"),
    faulty("well", "c-3", "silent"),
    {"cluster": "c", "alertname": "NodeNotReady", "severity": "warning", "node": "c-2"},
    {"cluster": "other", "alertname": "NodeNotReady", "severity": "warning", "node": "c-3"},
    # A machine that is not ready may still be unlike its peers.
    {"cluster": "c", "alertname": "NodeNotReady", "severity": "warning", "node": "c-1"},
    {"cluster": "c", "alertname": "MachineExporterDown", "severity": "warning", "node": "c-2"},
    explains("PlanishNonFinite", run_id="7"),
    explains("PlanishSkippedSteps", run_id="7"),
    explains("PlanishSkippedSteps", run_id="8"),
]
HELD_BACK = {("wide", "b-1"), (None, "c-2")}
"""No warning holds back a page, and the page of a dead machine holds back the warnings about it."""


@pytest.fixture
def people():
    """Whoever is told: a page for each receiver."""
    server = ScriptedServer(lambda request: Reply())
    yield server
    server.close()


@pytest.fixture
def routed(alertmanager, people):
    """Alertmanager with our configuration, short waits, and all alerts sent."""
    config = yaml.safe_load((MONITORING / "alertmanager.yaml").read_text("utf-8"))
    for receiver in config["receivers"]:
        (hook,) = receiver["webhook_configs"]
        hook["url"] = f"{people.url}/{receiver['name']}"
    for route in [config["route"], *config["route"]["routes"]]:
        route["group_wait"] = "1s"
    alertmanager.config = yaml.safe_dump(config)
    alertmanager.start()
    ends = (datetime.now(UTC) + timedelta(minutes=10)).isoformat()
    body = [{"labels": labels, "annotations": {}, "endsAt": ends} for labels in ALERTS]
    alertmanager.ask("/api/v2/alerts", body)
    return alertmanager


def test_what_another_alert_explains_is_held_back_and_nothing_else(routed):
    found = {
        (one["labels"].get("job_name", one["labels"].get("run_id")), one["labels"].get("node"))
        for one in routed.alerts()
        if one["status"]["inhibitedBy"]
    }
    assert found == HELD_BACK | {("7", None)}


def test_people_are_told_once_per_job_and_each_where_they_should(routed, people):
    wait_for(lambda: len({request.path for request in people.requests}) >= 3, 15)
    time.sleep(1.5)
    pages = [(request.path, request.json) for request in people.requests]
    told = {
        path: sorted(body["groupLabels"].get("job_name", "") for p, body in pages if p == path)
        for path, _ in pages
    }
    # The machines of one job come in one message.
    assert told["/operations-page"] == ["lost", "well"]
    (page,) = (
        body
        for path, body in pages
        if path == "/operations-page" and body["groupLabels"]["job_name"] == "well"
    )
    nodes = sorted(alert["labels"]["node"] for alert in page["alerts"])
    assert nodes == ["c-1", "c-2", "c-3"]
    assert page["groupLabels"] == {
        "alertname": "MinderFaultyMachine",
        "cluster": "c",
        "job_name": "well",
    }
    runs = sorted(
        (alert["labels"]["alertname"], alert["labels"]["run_id"])
        for path, body in pages
        if path == "/training"
        for alert in body["alerts"]
    )
    assert runs == [("PlanishNonFinite", "7"), ("PlanishSkippedSteps", "8")]
    # Whoever reads the channel sees what holds the warnings back.
    assert told["/operations"] == ["", "", "lost", "lost", "well", "wide"]
