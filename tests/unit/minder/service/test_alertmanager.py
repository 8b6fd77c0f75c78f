"""What Alertmanager is asked, and what its answers mean for actions."""

from urllib.parse import parse_qsl, urlsplit

import pytest

from planish.base.errors import BackendUnavailable
from planish.minder.act.alerts import Alert
from planish.minder.service.alertmanager import Alertmanager, AlertmanagerConfig
from planish.minder.service.http import Deadline
from tests.servers.scripted_http import Reply, ScriptedServer

ALERT = Alert("0f", "team/job", "node-3", "dissimilar", "cpu_usage", 1000.0, 1300.0)


@pytest.fixture
def scripted():
    server = ScriptedServer(lambda request: Reply(body=b"[]"))
    yield server
    server.close()


def manager(scripted, **config):
    return Alertmanager(AlertmanagerConfig(url=scripted.url, cluster="c1", **config))


def soon():
    return Deadline.after(60)


def test_the_question_names_the_labels_of_the_rule_and_any_silence_counts(scripted):
    found = [{"status": {"silencedBy": ids}} for ids in ([], ["s1", "s2"])]
    scripted.answer = lambda request: Reply.of(found)
    assert manager(scripted).silence(ALERT, soon()) == "s1"
    (request,) = scripted.requests
    asked = [value for name, value in parse_qsl(urlsplit(request.path).query) if name == "filter"]
    assert asked == [
        'alertname="MinderFaultyMachine"', 'job_name="team/job"', 'node="node-3"', 'cluster="c1"',
    ]  # fmt: skip


@pytest.mark.parametrize(
    "reply",
    [Reply(500), Reply(body=b"no"), Reply.of([{"id": 1}]), Reply.of({}, status=403),
     Reply.of([{"status": {"silencedBy": None}}])],
)  # fmt: skip
def test_silences_that_can_not_be_told_are_an_error_and_not_none(scripted, reply):
    scripted.answer = lambda request: reply
    with pytest.raises(BackendUnavailable):
        manager(scripted).silence(ALERT, soon())
