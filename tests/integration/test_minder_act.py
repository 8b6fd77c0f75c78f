"""What the monitor does to a real API server: cordon, evict, undo, and when it does nothing."""

from dataclasses import replace

import pytest

from planish.minder.act.actor import Actor
from planish.minder.act.config import ActConfig
from planish.minder.act.drain import cordon
from planish.minder.act.kube import names
from tests.integration.minder_cluster import Fleet, alert, result
from tests.integration.waiting import wait_for

pytestmark = pytest.mark.server

NOW = 2_000_000_000
FREE = {"nodes_per_job": 9, "max_node_share": 1.0}


@pytest.fixture
def fleet(control_plane):
    fleet = Fleet(control_plane)
    fleet.add_nodes(5)
    yield fleet
    fleet.remove()


def actor_of(fleet, others=None, **settings):
    config = ActConfig(**{"mode": "evict", "dry_run": False, **FREE, **settings})
    return Actor(fleet.cluster(), config, **(others or {}))


def twice(actor, of, now=NOW):
    """Let two calls confirm an alert and return what came of the second."""
    first = actor.handle(of, result(of, now - 60), now - 60)
    if first.result not in ("waiting", "dry_run", "done"):
        return first
    return actor.handle(of, result(of, now), now)


def test_a_faulty_machine_is_cordoned_and_its_pods_of_the_job_are_evicted(fleet):
    fleet.add_job(3)
    fleet.add_pod("mirror", fleet.name(1), gpus=0, annotations={names.MIRROR: "file"})
    fleet.add_pod("other", fleet.name(1), job="another", gpus=0)
    actor, about = actor_of(fleet), alert(fleet, 1)
    outcome = twice(actor, about)
    assert (outcome.action, outcome.result, outcome.has_changed) == ("evict", "done", True)
    assert outcome.detail == f"cordon {fleet.name(1)} and evict train-1"
    node = fleet.node(1)
    assert node.is_unschedulable
    ours = {"key": "minder/faulty", "value": about.id, "effect": "NoSchedule"}
    assert ours in [{k: t.get(k) for k in ours} for t in node.taints]
    kept = {k: v for k, v in node.annotations.items() if k.startswith("minder/")}
    assert kept == {
        "minder/cordoned-by": "minder",
        "minder/reason": "dissimilar cpu_usage",
        "minder/since": "2033-05-18T03:33:20Z",
        "minder/alert": about.id,
        "minder/job": f"{fleet.namespace}/train",
    }
    assert fleet.pods() == ["mirror", "other", "train-0", "train-2"]
    assert fleet.events(fleet.name(1)) == [("MinderCordoned", 1), ("MinderFaultyMachine", 1)]
    assert fleet.events("train-1") == [("MachineAnomaly", 1), ("MinderFaultyMachine", 1)]
    again = actor.handle(about, result(about, NOW + 60), NOW + 60)
    assert (again.result, again.has_changed) == ("done", False)


def test_one_call_alone_a_stale_one_and_one_that_does_not_confirm_do_nothing(fleet):
    fleet.add_job(2)
    actor, about = actor_of(fleet), alert(fleet)
    before = fleet.versions()
    first = actor.handle(about, result(about, NOW), NOW)
    assert (first.action, first.result) == ("evict", "waiting")
    same = actor.handle(about, result(about, NOW), NOW + 30)
    assert (same.result, same.has_changed) == ("waiting", False)
    unsure = actor.handle(about, result(about, NOW + 60, confirms=False), NOW + 60)
    assert (unsure.result, unsure.detail) == (
        "refused",
        "the newest call does not confirm the machine",
    )
    stale = actor.handle(about, result(about, NOW + 61), NOW + 300)
    assert (stale.result, stale.detail) == ("refused", "the last second seen is 239 s old")
    assert fleet.versions() == before


def test_a_dry_run_changes_no_node_and_no_pod(fleet):
    fleet.add_job(3)
    before = fleet.versions()
    actor, about = actor_of(fleet, dry_run=True), alert(fleet)
    outcome = twice(actor, about)
    assert (outcome.action, outcome.result) == ("evict", "dry_run")
    assert outcome.detail == f"cordon {fleet.name(0)} and evict train-0"
    assert fleet.versions() == before
    assert ("MinderDryRun", 1) in fleet.events(fleet.name(0))
    again = actor.handle(about, result(about, NOW + 60), NOW + 60)
    assert (again.result, again.has_changed) == ("dry_run", False)


@pytest.mark.parametrize("action", ["", "cordon", "nonsense"])
def test_a_namespace_allows_no_more_than_its_label_says(control_plane, action):
    fleet = Fleet(control_plane, action=action)
    fleet.add_nodes(3)
    fleet.add_job(2)
    outcome = twice(actor_of(fleet), alert(fleet))
    allowed = action == "cordon"
    assert outcome.action == ("cordon" if allowed else "none")
    assert fleet.node(0).is_unschedulable is allowed
    assert fleet.pods() == ["train-0", "train-1"]
    fleet.remove()


def test_observing_never_touches_a_machine_but_tells(fleet):
    fleet.add_job(2)
    before = fleet.versions()
    outcome = twice(actor_of(fleet, mode="observe"), alert(fleet))
    assert (outcome.action, outcome.result) == ("none", "none")
    assert fleet.versions() == before
    assert fleet.events(fleet.name(0)) == [("MinderFaultyMachine", 1)]
    assert fleet.events("train-0") == [("MachineAnomaly", 1)]


def test_a_node_that_somebody_else_cordoned_is_left_alone(fleet):
    fleet.add_job(2)
    fleet.call(fleet.core.patch_node, fleet.name(0), {"spec": {"unschedulable": True}})
    # The cluster's own controller follows with a taint.
    wait_for(lambda: fleet.raw_node(0)["spec"].get("taints"), 30)
    before = fleet.versions()
    outcome = twice(actor_of(fleet), alert(fleet))
    assert outcome.detail == "the node was cordoned by somebody else"
    assert fleet.versions() == before
    assert actor_of(fleet).reconcile(NOW) == []
    assert fleet.node(0).is_unschedulable


def test_a_human_who_uncordons_is_respected_for_that_alert(fleet):
    fleet.add_job(3)
    actor, about = actor_of(fleet, mode="cordon"), alert(fleet)
    taint = {"key": "zone/odd", "effect": "PreferNoSchedule"}
    fleet.call(fleet.core.patch_node, fleet.name(0), {"spec": {"taints": [taint]}})
    assert twice(actor, about).result == "done"
    assert actor.reconcile(NOW) == []
    fleet.plane.kubectl("label", "node", fleet.name(0), "health=good")
    fleet.plane.kubectl("uncordon", fleet.name(0))
    ((machine, outcome),) = actor.reconcile(NOW + 60)
    assert (machine, outcome.action, outcome.result, outcome.detail) == (
        *(fleet.name(0), "uncordon", "refused", "a human made the node schedulable again"),
    )
    # The cluster's own controller takes its taint away a moment after the node is schedulable.
    wait_for(lambda: [t["key"] for t in fleet.node(0).taints] == ["zone/odd"], 30)
    node = fleet.node(0)
    kept = {k: v for k, v in node.annotations.items() if k.startswith("minder/")}
    assert kept == {names.MANUAL_UNCORDON: about.id}
    assert (node.is_unschedulable, node.labels["health"]) == (False, "good")
    assert actor.reconcile(NOW + 120) == []
    # A process that knows nothing of it does not repeat it, unlike a new alert.
    refused = twice(actor_of(fleet, mode="cordon"), about)
    assert refused.detail == "a human made the node schedulable again after this alert"
    assert not fleet.node(0).is_unschedulable
    assert twice(actor_of(fleet, mode="cordon"), replace(about, id="b1")).result == "done"
    assert fleet.node(0).is_unschedulable


def test_a_disruption_budget_holds_a_pod_and_a_restart_goes_on(fleet):
    fleet.add_job(3)
    budget = {
        "metadata": {"name": "all"},
        "spec": {"minAvailable": 3, "selector": {"matchLabels": {names.JOB_LABELS[0]: "train"}}},
    }
    from kubernetes.client import PolicyV1Api

    policy = PolicyV1Api(fleet.core.api_client)
    fleet.call(policy.create_namespaced_pod_disruption_budget, fleet.namespace, budget)
    about = alert(fleet)
    first = twice(actor_of(fleet), about)
    assert (first.result, first.detail) == ("waiting", "budgets hold back 1 pods")
    cordoned = fleet.node(0)
    assert cordoned.is_unschedulable
    # Nothing is saved; another process finds the node as the first one left it.
    actor = actor_of(fleet, nodes_per_job=1, job_seconds=7200)
    later = NOW + 600
    waiting = twice(actor, about, later)
    assert waiting.result == "waiting"
    assert fleet.node(0).annotations == cordoned.annotations
    name = budget["metadata"]["name"]
    fleet.call(policy.delete_namespaced_pod_disruption_budget, name, fleet.namespace)
    times = iter(range(later + 61, later + 800, 61))

    def evicts():
        now = next(times)
        return actor.handle(about, result(about, now), now).result == "done"

    wait_for(evicts, 20)
    assert fleet.pods() == ["train-1", "train-2"]


def test_a_budget_that_never_gives_way_ends_in_an_event(fleet):
    from kubernetes.client import PolicyV1Api

    fleet.add_job(2)
    selector = {"matchLabels": {names.JOB_LABELS[0]: "train"}}
    budget = {"metadata": {"name": "all"}, "spec": {"minAvailable": 2, "selector": selector}}
    policy = PolicyV1Api(fleet.core.api_client)
    fleet.call(policy.create_namespaced_pod_disruption_budget, fleet.namespace, budget)
    actor, about = actor_of(fleet), alert(fleet)
    assert twice(actor, about).result == "waiting"
    blocked = actor.handle(about, result(about, NOW + 901), NOW + 901)
    assert (blocked.action, blocked.result, blocked.detail) == (
        *("evict", "blocked", "1 pods were given up"),
    )
    assert ("MinderEvictionBlocked", 1) in fleet.events("train-0")
    assert fleet.pods() == ["train-0", "train-1"]
    again = actor.handle(about, result(about, NOW + 960), NOW + 960)
    assert (again.result, again.has_changed) == ("blocked", False)


def test_a_limit_that_is_used_up_holds_for_a_new_process_until_its_window_is_over(fleet):
    fleet.add_job(4)
    limits = {"mode": "cordon", "max_node_share": 0.2}
    assert twice(actor_of(fleet, **limits), alert(fleet, 0)).result == "done"
    actor, two = actor_of(fleet, **limits), alert(fleet, 1, id="b2")
    refused = twice(actor, two)
    assert refused.result == "refused"
    assert refused.detail == "1 of at most 1 nodes of the cluster were taken in 3600 s"
    assert twice(actor, two, NOW + 3599).result == "refused"
    assert actor.handle(two, result(two, NOW + 3600), NOW + 3600).result == "done"
    assert [fleet.node(i).is_unschedulable for i in range(3)] == [True, True, False]


def test_an_event_of_the_whole_job_touches_no_machine(fleet):
    fleet.add_job(2)
    before = fleet.versions()
    wide = alert(fleet, kind="job_wide", machine="", metric="", machines=tuple(fleet.nodes[:2]))
    outcome = twice(actor_of(fleet), wide)
    assert (outcome.result, outcome.detail) == ("refused", "an event of the whole job")
    assert fleet.versions() == before
    told = [fleet.events(f"train-{number}") for number in range(2)]
    assert told == [[("MachineAnomaly", 1)]] * 2


def test_guards_of_the_cluster_are_asked_for_each_action(fleet):
    fleet.add_job(2)
    about = alert(fleet)
    before = fleet.versions()

    def outage(of):
        raise OSError("no route")

    follower = actor_of(fleet, others={"is_leader": lambda: False})
    assert twice(follower, about).detail == "this replica is not the leader"
    silenced = actor_of(fleet, others={"is_silenced": lambda of: of.id == about.id})
    assert twice(silenced, about).detail == "a silence matches the alert"
    unknown = actor_of(fleet, others={"is_silenced": outage})
    assert twice(unknown, about).detail.endswith("matches the alert: no route")
    assert fleet.versions() == before


def test_a_node_that_changed_meanwhile_is_read_again(fleet):
    stale = fleet.node(0)
    fleet.plane.kubectl("label", "node", fleet.name(0), "fresh=yes")
    assert cordon(fleet.admin, stale, "a", "t/j", "why", NOW)
    node = fleet.node(0)
    assert (node.is_unschedulable, node.is_ours, node.labels["fresh"]) == (True, True, "yes")
    assert not cordon(fleet.admin, stale, "a", "t/j", "why", NOW)


def test_a_new_process_finds_what_was_done_and_does_it_no_second_time(fleet):
    fleet.add_job(3)
    about = alert(fleet)
    assert twice(actor_of(fleet), about).result == "done"
    before = fleet.node(0).annotations
    again = twice(actor_of(fleet), about, NOW + 600)
    assert again.detail == "the machine does not work for the job now"
    assert fleet.node(0).annotations == before


def condition(fleet, number=0):
    """Return status and reason of the condition on a node, beside those that others keep."""
    conditions = fleet.raw_node(number)["status"]["conditions"]
    assert "Ready" in {one["type"] for one in conditions}
    found = [one for one in conditions if one["type"] == names.FAULTY_MACHINE]
    return (found[0]["status"], found[0]["reason"]) if found else None


@pytest.mark.parametrize(
    ("mode", "label", "dry_run", "expected", "is_cordoned"),
    [
        ("mark", "evict", False, ("True", "Dissimilar"), False),
        ("evict", "mark", False, ("True", "Dissimilar"), False),
        ("cordon", "cordon", False, ("True", "Dissimilar"), True),
        ("evict", "evict", False, ("True", "Dissimilar"), True),
        ("mark", "", False, None, False),
        ("observe", "evict", False, None, False),
        ("mark", "evict", True, None, False),
    ],
)
def test_a_condition_of_the_node_says_that_it_is_faulty_until_the_alert_ends(
    control_plane, mode, label, dry_run, expected, is_cordoned
):
    fleet = Fleet(control_plane, action=label)
    fleet.add_nodes(3)
    fleet.add_job(3)
    actor, about = actor_of(fleet, mode=mode, dry_run=dry_run), alert(fleet)
    twice(actor, about)
    assert condition(fleet) == expected
    assert fleet.node(0).is_unschedulable is is_cordoned
    # A process that knows nothing of the alert ends what its condition says, and nothing else.
    other = replace(about, id="another", ended="nothing seen for 900 s")
    actor_of(fleet, mode=mode, dry_run=dry_run).handle(other, result(other, NOW), NOW)
    assert condition(fleet) == expected
    ended = replace(about, ended="nothing seen for 900 s")
    actor_of(fleet, mode=mode, dry_run=dry_run).handle(ended, result(ended, NOW + 60), NOW + 60)
    assert condition(fleet) == (expected and ("False", "Recovered"))
    fleet.remove()


def test_a_human_who_uncordons_a_node_ends_its_condition_too(fleet):
    fleet.add_job(2)
    actor = actor_of(fleet, mode="cordon")
    twice(actor, alert(fleet))
    assert condition(fleet) == ("True", "Dissimilar")
    fleet.plane.kubectl("uncordon", fleet.name(0))
    actor.reconcile(NOW)
    assert condition(fleet) == ("False", "Recovered")
