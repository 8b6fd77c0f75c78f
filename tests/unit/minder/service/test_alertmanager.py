"""What Alertmanager is asked, and what its answers mean for actions."""

from __future__ import annotations

from urllib.parse import parse_qsl, urlsplit

import pytest

from planish.base.errors import BackendUnavailable
from planish.minder.act.alerts import Alert
from planish.minder.service.alertmanager import Alertmanager, AlertmanagerConfig
from planish.minder.service.http import Deadline
from tests.servers.scripted_http import Reply, ScriptedServer

ALERT = Alert("0f", "team/job", "node-3", "dissimilar", "cpu_usage", 1000.0, 1300.0)
MINE = {"alertname": "MinderFaultyMachine", "job_name": "team/job", "node": "node-3"}


@pytest.fixture
def scripted():
    server = ScriptedServer(lambda request: Reply(body=b"[]"))
    yield server
    server.close()


def manager(scripted, **config):
    return Alertmanager(AlertmanagerConfig(url=scripted.url, cluster="c1", **config))


def soon():
    return Deadline.after(60)


def held(*silences):
    """Return an alert as Alertmanager lists it."""
    return {"labels": MINE, "status": {"silencedBy": list(silences), "state": "active"}}


@pytest.mark.parametrize(
    ("found", "expected"),
    [([held()], ""), ([held("s1", "s2")], "s1"), ([held(), held("s3")], "s3")],
)
def test_alertmanager_says_which_silence_holds_an_alert(scripted, found, expected):
    scripted.answer = lambda request: Reply.of(found)
    assert manager(scripted).silence(ALERT, soon()) == expected
    (request,) = scripted.requests
    asked = [value for name, value in parse_qsl(urlsplit(request.path).query) if name == "filter"]
    assert asked == [
        'alertname="MinderFaultyMachine"', 'job_name="team/job"', 'node="node-3"', 'cluster="c1"',
    ]  # fmt: skip


def test_an_alert_that_alertmanager_does_not_have_may_be_silenced(scripted):
    with pytest.raises(BackendUnavailable, match=r"must have the alert .* got none; load"):
        manager(scripted).silence(ALERT, soon())


@pytest.mark.parametrize(
    "reply",
    [Reply(500), Reply(body=b"no"), Reply.of([{"id": 1}]), Reply.of({}, status=403),
     Reply.of([{"status": {"silencedBy": None}}])],
)  # fmt: skip
def test_silences_that_can_not_be_told_are_an_error_and_not_none(scripted, reply):
    scripted.answer = lambda request: reply
    with pytest.raises(BackendUnavailable):
        manager(scripted).silence(ALERT, soon())
