"""What is decided about an alert, for which reason, and how many requests that costs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from planish.base.errors import ClusterError
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert
from planish.minder.act.config import ActConfig, KubernetesConfig
from planish.minder.act.decide import Facts, decide
from planish.minder.act.kube import names
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.act.notify import Notifier
from planish.minder.detect.result import Finding, Result

NOW = 1_000_000
ALERT = Alert("a", "team/job", "n1", "dissimilar", "cpu_usage", NOW - 500.0, NOW - 60.0)
PODS = tuple(PodInfo(f"p{i}", "team", f"u{i}", f"n{i}", "job", "Running") for i in range(1, 4))
NODES = tuple(
    NodeInfo(f"n{i}", f"u-n{i}", "1", allocatable={"nvidia.com/gpu": "8"}) for i in range(1, 11)
)
OURS = {
    names.CORDONED_BY: names.OWNER,
    names.ALERT_ID: "a",
    names.SINCE: "1970-01-12T13:00:00Z",
    names.JOB: "team/job",
}


class Counting:
    """A cluster of ten nodes that records the requests and changes its node as they say."""

    config = KubernetesConfig()
    core = None

    def __init__(self, allowed="evict", pods=PODS, **node):
        self.requests = []
        self.allowed, self.of_job = allowed, list(pods)
        self.first = replace(NODES[0], **node)

    def pods(self, _):
        self.requests.append("pods")
        return self.of_job

    def opted_in(self, _):
        self.requests.append("namespace")
        return self.allowed

    def node(self, _):
        self.requests.append("node")
        return self.first

    def nodes(self):
        self.requests.append("nodes")
        return [self.first, *NODES[1:]]

    def patch_node(self, node, change):
        if node.version != self.first.version:
            raise ClusterError("the node has changed", status=409)
        self.requests.append("patch " + "+".join(sorted(change.keys() - {"metadata"})))
        notes = {**self.first.annotations, **change.get("metadata", {}).get("annotations", {})}
        spec, status = change.get("spec", {}), change.get("status", {})
        self.first = replace(
            self.first,
            annotations={name: text for name, text in notes.items() if text is not None},
            is_unschedulable=spec.get("unschedulable", self.first.is_unschedulable),
            taints=tuple(spec.get("taints", self.first.taints)),
            conditions=tuple(status.get("conditions", self.first.conditions)),
        )

    def evict(self, pod):
        self.requests.append(f"evict {pod.name}")


def result(end, *, confirms=True):
    finding = Finding("n1", "cpu_usage", "dissimilar", NOW - 500, NOW - 250, 250.0, 2.5)
    findings = (finding,) if confirms else ()
    return Result("team/job", "ok", 0, end, 4, "default", 1.35, "euclidean", findings=findings)


def actor_of(cluster, *, others=None, **settings):
    actor = Actor(
        cluster, ActConfig(**{"mode": "evict", "dry_run": False, **settings}), **others or {}
    )
    # Reports are counted elsewhere: an Event costs the same whatever is decided.
    actor._notifier.report = lambda *_: None
    actor.events.note = lambda *_, **__: None
    return actor


def second(cluster, about=ALERT, *, newest=None, now=NOW, **settings):
    """Return outcome and requests of the second call for an alert."""
    actor = actor_of(cluster, **settings)
    actor.handle(replace(about, ended=""), result(NOW - 60), NOW - 60)
    cluster.requests.clear()
    return actor.handle(about, newest or result(NOW), now), cluster.requests


def observed(outcome):
    return (outcome.action, outcome.result, outcome.detail)


CORDON = ["patch spec", "node", "patch status"]
LOOKED = ["pods", "namespace", "node", "nodes"]


@pytest.mark.parametrize(
    ("cluster", "given", "expected", "requests"),
    [
        ({}, {"about": replace(ALERT, kind="outage", machine="")},
         ("none", "none", "outage firing"), ["pods"]),
        ({}, {"about": replace(ALERT, kind="job_wide", machine="")},
         ("none", "refused", "an event of the whole job"), ["pods"]),
        ({}, {"mode": "observe"}, ("none", "none", "observed only"), ["pods"]),
        ({}, {"mode": "observe", "about": replace(ALERT, ended="over")},
         ("none", "none", "dissimilar resolved"), ["pods"]),
        ({"pods": PODS[1:]}, {},
         ("none", "refused", "the machine does not work for the job now"), ["pods"]),
        ({"pods": [replace(PODS[0], is_observed_only=True)]}, {},
         ("none", "none", "the namespace or the job allows no action"), ["pods"]),
        ({"allowed": "observe"}, {},
         ("none", "none", "the namespace or the job allows no action"), ["pods", "namespace"]),
        ({}, {"now": NOW + 181}, ("evict", "refused", "the last second seen is 181 s old"),
         ["pods", "namespace"]),
        ({}, {"newest": result(NOW, confirms=False)},
         ("evict", "refused", "the newest call does not confirm the machine"),
         ["pods", "namespace"]),
        ({}, {"newest": result(NOW - 60)},
         ("evict", "waiting", "for a second call that confirms the machine"),
         ["pods", "namespace"]),
        ({"annotations": OURS}, {"dry_run": True},
         ("uncordon", "dry_run", "a human made the node schedulable again"),
         ["pods", "namespace", "node"]),
        ({"annotations": OURS}, {},
         ("uncordon", "refused", "a human made the node schedulable again"),
         ["pods", "namespace", "node", "patch spec", "node"]),
        ({"labels": {names.EXEMPT: "true"}}, {},
         ("evict", "refused", "the node is exempt by its label minder/exempt"), LOOKED),
        ({"is_unschedulable": True}, {"others": {"is_leader": lambda: False}},
         ("evict", "refused", "this replica is not the leader; "
          "the node was cordoned by somebody else"), LOOKED),
        ({"annotations": OURS, "is_unschedulable": True, "labels": {names.EXEMPT: "true"}}, {},
         ("evict", "refused", "the node is exempt by its label minder/exempt"), LOOKED[:3]),
        ({}, {"max_node_share": 0.1, "nodes_per_job": 1, "dry_run": True},
         ("evict", "dry_run", "cordon n1 and evict p1"), LOOKED),
        ({"allowed": "mark"}, {}, ("mark", "done", "mark n1"),
         [*LOOKED, "node", "patch status"]),
        ({}, {"mode": "cordon"}, ("cordon", "done", "cordon n1"), LOOKED + CORDON),
        ({}, {}, ("evict", "done", "cordon n1 and evict p1"), [*LOOKED, *CORDON, "evict p1"]),
        ({"annotations": OURS, "is_unschedulable": True}, {},
         ("evict", "done", "cordon n1 and evict p1"),
         [*LOOKED[:3], "node", "patch status", "evict p1"]),
        ({}, {"about": replace(ALERT, ended="over")},
         ("none", "none", "dissimilar resolved"), ["pods", "node"]),
    ],
)  # fmt: skip
def test_an_alert_costs_no_request_that_its_decision_does_not_need(
    cluster, given, expected, requests
):
    outcome, made = second(Counting(**cluster), **given)
    assert (observed(outcome), made) == (expected, requests)


def test_an_alert_that_is_done_costs_nothing_until_it_ends():
    cluster = Counting()
    actor = actor_of(cluster, mode="cordon")
    for end in (NOW - 60, NOW):
        actor.handle(ALERT, result(end), end)
    cluster.requests.clear()
    again = actor.handle(ALERT, result(NOW + 60), NOW + 60)
    assert (again.result, again.has_changed, cluster.requests) == ("done", False, [])
    ended = replace(ALERT, ended="nothing seen for 900 s")
    assert actor.handle(ended, result(NOW + 900), NOW + 900).has_changed
    assert cluster.requests == ["pods", "node", "patch status"]
    (condition,) = cluster.first.conditions
    assert (condition["status"], condition["message"]) == ("False", ended.ended)


def facts_of(cluster, **changes):
    """Return the facts by which nothing speaks against an eviction, but for the changes."""
    plain = {
        "alert": ALERT,
        "result": result(NOW),
        "now": NOW,
        "first_end": NOW - 60,
        "config": ActConfig(mode="evict", dry_run=False),
        "mode": "evict",
        "forbidden": "",
        "cluster": cluster,
        "taken": (),
        "is_leader": lambda: True,
        "is_silenced": lambda alert: False,
    }
    return Facts(**{**plain, **changes})


@pytest.mark.parametrize(
    ("changes", "pods", "words"),
    [
        ({}, PODS, ""),
        ({"labels": {names.EXEMPT: "true"}}, PODS, "the node is exempt by its label minder/exempt"),
        ({"labels": {names.EXEMPT: "false"}}, PODS, ""),
        (
            {},
            (replace(PODS[0], is_exempt=True), replace(PODS[1], is_exempt=True)),
            "pods are exempt by their label minder/exempt: p1",
        ),
        (
            {"annotations": {names.MANUAL_UNCORDON: "a"}},
            PODS,
            "a human made the node schedulable again after this alert",
        ),
        ({"annotations": {names.MANUAL_UNCORDON: "another"}}, PODS, ""),
    ],
)
def test_a_plan_names_what_people_have_forbidden(changes, pods, words):
    plan = decide(ALERT, facts_of(Counting(pods=pods, **changes)))
    if words:
        assert (plan.result, plan.detail, plan.steps) == ("refused", words, ())
    else:
        assert (plan.result, plan.steps) == ("done", ("cordon", "count", "mark", "evict"))


def test_all_guards_that_refuse_are_named_at_once_in_their_order():
    def unanswered(_):
        raise OSError("no route")

    cluster = Counting(
        pods=[replace(PODS[0], is_exempt=True)],
        labels={names.EXEMPT: "true"},
        annotations={names.MANUAL_UNCORDON: "a"},
        is_unschedulable=True,
    )
    none_left = ActConfig(mode="evict", dry_run=False, gpu_resource="none")
    facts = facts_of(cluster, config=none_left, is_leader=lambda: False, is_silenced=unanswered)
    assert decide(ALERT, facts).detail.split("; ") == [
        "this replica is not the leader",
        "it is not known whether a silence matches the alert: no route",
        "the node is exempt by its label minder/exempt",
        "pods are exempt by their label minder/exempt: p1",
        "a human made the node schedulable again after this alert",
        "the node was cordoned by somebody else",
        "0 of at most 0 nodes of the cluster were taken in 3600 s",
    ]


def test_a_node_that_somebody_else_cordons_meanwhile_is_not_taken():
    cluster = Counting(is_unschedulable=True)
    actor = actor_of(cluster, mode="cordon")
    seen = replace(cluster.first, is_unschedulable=False, version="0")
    facts = facts_of(cluster)
    facts.node = seen
    outcome = actor._carry_out(decide(ALERT, facts), facts, None)
    assert observed(outcome) == (*("evict", "refused", "somebody else cordoned the node just now"),)
    assert actor._taken == []


@pytest.mark.parametrize(
    ("kind", "metric", "words"),
    [
        ("dissimilar", "cpu_usage", "unlike its peers in cpu_usage"),
        ("silent", "", "silent"),
        ("broken", "gpu_power_draw", "with a broken exporter of gpu_power_draw"),
    ],
)
def test_an_event_names_the_fault_and_when_it_began(kind, metric, words):
    cluster, written = Counting(), []
    book = SimpleNamespace(note=lambda about, reason, text, *_, **__: written.append(text))
    about = replace(ALERT, kind=kind, metric=metric)
    job = facts_of(cluster).job
    Notifier(cluster, book).report(about, job, [{"action": ""}], "", NOW)
    since = f"{words} since 1970-01-12T13:38:20Z"
    assert written == [f"{since}, alert a", f"machine n1 {since}"]
