"""One client of Kubernetes: a server that is away, what it refuses, lists in pages."""

import json
import logging
from types import SimpleNamespace

import pytest
from kubernetes.client import ApiException
from urllib3.exceptions import MaxRetryError

from planish import store
from planish.base.errors import ClusterError, ConfigError
from planish.records import layout
from planish.run import kube as module
from planish.run import rollouts
from planish.run.avoid import AvoidedNode, avoid, avoided, is_node_name
from planish.run.chain import Chain, parse_chain, with_settings
from planish.run.gang.cluster import GangCluster
from planish.run.kube import Kube
from planish.run.stage import PathArtifact


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


ROOTS = ("file_root", pytest.param("s3_root", marks=pytest.mark.server))


@pytest.fixture(params=ROOTS)
def root(request):
    return request.getfixturevalue(request.param)


def test_the_first_who_names_a_node_counts(root):
    assert avoided(root) == []
    first = AvoidedNode("node-3", "monitor_check", "run-a", 4, 200.0)
    assert avoid(root, first)
    assert not avoid(root, AvoidedNode("node-3", "monitor_check", "run-b", 5, 300.0))
    assert avoid(root, AvoidedNode("node-1", "operator", seconds=100.0))
    assert avoided(root) == [AvoidedNode("node-1", "operator", seconds=100.0), first]


@pytest.mark.parametrize("name", ["", "a/b", "10.0.0.7:9100", "Node", "-a", "a" * 64, "a\n"])
def test_what_is_no_node_is_refused(file_root, name):
    assert not is_node_name(name)
    with pytest.raises(ConfigError, match="a node must be named like the label"):
        avoid(file_root, AvoidedNode(name, "operator"))
    assert avoided(file_root) == []


def test_what_is_no_mark_of_a_node_is_told_and_ignored(file_root, caplog):
    avoid(file_root, AvoidedNode("node-1", "operator"))
    for name, data in (("x", b"no JSON"), ("y", b"[]"), ("z", b'{"name": 3}')):
        store.write(layout.avoided_node(file_root, name), data)
    assert [node.name for node in avoided(file_root)] == ["node-1"]
    assert caplog.text.count("ignored, no mark of a node") == 3


def test_empty_text_is_a_single_new_run():
    assert parse_chain("") == Chain(index=0, runs=1) == parse_chain("{}")


def test_settings_are_replaced_and_the_others_kept():
    text = with_settings('{"runs": 3, "resume_from": "s3://b/r"}', index=2)
    assert parse_chain(text) == Chain(index=2, runs=3, resume_from="s3://b/r")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "must be a JSON object"),
        ("[]", r"must be a JSON object .*, got '\[\]'"),
        ("[" * 100_000, "must be a JSON object"),
        ('{"run": 3}', "did you mean `runs`"),
        ('{"runs": 0}', "`chain.runs`"),
        ('{"runs": "3"}', "valid integer"),
        ('{"index": -2}', "`chain.index`"),
        ('{"index": 1e400}', "`chain.index`"),
    ],
)
def test_what_cannot_be_is_refused(text, words):
    with pytest.raises(ConfigError, match=words):
        parse_chain(text)
    with pytest.raises(ConfigError, match=words):
        with_settings(text, allow_config_change=True)


@pytest.mark.parametrize(
    ("num_tasks", "expected"),
    [(1, [[0, 1, 2, 3, 4]]), (2, [[0, 2, 4], [1, 3]]), (5, [[0], [1], [2], [3], [4]])],
)
def test_every_shard_runs_once(monkeypatch, num_tasks, expected):
    seen = []
    monkeypatch.setattr(
        rollouts,
        "stage_run",
        lambda stage: lambda **given: seen.append((stage, given.get("shard"))),
    )
    found = []
    for shard in range(num_tasks):
        rollouts.run(
            "file:///r",
            "0" * 64,
            number=1,
            offset=0,
            shard=shard,
            num_tasks=num_tasks,
            num_shards=5,
            policy_pin="p",
            state_pin="s",
            rollouts=PathArtifact("r"),
            metrics=PathArtifact("m"),
        )
        # The policy is evaluated once, behind the shards of the first task.
        if shard == 0:
            assert seen.pop() == ("evaluate_iteration", None)
        assert {stage for stage, _ in seen} == {"rollout"}
        found.append([index for _, index in seen])
        seen.clear()
    assert found == expected
