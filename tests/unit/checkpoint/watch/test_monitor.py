"""Timing records: their bytes, sums, metrics, stragglers, and where they are stored."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.base import telemetry
from planish.base.errors import CheckpointNotFound, RecordError
from planish.checkpoint.commit.commit import publish
from planish.checkpoint.commit.journal import journaled, new_attempt
from planish.checkpoint.watch import monitor
from planish.checkpoint.watch.monitor import Timeline, Timing
from planish.store import open_store
from tests import pages


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.setattr(telemetry, "_series", {})


def samples():
    return pages.samples(telemetry.metrics_text())


def uploads(*seconds, op="save", stage="upload", start=100.0):
    return [
        Timing(rank, op, "main.model", stage, start, start + s, 10, host=f"node-{rank // 2}")
        for rank, s in enumerate(seconds)
    ]


def test_own_records_become_metrics_and_those_of_others_do_not():
    records = [
        *uploads(2.0, 4.0),
        Timing(1, "save", "main.model", "upload", 104.0, 104.5, 7),
        Timing(1, "save", "main.model", "stage", 99.0, 99.2, 17),
        Timing(1, "save", "", "plan", 98.0, 98.25),
    ]
    monitor.publish(Timeline(records), 1)
    found = samples()
    name = "planish_checkpoint_stage_seconds"
    labels = '{op="save",stage="upload",state="main.model"}'
    assert found[f"{name}_count{labels}"] == 2
    assert found[f"{name}_sum{labels}"] == pytest.approx(4.5)
    assert found[f'{name}_sum{{op="save",stage="plan",state="all"}}'] == pytest.approx(0.25)
    moved = 'planish_checkpoint_bytes_total{op="save",state="main.model"}'
    assert found[moved] == 17, "staged bytes do not leave the machine"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((2.0, 2.0, 2.0, 4.0), []),
        ((2.0, 2.0, 2.0, 4.1), [3]),
        ((0.1, 0.1, 0.1, 0.9), []),
        ((0.1, 0.1, 0.1, 1.1), [3]),
        ((1.0, 9.0, 1.0, 1.0, 7.0), [1, 4]),
        ((9.0,), []),
        ((), []),
    ],
)
def test_a_straggler_takes_over_twice_the_median_and_over_one_second(seconds, expected):
    assert [one.rank for one in monitor.stragglers(Timeline(uploads(*seconds)))] == expected


def test_a_straggler_is_named_with_its_machine_and_the_stage_that_cost_most_beyond_others():
    fast = uploads(3.0, 3.0, 3.0, 3.0)
    slow_plan = Timing(3, "save", "", "plan", 92.0, 100.0, host="node-1")
    plans = [Timing(rank, "save", "", "plan", 99.9, 100.0) for rank in range(3)]
    (one,) = monitor.stragglers(Timeline([*fast, slow_plan, *plans]))
    assert (one.rank, one.host, one.stage) == (3, "node-1", "plan")
    assert (one.seconds, one.median_seconds) == (pytest.approx(11.0), pytest.approx(3.1))


def test_a_straggler_is_logged_and_counted(caplog):
    with caplog.at_level(logging.WARNING, logger="planish.checkpoint.watch.monitor"):
        monitor.warn_of_stragglers(Timeline(uploads(1.0, 1.0, 5.0)))
    line = "checkpoint_straggler op=save rank=2 host=node-1 stage=upload seconds=5 median_seconds=1"
    assert [record.getMessage() for record in caplog.records] == [line]
    assert samples()['planish_checkpoint_stragglers_total{op="save",stage="upload"}'] == 1


def commit_at(uri):
    storage, path = open_store(uri)
    attempt = new_attempt()
    with journaled(storage, path, attempt) as journal:
        publish(storage, path, attempt, b"metadata", {}, step=7, roles=("main",), journal=journal)
    return storage, path, attempt


def test_stored_records_are_found_by_the_place_of_the_checkpoint(file_root):
    timeline = Timeline(uploads(1.0, 2.0))
    storage, path, attempt = commit_at(f"{file_root}/step-7")
    with pytest.raises(CheckpointNotFound, match="must hold the timing records"):
        monitor.read_timings(f"{file_root}/step-7")
    monitor.store_timings(storage, path, attempt, timeline)
    assert monitor.read_timings(f"{file_root}/step-7") == timeline
    assert monitor.read_timings(f"{file_root}/step-7#sha256={'0' * 64}") == timeline
    key = monitor.timings_key(path, attempt)
    assert monitor.read_timings(storage.uri(key)) == timeline


def test_records_of_what_is_not_committed_or_damaged_are_refused(file_root):
    with pytest.raises(CheckpointNotFound, match="must be a committed checkpoint"):
        monitor.read_timings(f"{file_root}/nothing")
    storage, path, attempt = commit_at(f"{file_root}/step-7")
    storage.put(monitor.timings_key(path, attempt), b"\x80nonsense")
    with pytest.raises(RecordError, match=r"timings.jsonl` is damaged"):
        monitor.read_timings(f"{file_root}/step-7")


TIMINGS = st.builds(
    Timing,
    rank=st.integers(0, 10**5),
    op=st.sampled_from(["save", "load"]),
    state=st.text(max_size=9),
    stage=st.sampled_from(["plan", "upload"]),
    start=st.floats(0, 2e9),
    end=st.floats(0, 2e9),
    num_bytes=st.integers(0, 2**60),
    object=st.text(max_size=9),
    retries=st.integers(0, 99),
)


@given(st.lists(TIMINGS, max_size=5))
def test_a_timeline_survives_its_bytes(records):
    assert Timeline.decode(Timeline(records).encode()) == Timeline(records)


@pytest.mark.parametrize("data", [b"", b"{", b"[]\n", b"\xff", b'{"columns":["rank"]}\n[1]\n'])
def test_bytes_that_are_no_timeline_are_refused(data):
    with pytest.raises(ValueError, match="a timeline must be JSON lines"):
        Timeline.decode(data)
