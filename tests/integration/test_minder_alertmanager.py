"""Alerts in a real Alertmanager: received, grouped, inhibited, silenced, ended."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from planish.base.errors import BackendUnavailable
from planish.minder.service.alertmanager import AlertContext, Alertmanager, labels_of
from planish.minder.service.alerts import Alert
from planish.minder.service.config import AlertmanagerConfig
from planish.minder.service.http_client import Deadline
from tests.integration.waiting import wait_for
from tests.servers.scripted_http import ScriptedServer

pytestmark = pytest.mark.server

SHIPPED = Path(__file__).resolve().parents[2] / "monitoring" / "alertmanager.yaml"
CONTEXT = AlertContext("team", "team/job")


@pytest.fixture
def hook():
    """Receives notifications."""
    server = ScriptedServer()
    yield server
    server.close()


@pytest.fixture
def running(alertmanager, hook):
    """An Alertmanager with the grouping and the inhibitions that ship with this repository."""
    shipped = yaml.safe_load(SHIPPED.read_text())
    shipped["route"] = {
        "receiver": "hook",
        "group_by": shipped["route"]["group_by"],
        "group_wait": "1s",
        "group_interval": "1s",
        "repeat_interval": "1h",
    }
    hooks = [{"url": hook.url, "send_resolved": True}]
    shipped["receivers"] = [{"name": "hook", "webhook_configs": hooks}]
    alertmanager.config = yaml.safe_dump(shipped)
    alertmanager.start()
    return alertmanager


def manager(running, **config):
    return Alertmanager(AlertmanagerConfig(url=running.url, cluster="c1", **config))


def alert(machine="node-3", kind="dissimilar", **changes):
    now = time.time()
    found = Alert(
        *(f"{machine} {kind}", "team/job", machine, kind, "cpu_usage", "firing"),
        *(now - 300, now - 10, now - 5),
    )
    return replace(found, **changes)


def send(one, *alerts):
    return one.send(time.time(), list(alerts), CONTEXT, Deadline.after(5))


def test_alerts_are_received_and_grouped_by_job_and_end_once(running, hook):
    one = manager(running)
    both = [alert("node-3"), alert("node-5")]
    assert send(one, *both) == 2
    found = running.alerts()
    assert sorted(a["labels"]["node"] for a in found) == ["node-3", "node-5"]
    assert found[0]["labels"]["alertname"] == "MinderFaultyMachine"
    assert found[0]["labels"]["job_name"] == "team/job"
    assert found[0]["annotations"]["metric"] == "cpu_usage"
    wait_for(lambda: hook.requests, 10)
    told = hook.requests[0].json
    assert told["status"] == "firing"
    assert sorted(a["labels"]["node"] for a in told["alerts"]) == ["node-3", "node-5"]
    assert told["groupLabels"]["job_name"] == "team/job"
    send(one, *[replace(a, state="resolved") for a in both])
    assert wait_for(lambda: running.alerts() == [], 10)
    wait_for(lambda: hook.requests[-1].json["status"] == "resolved", 10)


def test_an_alert_that_is_not_sent_again_ends_by_itself(running):
    one = manager(running, resend_seconds=1)
    send(one, alert())
    assert len(running.alerts()) == 1
    assert wait_for(lambda: running.alerts() == [], 8)


def test_an_event_of_the_whole_job_inhibits_the_alerts_of_its_machines(running):
    one = manager(running)
    send(one, alert(), alert("", "job_wide", machines=("node-3",), metric=""))
    send(manager(running), alert(job="team/other"))

    def inhibited():
        found = {a["labels"]["alertname"]: a["status"] for a in running.alerts()}
        return found["MinderFaultyMachine"]["inhibitedBy"] and found

    states = wait_for(inhibited, 10)
    assert states["MinderJobWide"]["inhibitedBy"] == []
    assert states["MinderFaultyMachine"]["state"] == "suppressed"


def test_a_silence_of_people_is_found_before_acting_and_its_end_too(running):
    one, mine = manager(running), alert()
    with pytest.raises(BackendUnavailable, match="must have the alert"):
        one.silence(mine, Deadline.after(5))
    other = alert("node-33")
    send(one, mine, other)
    assert one.silence(mine, Deadline.after(5)) == ""
    number = running.silence(
        [{"name": "node", "value": "node-[0-9]", "isRegex": True, "isEqual": True}], seconds=6
    )
    assert wait_for(lambda: one.silence(mine, Deadline.after(5)), 5) == number
    assert one.silence(other, Deadline.after(5)) == ""
    wait_for(lambda: one.silence(mine, Deadline.after(5)) == "", 10)


def test_a_silence_by_a_label_that_only_prometheus_adds_is_found(running):
    mine = alert('node-"3"')
    labels = labels_of(mine, CONTEXT, AlertmanagerConfig())
    added = {"cluster": "production", "prometheus": "monitoring/k8s"}
    running.ask("/api/v2/alerts", [{"labels": {**labels, **added}}])
    number = running.silence([{"name": "cluster", "value": "production", "isRegex": False}])
    one = Alertmanager(AlertmanagerConfig(url=running.url))
    assert wait_for(lambda: one.silence(mine, Deadline.after(5)), 5) == number
