"""The life of alerts, step by step, and that no run is told twice."""

from __future__ import annotations

import json

import pytest

from planish.minder.act.alerts import AlertBook
from planish.minder.detect.config import minder_config
from planish.minder.detect.result import Candidate, Finding, Result

MEMBERS = tuple(f"node-{i}" for i in range(8))
T0 = 1_000_000


def result(end, *findings, status=None, candidates=(), broken=None, silent=()):
    return Result(
        *("job", status or ("fault" if findings else "ok"), end - 900, end, 8, "default", 2.0),
        "euclidean",
        findings=findings,
        candidates=candidates,
        broken=broken or {},
        silent=silent,
    )


def finding(machine="node-3", start=T0, seconds=300, kind="dissimilar", machines=()):
    metric = "cpu_usage" if kind == "dissimilar" else ""
    confirmed = start + 247
    return Finding(machine, metric, kind, start, confirmed, seconds, 3.0, machines=machines)


def book(**alerts):
    return AlertBook(minder_config({"alerts": alerts}))


def steps(changes):
    return [(c.alert.machine, c.before, c.alert.state) for c in changes]


def test_a_machine_becomes_candidate_fires_and_is_resolved_after_15_minutes_alike():
    one = book()
    candidate = Candidate("node-3", "cpu_usage", T0, 120, 2.5)
    assert steps(one.update(T0 + 120, result(T0 + 120, candidates=(candidate,)), MEMBERS)) == [
        ("node-3", None, "candidate")
    ]
    fired = one.update(T0 + 300, result(T0 + 300, finding()), MEMBERS)
    assert steps(fired) == [("node-3", "candidate", "firing")]
    alert = fired[0].alert
    assert (alert.since, alert.seen, alert.fired, alert.score) == (T0, T0 + 300, T0 + 300, 3.0)
    assert one.update(T0 + 1199, result(T0 + 1199), MEMBERS) == []
    (resolved,) = one.update(T0 + 1200, result(T0 + 1200), MEMBERS)
    assert (resolved.before, resolved.alert.state) == ("firing", "resolved")
    assert resolved.alert.id == alert.id
    assert one.alerts() == []


def test_a_candidate_that_is_alike_again_goes_without_a_word():
    one = book()
    candidate = Candidate("node-3", "cpu_usage", T0, 120, 2.5)
    one.update(T0 + 120, result(T0 + 120, candidates=(candidate,)), MEMBERS)
    assert one.update(T0 + 180, result(T0 + 180), MEMBERS) == []
    assert one.alerts() == []


def test_a_run_of_hours_whose_start_leaves_the_frame_is_one_alert():
    one = book()
    changes = []
    for now in range(T0 + 300, T0 + 7500, 60):
        start = max(T0, now - 900)
        changes += one.update(now, result(now, finding(start=start, seconds=now - start)), MEMBERS)
    assert steps(changes) == [("node-3", None, "firing")]
    (alert,) = one.alerts()
    assert (alert.seen, alert.duration_s) == (T0 + 7440, 7440)


def test_the_last_windows_of_a_resolved_run_do_not_raise_it_again_but_a_new_run_does():
    one = book(keep_firing_seconds=60)
    one.update(T0 + 300, result(T0 + 300, finding()), MEMBERS)
    # The run stays in the frame of 15 minutes after it has been resolved.
    assert steps(one.update(T0 + 360, result(T0 + 360, finding()), MEMBERS)) == [
        ("node-3", "firing", "resolved")
    ]
    assert one.update(T0 + 420, result(T0 + 420, finding()), MEMBERS) == []
    again = one.update(T0 + 900, result(T0 + 900, finding(start=T0 + 600)), MEMBERS)
    assert steps(again) == [("node-3", None, "firing")]


def test_a_machine_that_leaves_and_a_job_that_ends_resolve_their_alerts():
    one = book()
    one.update(T0, result(T0, finding("node-3"), finding("node-5")), MEMBERS)
    (left,) = one.update(T0 + 60, result(T0 + 60, finding("node-5")), MEMBERS[4:])
    assert (left.alert.machine, left.alert.reason) == ("node-3", "the machine has left the job")
    (ended,) = one.end_job("job")
    assert (ended.alert.machine, ended.alert.reason) == ("node-5", "the job has ended")
    assert one.to_json() == {"open": [], "closed": []}


@pytest.mark.parametrize("status", ["skipped", "outage", "too_few_machines"])
def test_an_answer_that_says_nothing_resolves_nothing_until_the_alert_is_too_old(status):
    one = book(max_age_seconds=3600)
    one.update(T0, result(T0, finding()), MEMBERS)
    for now in range(T0 + 60, T0 + 3600, 60):
        changes = one.update(now, result(now, status=status), MEMBERS)
        assert all(c.alert.kind == "outage" for c in changes)
    (old,) = one.expire("job", T0 + 3600)[:1]
    assert old.alert.reason == "it has been open for too long"


def test_a_machine_that_stays_odd_for_longer_than_the_largest_age_is_told_once():
    one = book(max_age_seconds=3600)
    changes = []
    for now in range(T0 + 300, T0 + 8000, 60):
        start = max(T0, now - 900)
        changes += one.update(now, result(now, finding(start=start, seconds=now - start)), MEMBERS)
    assert steps(changes) == [("node-3", None, "firing"), ("node-3", "firing", "resolved")]


def test_silence_after_an_odd_metric_of_the_same_machine_is_the_same_alert():
    one = book()
    one.update(T0 + 300, result(T0 + 300, finding()), MEMBERS)
    later = finding(start=T0 + 300, kind="silent")
    assert one.update(T0 + 600, result(T0 + 600, later), MEMBERS) == []
    assert [a.kind for a in one.alerts()] == ["dissimilar"]


def test_machines_of_an_event_of_the_whole_job_raise_no_alert_of_their_own():
    one = book()
    wide = finding("", kind="job_wide", machines=("node-1", "node-2", "node-3"))
    (change,) = one.update(T0 + 300, result(T0 + 300, wide), MEMBERS)
    assert (change.alert.name, change.alert.machine) == ("MinderJobWide", "")
    # Later only two of the runs still lie in the frame.
    tail = (finding("node-1"), finding("node-2"))
    assert one.update(T0 + 360, result(T0 + 360, *tail), MEMBERS) == []
    fresh = finding("node-2", start=T0 + 400)
    assert steps(one.update(T0 + 700, result(T0 + 700, fresh), MEMBERS)) == [
        ("node-2", None, "firing")
    ]


def test_an_outage_of_the_telemetry_is_raised_and_resolved_two_minutes_after_its_end():
    one = book()
    (raised,) = one.update(T0, result(T0, status="outage", silent=MEMBERS[:4]), MEMBERS)
    assert (raised.alert.name, raised.alert.machines) == ("MinderTelemetryOutage", MEMBERS[:4])
    one.update(T0 + 60, result(T0 + 60, status="outage"), MEMBERS)
    assert one.update(T0 + 120, result(T0 + 120), MEMBERS) == []
    assert steps(one.update(T0 + 180, result(T0 + 180), MEMBERS)) == [("", "firing", "resolved")]


def test_a_broken_exporter_is_told_beside_a_fault_of_the_same_machine():
    one = book()
    broken = {"gpu_power_draw": ("node-3",)}
    changes = one.update(T0, result(T0, finding(), broken=broken), MEMBERS)
    assert {c.alert.name for c in changes} == {"MinderFaultyMachine", "MinderTelemetryBroken"}
    assert len({c.alert.id for c in changes}) == 2


def test_actions_and_their_absence_are_noted_once():
    one = book()
    (change,) = one.update(T0, result(T0, finding()), MEMBERS)
    assert steps(one.suppressed(change.alert.id, "dry run")) == [("node-3", "firing", "suppressed")]
    assert one.suppressed(change.alert.id, "dry run") == []
    assert steps(one.acted(change.alert.id, "cordon")) == [("node-3", "suppressed", "acted")]
    (alert,) = one.alerts("job")
    assert (alert.action, alert.reason, alert.is_active) == ("cordon", "", True)


def test_a_book_that_was_written_and_read_goes_on_as_if_nothing_had_happened():
    one = book()
    one.update(T0, result(T0, finding(), finding("node-5")), MEMBERS)
    one.update(T0 + 60, result(T0 + 60), MEMBERS[:5])
    text = json.dumps(one.to_json())
    two = AlertBook.from_json(minder_config(), json.loads(text))
    assert two.alerts() == one.alerts()
    for which in (one, two):
        assert which.update(T0 + 120, result(T0 + 120, finding()), MEMBERS[:5]) == []
    assert two.to_json() == one.to_json()
