"""What a real Alertmanager answers about alerts that the rules of Prometheus have sent."""

import pytest

from planish.base.errors import BackendUnavailable
from planish.minder.act.alerts import Alert
from planish.minder.service.alertmanager import Alertmanager, AlertmanagerConfig
from planish.minder.service.http import Deadline
from tests.integration.waiting import wait_for

pytestmark = pytest.mark.server


def alert(machine):
    return Alert("a", "team/job", machine, "dissimilar", "cpu_usage", 0.0, 1.0)


def send(running, *machines, **added):
    """Send alerts as Prometheus does, with the labels that the rule gives and others."""
    labels = {"alertname": "MinderFaultyMachine", "severity": "critical", "namespace": "team",
              "job_name": "team/job", "kind": "dissimilar", **added}  # fmt: skip
    running.ask("/api/v2/alerts", [{"labels": {**labels, "node": name}} for name in machines])


def silence(running, **config):
    manager = Alertmanager(AlertmanagerConfig(url=running.url, **config))
    return lambda machine: manager.silence(alert(machine), Deadline.after(5))


@pytest.fixture
def running(alertmanager):
    alertmanager.start()
    return alertmanager


def test_a_silence_of_people_is_found_before_acting_and_its_end_too(running):
    found = silence(running, cluster="c1")
    with pytest.raises(BackendUnavailable, match="must have the alert"):
        found("node-3")
    send(running, "node-3", "node-33", cluster="c1")
    assert found("node-3") == ""
    matcher = {"name": "node", "value": "node-[0-9]", "isRegex": True, "isEqual": True}
    number = running.silence([matcher], seconds=6)
    assert wait_for(lambda: found("node-3"), 5) == number
    assert found("node-33") == ""
    wait_for(lambda: found("node-3") == "", 10)


def test_a_silence_by_a_label_that_only_prometheus_adds_is_found(running):
    send(running, 'node-"3"', cluster="production", prometheus="monitoring/k8s")
    number = running.silence([{"name": "cluster", "value": "production", "isRegex": False}])
    assert wait_for(lambda: silence(running)('node-"3"'), 5) == number
