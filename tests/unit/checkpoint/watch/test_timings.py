"""Timing records survive their bytes, add up per stage, and refuse what is none."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planish.checkpoint.watch.monitor import CheckpointInfo, Recorder, Timeline, Timing

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


def test_a_column_of_a_newer_version_is_skipped():
    data = Timeline([Timing(0, "save", "", "plan", 1.0, 2.0)]).encode()
    newer = data.replace(b'"host"]', b'"host", "later"]').replace(b'""]', b'"", 7]')
    assert Timeline.decode(newer).records[0].seconds == 1.0


def test_stages_add_up_by_rank_and_state():
    line = Timeline(
        [
            Timing(0, "save", "main.model", "upload", 0.0, 2.0),
            Timing(0, "save", "main.model", "upload", 2.0, 3.0),
            Timing(1, "save", "main.optim", "upload", 1.0, 5.0),
        ]
    )
    assert line.seconds("upload") == 7.0
    assert line.seconds("upload", rank=1) == 4.0
    assert line.end_to_end() == {0: 3.0, 1: 4.0}
    assert line.wall_seconds == 5.0
    assert Timeline().wall_seconds == 0.0


def test_a_stage_that_raises_is_recorded_too():
    recorder = Recorder(3, "save", "a")
    with pytest.raises(ZeroDivisionError), recorder.stage("upload", "main.model", 5):
        _ = 1 / 0
    (record,) = recorder.timeline().records
    assert (record.rank, record.stage, record.num_bytes, record.host) == (3, "upload", 5, "a")
    assert record.end >= record.start


def test_many_threads_may_record():
    recorder = Recorder(0, "load")

    def work():
        for _ in range(100):
            with recorder.stage("read"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recorder.timeline().records) == 400


def test_a_pin_is_place_and_digest():
    assert CheckpointInfo("s3://b/x", 1, "A", "f" * 64, 0).pin == "s3://b/x#sha256=" + "f" * 64
