"""One client of Kubernetes: a server that is away, what it refuses, lists in pages."""

import json
import logging
from types import SimpleNamespace

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import MaxRetryError

from planish.base.errors import ClusterError, ConfigError
from planish.run import kube as module
from planish.run.gang.cluster import GangCluster
from planish.run.kube import Kube


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only while somebody sleeps."""
    now = SimpleNamespace(seconds=0.0)

    def sleep(seconds):
        now.seconds += seconds

    fake = SimpleNamespace(monotonic=lambda: now.seconds, sleep=sleep)
    monkeypatch.setattr(module, "time", fake)
    return now


def answer_after(clock, seconds, fault):
    """A call that fails for so long, then answers."""

    def read_namespaced_job(*_, **options):
        assert options["_request_timeout"] == module.REQUEST_SECONDS
        if clock.seconds < seconds:
            raise fault
        headers = {"Content-Type": "application/json"}
        return SimpleNamespace(data=b'{"kind": "Job"}', headers=headers)

    return read_namespaced_job


@pytest.mark.parametrize(
    "fault",
    [MaxRetryError(None, "/"), ApiException(503), ApiException(429), ConnectionResetError()],
)
def test_a_server_that_is_away_for_a_minute_is_asked_again(clock, fault, caplog):
    caplog.set_level(logging.WARNING)
    found = Kube(None).call(answer_after(clock, 60.0, fault))
    assert found == {"kind": "Job"}
    assert 60.0 <= clock.seconds <= 60.0 + module.MAX_PAUSE_SECONDS
    assert "API server does not answer" in caplog.text


def test_a_server_that_stays_away_is_given_up_after_its_time(clock):
    cluster = Kube(None)
    with pytest.raises(ClusterError, match="within 600 s, got ConnectionResetError") as caught:
        cluster.call(answer_after(clock, 1e9, ConnectionResetError()))
    assert caught.value.status == 0
    assert 590.0 < clock.seconds <= 600.0


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [
        (403, ConfigError, "must be allowed what it asks.*to read namespaced job: 403 gone"),
        (422, ConfigError, "must accept the gang"),
        (404, ClusterError, "refused to read namespaced job: 404 gone"),
    ],
)
def test_a_refusal_is_told_at_once(clock, status, kind, words):
    fault = ApiException(status)
    fault.body, fault.headers = json.dumps({"message": "gone"}), {"Retry-After": "30"}
    with pytest.raises(kind, match=words) as caught:
        GangCluster(None, "n", "p").call(answer_after(clock, 1.0, fault))
    assert clock.seconds == 0
    assert getattr(caught.value, "retry_after", 30.0) == 30.0


def test_a_server_that_has_just_started_may_forbid_for_a_while(clock):
    """It knows the rules of no account yet; one that goes on forbidding is believed."""
    cluster = Kube(None)
    silent = ConnectionResetError()
    calm = answer_after(clock, 10.0, silent)

    def starting(*rest, **options):
        if 3.0 < clock.seconds < 10.0:
            raise ApiException(403)
        return calm(*rest, **options)

    starting.__name__ = calm.__name__
    assert cluster.call(starting) == {"kind": "Job"}
    with pytest.raises(ClusterError, match="refused to read namespaced job: 403"):
        cluster.call(answer_after(clock, 1e9, ApiException(403)))
    assert clock.seconds < 10.0 + module.STARTING_SECONDS + 2 * module.MAX_PAUSE_SECONDS


def test_a_list_is_read_page_by_page_and_a_kind_that_is_not_installed_is_empty():
    pages = {None: {"items": [1, 2], "metadata": {"continue": "t"}}, "t": {"items": [3]}}

    def list_namespaced_custom_object(*_, **options):
        page = json.dumps(pages[options.get("_continue")]).encode()
        return SimpleNamespace(data=page, headers={"Content-Type": "application/json"})

    place = ("batch", "v1", "n", "jobs")
    assert list(Kube(None).items(list_namespaced_custom_object, *place)) == [1, 2, 3]

    def absent(*_, **options):
        raise ApiException(404)

    absent.__name__ = "list_namespaced_custom_object"
    assert list(Kube(None).items(absent, *place)) == []
