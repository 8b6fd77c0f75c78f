"""When alerts begin and end, and that no run is told twice."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base.errors import ClusterError
from planish.minder.act.actor import Actor
from planish.minder.act.alerts import Alert, AlertBook
from planish.minder.act.config import ActConfig
from planish.minder.act.decide import Taken, limit_refusals
from planish.minder.act.drain import Evictions, change_node, evict_round
from planish.minder.act.kube.objects import NodeInfo, PodInfo
from planish.minder.detect.result import Finding, Result

MEMBERS = tuple(f"node-{i}" for i in range(8))
T0 = 1_000_000


def result(end, *findings, status=None, broken=None, silent=()):
    return Result(
        *("job", status or ("fault" if findings else "ok"), end - 900, end, 8, "default", 2.0),
        "euclidean",
        findings=findings,
        broken=broken or {},
        silent=silent,
    )


def finding(machine="node-3", start=T0, seconds=300, kind="dissimilar", machines=()):
    metric = "cpu_usage" if kind == "dissimilar" else ""
    confirmed = start + 247
    return Finding(machine, metric, kind, start, confirmed, seconds, 3.0, machines=machines)


def book():
    return AlertBook(900)


def steps(alerts):
    return [(alert.machine, alert.state) for alert in alerts]


def test_an_alert_of_hours_begins_once_and_ends_when_its_run_has_left_the_window():
    one = book()
    changes = []
    for now in range(T0 + 300, T0 + 7500, 60):
        start = max(T0, now - 900)
        changes += one.update(result(now, finding(start=start, seconds=now - start)), MEMBERS)
    (begun,) = changes
    assert (begun.machine, begun.state, begun.name) == ("node-3", "firing", "MinderFaultyMachine")
    assert (begun.since, begun.seen, begun.score) == (T0, T0 + 300, 3.0)
    (alert,) = one.alerts()
    assert (alert.since, alert.seen) == (T0, T0 + 7440)
    assert one.update(result(T0 + 7440 + 899), MEMBERS) == []
    (ended,) = one.update(result(T0 + 7440 + 900), MEMBERS)
    assert (ended.id, ended.state) == (begun.id, "resolved")
    assert one.alerts() == []


def test_a_machine_that_leaves_and_a_job_that_ends_end_their_alerts():
    one = book()
    one.update(result(T0, finding("node-3"), finding("node-5")), MEMBERS)
    (left,) = one.update(result(T0 + 60, finding("node-5")), MEMBERS[4:])
    assert (left.machine, left.ended) == ("node-3", "the machine has left the job")
    (over,) = one.end()
    assert (over.machine, over.ended) == ("node-5", "the job has ended")
    assert one.alerts() == []


@pytest.mark.parametrize("status", ["skipped", "outage", "too_few_machines"])
def test_an_answer_that_says_nothing_ends_no_alert_about_a_machine(status):
    one = book()
    one.update(result(T0, finding()), MEMBERS)
    for now in range(T0 + 60, T0 + 3600, 60):
        assert all(a.kind == "outage" for a in one.update(result(now, status=status), MEMBERS))
    assert "node-3" in [alert.machine for alert in one.alerts()]


def test_silence_after_an_odd_metric_of_the_same_machine_is_the_same_alert():
    one = book()
    one.update(result(T0 + 300, finding()), MEMBERS)
    later = finding(start=T0 + 300, kind="silent")
    assert one.update(result(T0 + 600, later), MEMBERS) == []
    assert [(a.kind, a.seen) for a in one.alerts()] == [("dissimilar", T0 + 600)]


def test_machines_of_an_event_of_the_whole_job_raise_no_alert_of_their_own():
    one = book()
    wide = finding("", kind="job_wide", machines=("node-1", "node-2", "node-3"))
    (change,) = one.update(result(T0 + 300, wide), MEMBERS)
    assert (change.name, change.machine) == ("MinderJobWide", "")
    # Later only two of the runs still lie in the frame.
    tail = (finding("node-1"), finding("node-2"))
    assert one.update(result(T0 + 360, *tail), MEMBERS) == []
    fresh = finding("node-2", start=T0 + 400)
    assert steps(one.update(result(T0 + 700, fresh), MEMBERS)) == [("node-2", "firing")]


def test_faults_of_the_telemetry_last_as_long_as_calls_see_them():
    one = book()
    (raised,) = one.update(result(T0, status="outage", silent=MEMBERS[:4]), MEMBERS)
    assert (raised.name, raised.machines) == ("MinderTelemetryOutage", MEMBERS[:4])
    assert one.update(result(T0 + 60, status="outage"), MEMBERS) == []
    assert steps(one.update(result(T0 + 120), MEMBERS)) == [("", "resolved")]
    broken = {"gpu_power_draw": ("node-3",)}
    begun = one.update(result(T0, finding(), broken=broken), MEMBERS)
    assert {a.name for a in begun} == {"MinderFaultyMachine", "MinderTelemetryBroken"}
    assert len({a.id for a in begun}) == 2
    (ended,) = one.update(result(T0 + 60, finding()), MEMBERS)
    assert (ended.kind, ended.metric, ended.state) == ("broken", "gpu_power_draw", "resolved")


def test_a_book_that_was_written_and_read_goes_on_as_if_nothing_had_happened():
    one = book()
    one.update(result(T0, finding(), finding("node-5")), MEMBERS)
    one.update(result(T0 + 60), MEMBERS[:5])
    two = AlertBook.from_json(900, json.loads(json.dumps(one.to_json())))
    assert two.alerts() == one.alerts()
    for which in (one, two):
        assert which.update(result(T0 + 120, finding()), MEMBERS[:5]) == []
    assert two.to_json() == one.to_json()


def test_what_an_earlier_version_left_is_read():
    old = {"id": "0f", "job": "job", "machine": "node-3", "kind": "dissimilar",
           "metric": "cpu_usage", "state": "acted", "since": 1.0, "seen": 2.0, "fired": 2.0,
           "score": 3.0, "duration_s": 1.0, "machines": [], "action": "cordon", "reason": "",
           "run": {}}  # fmt: skip
    raw = {"open": [old, {**old, "machine": "node-4", "state": "candidate"}], "closed": []}
    assert steps(AlertBook.from_json(900, raw).alerts()) == [("node-3", "firing")]


NOW = 100_000.0
CONFIG = ActConfig()


def node(name, **changes):
    room = {"cpu": "8", "nvidia.com/gpu": "8"}
    return replace(NodeInfo(name, f"uid-{name}", "1", allocatable=room), **changes)


NODES = [node(f"n{i}") for i in range(30)]


def refused(taken, config=CONFIG, nodes=NODES):
    return limit_refusals(
        "team/job", [Taken(NOW - ago, job, name) for ago, job, name in taken], nodes, NOW, config
    )


@pytest.mark.parametrize(
    ("taken", "count"),
    [
        ([], 0),
        ([(1799, "team/job", "n5")], 1),
        ([(1800, "team/job", "n5")], 0),
        ([(60, "other", "n5")], 0),
        ([(700, "a", "n5"), (1400, "b", "n6"), (3599, "c", "n7")], 1),
        ([(700, "a", "n5"), (1400, "b", "n6"), (3600, "c", "n7")], 0),
        # One node taken twice is one node.
        ([(700, "a", "n5"), (1400, "b", "n5"), (3500, "c", "n5")], 0),
    ],
)
def test_limits_of_job_and_cluster_slide(taken, count):
    assert len(refused(taken)) == count


@pytest.mark.parametrize(
    ("gpus", "limit"), [(0, 0), (1, 1), (10, 1), (11, 2), (20, 2), (30, 3), (99, 3)]
)
def test_the_cluster_loses_at_most_three_nodes_and_a_tenth_rounded_up(gpus, limit):
    nodes = [node(f"g{i}") for i in range(gpus)]
    nodes += [node(f"c{i}", allocatable={"cpu": "4"}) for i in range(50)]
    taken = [(100, "a", f"n{i}") for i in range(limit)]
    (reason,) = refused(taken, nodes=nodes)
    assert reason == f"{limit} of at most {limit} nodes of the cluster were taken in 3600 s"
    assert refused(taken[1:], nodes=nodes) == ([] if limit else [reason])


def test_without_a_resource_every_node_counts():
    nodes = [node(f"c{i}", allocatable={"cpu": "4"}) for i in range(20)]
    config = ActConfig(gpu_resource="")
    assert refused([(100, "a", "n1")], config, nodes) == []
    assert len(refused([(100, "a", "n1"), (100, "b", "n2")], config, nodes)) == 1


@pytest.mark.slow
@given(
    st.lists(
        st.tuples(st.integers(0, 20_000), st.sampled_from(["a", "b", "c"]), st.integers(0, 29)),
        max_size=60,
    )
)
def test_no_window_ever_holds_more_than_its_limit(wishes):
    taken = []
    for second, job, number in sorted(wishes):
        if not limit_refusals(job, taken, NODES, float(second), CONFIG):
            taken.append(Taken(float(second), job, f"n{number}"))
    for first in taken:
        hour = {t.node for t in taken if first.time <= t.time < first.time + 3600}
        of_job = {
            t.node for t in taken if first.time <= t.time < first.time + 1800 and t.job == first.job
        }
        assert len(hour) <= 3
        assert len(of_job) <= 1


DRAIN_POD = PodInfo("p", "team", "u", "n1", "job", "Running")
NODE = NodeInfo("n1", "u", "1")


class Refusing:
    """Answers each request with the next of the statuses; the last one for ever."""

    def __init__(self, *statuses, retry_after=0.0):
        self.statuses, self.retry_after, self.num_requests = list(statuses), retry_after, 0

    def answer(self, *_):
        self.num_requests += 1
        status = self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]
        if status != 200:
            raise ClusterError("refused", status=status, retry_after=self.retry_after)

    evict = patch_node = pods = answer

    def node(self, _):
        return NODE


def test_a_budget_is_asked_again_after_5_10_20_40_and_60_seconds_until_15_minutes():
    cluster, state, asked = Refusing(429), Evictions(), []
    for second in range(1000):
        before = cluster.num_requests
        done = evict_round(cluster, [DRAIN_POD], state, float(second))
        if cluster.num_requests > before:
            asked.append(second)
        if done.given_up:
            break
        assert done.num_waiting == 1
    assert asked == [0, 5, 15, 35, *range(75, 916, 60)]
    assert second == 915
    assert (state.given_up, state.attempts) == ({"u"}, {})
    # Given up for good.
    assert evict_round(cluster, [DRAIN_POD], state, 5000.0).num_waiting == 0
    assert cluster.num_requests == len(asked)


@pytest.mark.parametrize(("wanted", "pause"), [(30.0, 30.0), (4000.0, 60.0)])
def test_the_server_may_ask_for_a_longer_pause_up_to_a_minute(wanted, pause):
    state = Evictions()
    evict_round(Refusing(429, retry_after=wanted), [DRAIN_POD], state, 0.0)
    assert state.attempts["u"].due == pause


@pytest.mark.parametrize("status", [404, 409])
def test_a_pod_that_is_gone_or_another_one_is_done(status):
    done = evict_round(Refusing(status), [DRAIN_POD], Evictions(), 0.0)
    assert (done.evicted, done.given_up, done.num_waiting) == ([], [], 0)


@pytest.mark.parametrize(
    ("statuses", "tries"), [([409, 409, 200], 3), ([409, 409, 409, 200], 3), ([500], 1)]
)
def test_a_patch_is_tried_three_times_against_others(statuses, tries):
    cluster = Refusing(*statuses)
    if statuses == [409, 409, 200]:
        assert change_node(cluster, NODE, lambda _: {"spec": {}})
    else:
        with pytest.raises(ClusterError):
            change_node(cluster, NODE, lambda _: {"spec": {}})
    assert cluster.num_requests == tries


def test_a_server_that_fails_is_told_once_and_nothing_is_done():
    cluster = Refusing(503)
    actor = Actor(cluster, ActConfig(mode="evict", dry_run=False))
    alert = Alert("a", "team/job", "n1", "dissimilar", "cpu_usage", 500.0, 900.0)
    result = Result("team/job", "fault", 0, 1000, 4, "default", 1.35, "euclidean")
    actor.events.note = lambda *_, **__: None
    outcomes = [actor.handle(alert, result, 1000 + second) for second in range(3)]
    assert [(one.result, one.has_changed) for one in outcomes] == [
        *(("failed", True), ("failed", False), ("failed", False))
    ]
    assert cluster.num_requests == 3
