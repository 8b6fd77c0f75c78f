"""Timing records: bytes, sums, metrics, stragglers, where they are stored, and their report."""

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
from planish.checkpoint.watch.report import SHADES, text_report
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


def node_uploads(*seconds, per_host=8, name="node"):
    return [
        Timing(rank, "save", "main.model", "upload", 100.0, 100.0 + s, 1 << 20, "data/x", 0, host)
        for rank, s in enumerate(seconds)
        for host in [f"{name}-{rank // per_host:03d}"]
    ]


def lines_of(records, **options):
    return text_report(Timeline(records), title="mem://a/step-1", **options).splitlines()


def rows_of(records):
    """Return machine -> the shade of each of its ranks, 0 to 6."""
    lines = lines_of(records)
    first = next(n for n, line in enumerate(lines) if line.startswith("time of each")) + 1
    found, name = {}, ""
    for line in lines[first : lines.index("", first)]:
        name = line[2:].split("  ")[0] or name
        found.setdefault(name, []).extend(SHADES.index(c) for c in line if c in SHADES)
    return found


WITHOUT_HOSTS = [Timing(rank, "save", "", "plan", 1.0, 2.0) for rank in range(10)]


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        (
            node_uploads(*[1.0] * 5, per_host=2),
            {"node-000": [0, 0], "node-001": [0, 0], "node-002": [0]},
        ),
        (WITHOUT_HOSTS, {"ranks 0 to 7": [0] * 8, "ranks 8 to 15": [0, 0]}),
        # As in the paper: ranks 0, 4, 8, 12 also write the state of data loaders.
        (
            node_uploads(*[1.6 if rank % 4 == 0 else 1.0 for rank in range(16)]),
            {"node-000": [6, 0, 0, 0, 6, 0, 0, 0], "node-001": [6, 0, 0, 0, 6, 0, 0, 0]},
        ),
        # Noise gets no deep shade, and a straggler does not hide differences.
        (node_uploads(1.0, 1.05, 1.02, 1.01), {"node-000": [0, 0, 0, 0]}),
        (node_uploads(1.0, 1.0, 1.0, 1.6, 60.0), {"node-000": [0, 0, 0, 6, 6]}),
    ],
)
def test_rows_of_the_heat_map_are_machines_and_blocks_their_ranks(records, expected):
    assert rows_of(records) == expected


def test_beyond_64_ranks_only_stragglers_have_a_number():
    lines = lines_of(node_uploads(*[1.0] * 65, 9.0, per_host=66))
    assert f"  node-000  {SHADES[0] * 65}{SHADES[-1]}  !65" in lines


def test_the_timeline_of_a_rank_joins_the_objects_of_a_stage():
    records = [
        Timing(1, "save", "", "plan", 10.0, 10.5),
        Timing(0, "save", "", "plan", 9.0, 9.5),
        Timing(1, "save", "a", "upload", 11.0, 13.0, 100, retries=2),
        Timing(1, "save", "a", "upload", 12.0, 14.0, 300),
        Timing(1, "save", "a", "upload", 15.0, 16.0, 200),
    ]
    heading, plan, upload = lines_of(records, rank=1)[-3:]
    assert heading == "timeline of rank 1, 0 to 7.00 s"
    bar = plan.split("|")[1]
    assert (bar.index("\u2588"), bar.rindex("\u2588")) == (int(44 / 7), int(44 * 1.5 / 7))
    assert plan.startswith("  all plan")
    assert plan.endswith("| 0.50 s")
    bar = upload.split("|")[1]
    assert (bar.index("\u2588"), len(bar)) == (int(44 * 2 / 7), 44)
    assert bar.endswith("\u2588")
    # Two objects overlap for one second, which counts once.
    assert upload.endswith("| 4.00 s  600 B  150 B/s  2 retries")


def test_the_text_shows_a_block_for_each_rank_and_the_timeline_of_the_slowest():
    lines = lines_of(node_uploads(1.0, 1.0, 1.0, 9.0, per_host=2))
    assert lines[0].startswith("save of mem://a/step-1: 4 ranks on 2 machines, 9.00 s")
    assert lines[1] == (
        "! straggler: rank 3 on node-001 took 9.0 s (median 1.0 s), "
        "most of it beyond the others in upload"
    )
    (row,) = [line for line in lines if line.startswith("  node-001")]
    assert row == f"  node-001  {SHADES[0]}{SHADES[-1]}  1.00 s 9.00 s!"
    scale = f"{SHADES[0]} 1.00 s .. {SHADES[-1]} 1.50 s   ! straggler, beyond the scale"
    assert scale in "".join(lines)
    assert "timeline of rank 3, 0 to 9.00 s" in lines
    assert lines[-1].endswith("| 9.00 s  1.0 MiB  113.8 KiB/s")


def test_reports_of_no_records_and_of_an_absent_rank_say_so():
    assert text_report(Timeline(), title="x") == "save of x: no records\n"
    assert "rank 9 has no records" in text_report(Timeline(node_uploads(1.0)), title="x", rank=9)


def test_names_in_records_are_text_and_nothing_else():
    hostile = '<script>alert(1)</script>"\u202e\x1b[31m'
    record = Timing(0, "save", hostile, hostile, 1.0, 2.0, 5, hostile, 0, hostile)
    text = text_report(Timeline([record]), title=hostile)
    assert not set(text) & set("\x1b\u202e")


@pytest.mark.parametrize("seconds", [0.0, 1e-6, 86400.0])
def test_a_record_of_any_length_has_a_bar(seconds):
    assert "\u2588" in lines_of(node_uploads(seconds))[-1]
