"""When alerts begin and end, and that no run is told twice."""

import json

import pytest

from planish.minder.act.alerts import AlertBook
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
