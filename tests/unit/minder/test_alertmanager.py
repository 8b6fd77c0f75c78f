"""What is sent to Alertmanager, when, and what its answers mean for actions."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import pytest

from planish.base.errors import BackendUnavailable
from planish.minder.service.alertmanager import (
    AlertContext,
    Alertmanager,
    annotations_of,
    labels_of,
)
from planish.minder.service.alerts import Alert
from planish.minder.service.build import build
from planish.minder.service.config import AlertmanagerConfig, service_settings
from planish.minder.service.http_client import Deadline
from tests.integration.minder_service import raw_settings
from tests.servers.scripted_http import Reply, ScriptedServer

ALERT = Alert(
    *("0f", "team/job", "node-3", "dissimilar", "cpu_usage", "firing"),
    since=1000.0,
    seen=1300.0,
    fired=1260.0,
    score=2.5,
    duration_s=300.0,
    run={"run_id": "r1", "stage": "train", "iteration": "3"},
)
CONTEXT = AlertContext("team", "team/job")
MINE = {"alertname": "MinderFaultyMachine", "job_name": "team/job", "node": "node-3"}


@pytest.fixture
def scripted():
    server = ScriptedServer(lambda request: Reply(body=b"[]"))
    yield server
    server.close()


def manager(scripted, **config):
    return Alertmanager(AlertmanagerConfig(url=scripted.url, cluster="c1", **config))


def soon():
    return Deadline.after(5)


def test_labels_are_the_identity_and_hold_nothing_that_changes():
    later = replace(ALERT, score=9.0, seen=9000.0, state="acted", action="cordon", metric="x")
    config = AlertmanagerConfig(cluster="c1", labels={"team": "ops"})
    assert labels_of(ALERT, CONTEXT, config) == labels_of(later, CONTEXT, config) == {
        "alertname": "MinderFaultyMachine", "severity": "critical", "cluster": "c1",
        "namespace": "team", "job_name": "team/job", "node": "node-3", "kind": "dissimilar",
        "team": "ops",
    }  # fmt: skip
    wide = replace(ALERT, kind="job_wide", machine="")
    assert "node" not in labels_of(wide, CONTEXT, config)


def test_annotations_tell_what_people_need():
    config = AlertmanagerConfig(runbook_url="http://docs/", dashboard_url="http://g/d/minder")
    told = annotations_of(ALERT, CONTEXT, config)
    assert told["runbook_url"] == "http://docs/MinderFaultyMachine.md"
    assert told["dashboard_url"] == "http://g/d/minder?var-job=team%2Fjob&var-node=node-3"
    assert told["since"] == "1970-01-01T00:16:40.000Z"
    assert (told["metric"], told["score"], told["dry_run"]) == ("cpu_usage", "2.50", "true")
    assert (told["run_id"], told["iteration"], told["action"]) == ("r1", "3", "none")
    acted = annotations_of(replace(ALERT, action="evict"), CONTEXT, config)
    assert acted["action"] == "evict"


def test_a_firing_alert_is_sent_at_once_every_minute_and_once_when_it_ends(scripted):
    one = manager(scripted)
    sent = [one.send(now, [ALERT], CONTEXT, soon()) for now in (1300, 1330, 1359, 1360, 1420)]
    assert sent == [1, 0, 0, 1, 1]
    first = scripted.requests[0].json[0]
    assert first["startsAt"] == "1970-01-01T00:21:00.000Z"
    # 1300 + 4 * 60 s
    assert first["endsAt"] == "1970-01-01T00:25:40.000Z"
    resolved = replace(ALERT, state="resolved")
    assert one.send(1430, [resolved], CONTEXT, soon()) == 1
    assert scripted.requests[-1].json[0]["endsAt"] == "1970-01-01T00:23:50.000Z"
    assert one.send(1500, [], CONTEXT, soon()) == 0


def test_a_change_of_state_is_sent_at_once_and_a_candidate_never(scripted):
    one = manager(scripted)
    assert one.send(1300, [replace(ALERT, state="candidate")], CONTEXT, soon()) == 0
    assert one.send(1300, [ALERT], CONTEXT, soon()) == 1
    acted = replace(ALERT, state="acted", action="cordon")
    assert one.send(1301, [acted], CONTEXT, soon()) == 1
    assert scripted.requests[-1].json[0]["annotations"]["action"] == "cordon"


@pytest.mark.parametrize("reply", [Reply(500), Reply(400, b"bad")])
def test_what_could_not_be_sent_stays_due_also_the_end(scripted, reply):
    one = manager(scripted)
    one.send(1300, [ALERT], CONTEXT, soon())
    scripted.answer = lambda request: reply
    resolved = replace(ALERT, state="resolved")
    with pytest.raises(BackendUnavailable, match=str(reply.status)):
        one.send(1310, [resolved], CONTEXT, soon())
    scripted.answer = lambda request: Reply()
    assert one.send(1320, [], CONTEXT, soon()) == 1
    assert scripted.requests[-1].json[0]["endsAt"] == "1970-01-01T00:22:00.000Z"
    assert one.send(1330, [], CONTEXT, soon()) == 0


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


@pytest.mark.parametrize("send", [False, True])
def test_alerts_are_sent_directly_only_where_that_is_asked_for(tmp_path, send):
    where = {"url": "http://127.0.0.1:9", "send": send}
    raw = raw_settings(tmp_path, "http://127.0.0.1:9", ["a"], alertmanager=where)
    assert bool(build(service_settings(raw)).around.notifier) is send


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
