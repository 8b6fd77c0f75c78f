"""Replays: one line for each alert, who belonged to the job when, and results in time."""

import logging
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from planish.base.errors import ConfigError, RecordError
from planish.minder.detect.config import minder_config
from planish.minder.detect.denoise import Identity, Models
from planish.minder.detect.frame import Frame
from planish.minder.lab.cases import Case, Truth
from planish.minder.lab.files import read_frame, write_frame, write_samples
from planish.minder.lab.replay import Alarm, Membership, notes_of, replay
from planish.minder.lab.score import CaseOutcome, score, summary
from tests.minder_lab.simulator import simulate
from tests.minder_lab.simulator.sampling import thinned
from tests.unit.records.bombs import bomb

METRICS = ("cpu_usage", "gpu_tensor_core_activity")
MODELS = Models({name: Identity(name) for name in METRICS})
CONFIG = minder_config({"detect": {"metrics": list(METRICS)}})
START = 2_000_007


def made(machines=8, seconds=1500, seed=0):
    rng = np.random.default_rng(seed)
    wave = np.sin(np.arange(seconds)[:, None] / 4)
    noise = rng.normal(0, 1, (2, seconds, machines))
    values = {
        "cpu_usage": (30 + 5 * wave + noise[0]).astype(np.float32),
        "gpu_tensor_core_activity": (0.4 + 0.1 * wave + 0.01 * noise[1]).astype(np.float32),
    }
    names = tuple(f"node-{i:03d}" for i in range(machines))
    return Frame("job", np.arange(START, START + seconds), names, values)


def replayed(frame, **options):
    return list(replay(Case(frame, Truth()), MODELS, CONFIG, **options))


def lines(frame, **options):
    return [alert for call in replayed(frame, **options) for alert in call.alarms]


def scraped(frame, *, every=1, missing=0.0):
    return thinned(frame, np.random.default_rng(1), every=every, missing=missing)


@pytest.mark.parametrize("missing", [0.1, 0.3])
def test_a_fault_is_found_where_many_samples_are_missing(missing):
    frame = made()
    frame.values["cpu_usage"][610:, 3] -= 20
    calls = replayed(scraped(frame, missing=missing))
    (alert,) = [alert for call in calls for alert in call.alarms]
    assert alert.machine == "node-003"
    assert notes_of([call.result for call in calls]) == []


@pytest.mark.parametrize(("seconds", "every", "named"), [(230, 1, 0), (230, 20, 0), (300, 20, 1)])
@pytest.mark.parametrize("burst", [0, 20])
def test_what_a_held_sample_makes_longer_is_not_named(seconds, every, named, burst):
    frame = made()
    frame.values["cpu_usage"][610 : 610 + seconds, 3] += 20
    # A short burst before it meets just one sample, which is held until the next one.
    frame.values["cpu_usage"][570 : 570 + burst, 3] += 20
    calls = replayed(scraped(frame, every=every))
    assert len([alert for call in calls for alert in call.alarms]) == named
    notes = notes_of([call.result for call in calls])
    assert any("come every 20 s" in note for note in notes) == (every == 20)


def without(frame, machine, start=0, stop=10**6):
    for name in METRICS:
        frame.mask[name][start:stop, machine] = False
        frame.values[name][start:stop, machine] = np.nan


@pytest.mark.parametrize("every", [0, 30, 240])
def test_a_fault_gives_one_line_at_the_first_call_that_can_know(every):
    frame = made()
    frame.values["cpu_usage"][610:, 3] -= 20
    (alert,) = lines(frame, every=every)
    step = every or 60
    # Windows that reach over the onset count; the seventh second of the last one ends the run.
    expected = START + -(-(610 + 243) // step) * step
    assert alert.time == pytest.approx(expected, abs=step)
    assert (alert.machine, alert.kind, alert.metric) == ("node-003", "dissimilar", "cpu_usage")


def test_a_healthy_trace_gives_no_line_and_one_call_for_each_minute():
    calls = replayed(made(seconds=601))
    assert [call.now - START for call in calls] == [*range(60, 601, 60), 601]
    assert not any(call.alarms for call in calls)


@pytest.mark.parametrize("others_wait", [True, False])
def test_a_machine_that_nobody_replaces_is_silent_whatever_the_others_do(others_wait):
    frame = made()
    without(frame, 5, start=700)
    if others_wait:
        frame.values["gpu_tensor_core_activity"][702:] = 0.01
    (alert,) = lines(frame)
    assert (alert.machine, alert.kind) == ("node-005", "silent")
    assert START + 940 < alert.time <= START + 1020


def test_another_machine_takes_the_place_of_one_that_is_gone():
    frame = made(machines=9)
    without(frame, 8, stop=800)
    without(frame, 2, start=700)
    frame.values["gpu_tensor_core_activity"][702:790] = 0.01
    members = Membership(frame, CONFIG)
    assert members.at(START + 600) == frame.machines[:8]
    assert members.at(START + 900) == tuple(n for n in frame.machines if n != "node-002")
    assert lines(frame) == []


FAULT = Truth(("b",), "ecc_error", 1000, 1600, detectable=True)


def alert(machine, time):
    return Alarm(machine, time, "dissimilar" if machine else "job_wide", "cpu_usage")


def case(*alerts, fault=FAULT, machines=8, seconds=3600, calls=()):
    return CaseOutcome("case", fault, machines, seconds, tuple(alerts), calls)


@pytest.mark.parametrize(
    ("alerts", "first", "strict"),
    [
        ((), (0, 0, 1), (0, 0, 1)),
        ((alert("b", 1000),), (1, 0, 0), (1, 0, 0)),
        ((alert("b", 2080),), (1, 0, 0), (1, 0, 0)),
        # Too late is a miss and no false alarm.
        ((alert("b", 2081),), (0, 0, 1), (0, 0, 1)),
        # The right machine before anything has happened is a false alarm.
        ((alert("b", 999),), (0, 1, 1), (0, 1, 1)),
        ((alert("a", 1200), alert("b", 1300)), (0, 1, 1), (1, 1, 0)),
        ((alert("b", 1200), alert("a", 1300), alert("c", 1400)), (1, 0, 0), (1, 2, 0)),
        # An event of the whole job names nobody.
        ((alert("", 1200),), (0, 0, 1), (0, 0, 1)),
        ((alert("", 900),), (0, 1, 1), (0, 1, 1)),
    ],
)
def test_alerts_of_a_faulty_case_count_by_machine_and_time(alerts, first, strict):
    one = case(*alerts)
    assert (one.counts("first"), one.counts("strict")) == (first, strict)


def test_any_alert_without_a_fault_is_false():
    one = case(alert("a", 100), alert("", 200), fault=None)
    assert (one.counts("first"), one.counts("strict")) == ((0, 1, 0), (0, 2, 0))
    figures = summary([one, case(fault=None)])
    assert figures["normal_without_alert"] == 0.5
    # Two false alarms in two hours of eight machines.
    assert figures["false_alarms_per_1000_machine_hours"] == pytest.approx(2 / 16 * 1000)


def test_precision_recall_and_f1_of_a_small_table():
    found = [case(alert("b", 1300))] * 6 + [case()] * 2 + [case(alert("a", 1300))] * 2
    found += [case(fault=None)] * 9 + [case(alert("a", 5), fault=None)]
    result = score(found, "first")
    counts = (result.true_positives, result.false_positives, result.false_negatives)
    assert counts == (6, 3, 4)
    assert result.precision.value == pytest.approx(6 / 9)
    assert result.recall.value == pytest.approx(0.6)
    assert result.f1.value == pytest.approx(12 / 19)
    # Ten draws with a probability of 0.6: the interval of a share is about +- 0.3.
    assert 0.25 < result.recall.low < 0.35 < 0.85 < result.recall.high <= 0.95


def test_faults_that_cannot_be_seen_are_no_misses_but_their_false_alarms_stay():
    hidden = Truth(("b",), "others", 1000, 1600)
    found = [case(alert("b", 1300)), case(alert("a", 1300), fault=hidden), case(fault=hidden)]
    result = score(found, "first", detectable=True)
    counts = (result.true_positives, result.false_positives, result.false_negatives)
    assert counts == (1, 1, 0)


def test_nobody_named_is_precise_and_finds_nothing():
    result = score([case(), case(fault=None)], "first")
    assert (result.precision.value, result.recall.value, result.f1.value) == (1.0, 0.0, 0.0)


def test_the_summary_has_delays_costs_kinds_and_sizes():
    found = [
        case(alert("b", 1000 + 60 * i), calls=(0.1, 0.3), machines=m)
        for i, m in ((5, 4), (6, 64), (7, 64))
    ]
    figures = summary([*found, case(fault=None, machines=16)])
    assert (figures["delay_median_s"], figures["delay_p90_s"]) == (360.0, 408.0)
    assert figures["call_mean_s"] == pytest.approx(0.2)
    assert figures["calls"] == 6
    assert figures["call_max_s"] == 0.3
    assert figures["machine_hours"] == 4 + 64 + 64 + 16
    assert set(figures["by_kind"]) == {"ecc_error"}
    assert figures["by_size"]["64+"]["detectable_recall"] == 1.0
    assert figures["by_size"]["16-31"]["faults"] == 0
    assert np.isfinite(figures["first"]["f1"]["high"])


HEADER = "ts,machine,metric,value\n"


def small_frame():
    values = np.arange(30, dtype=np.float32).reshape(10, 3)
    values[4:6, 1] = np.nan
    frame = Frame("x", np.arange(500, 510), ("a", "b", "c"), {"cpu_usage": values})
    return frame


@pytest.mark.parametrize("ending", [".npz", ".csv", ".parquet"])
def test_a_frame_comes_back_as_it_was(tmp_path, ending):
    frame = small_frame()
    write_frame(tmp_path / f"job{ending}", frame)
    back = read_frame(tmp_path / f"job{ending}")
    assert (back.job, back.machines) == ("job", frame.machines)
    np.testing.assert_array_equal(back.ts, frame.ts)
    np.testing.assert_array_equal(back.values["cpu_usage"], frame.values["cpu_usage"])


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
def test_raw_samples_with_disorder_and_duplicates_give_the_aligned_frame(tmp_path, ending):
    case = simulate(4, machines=4, minutes=3, keep_samples=True)
    write_samples(tmp_path / f"raw{ending}", case.samples)
    back = read_frame(tmp_path / f"raw{ending}")
    inside = back.slice(int(case.frame.ts[0]), int(case.frame.ts[-1]) + 1)
    whole = case.frame.slice(int(inside.ts[0]), int(inside.ts[-1]) + 1)
    for name, values in whole.values.items():
        np.testing.assert_allclose(inside.values[name], values, rtol=1e-6)


def test_odd_times_a_machine_that_joins_and_an_unknown_metric_are_read(tmp_path, caplog):
    rows = [f"{1000.4 + t},{m},cpu_usage,{t}" for t in range(5) for m in ("b", "a")]
    rows += [f"{1003.4 + t},late,cpu_usage,7" for t in range(2)]
    rows += ["1001,a,cpu_usge,3"]
    (tmp_path / "t.csv").write_text(HEADER + "\n".join(reversed(rows)) + "\n")
    with caplog.at_level(logging.WARNING):
        frame = read_frame(tmp_path / "t.csv")
    assert "did you mean `cpu_usage`" in caplog.text
    assert frame.machines == ("a", "b", "late")
    assert list(frame.ts) == [1000, 1001, 1002, 1003, 1004]
    assert list(frame.mask["cpu_usage"][:, 2]) == [False, False, False, True, True]
    np.testing.assert_array_equal(frame.values["cpu_usage"][:, 0], range(5))


def test_timestamps_of_parquet_may_be_dates(tmp_path):
    table = pa.table(
        {
            "ts": pa.array([5_000_000, 6_000_000], pa.timestamp("us")),
            "machine": ["a", "a"],
            "metric": ["cpu_usage"] * 2,
            "value": [1, 2],
        }
    )
    parquet.write_table(table, tmp_path / "t.parquet")
    assert list(read_frame(tmp_path / "t.parquet").ts) == [5, 6]


def csv_lines(start, step):
    return "".join(f"{start + step * i},a,cpu_usage,{i}\n" for i in range(900))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "columns"),
        ("t.csv", HEADER + "x,a,cpu_usage,1\n", "as numbers"),
        ("t.csv", HEADER + "1,a,nothing,1\n", "known metrics"),
        ("t.csv", HEADER, "known metrics"),
        ("t.csv", HEADER + "1,a,cpu_usage,1\n9e11,a,cpu_usage,1\n", "one trace"),
        ("t.csv", HEADER + csv_lines(1_700_000_000_000, 1000), "unix seconds, got 1700000000000"),
        ("t.csv", HEADER + csv_lines(0, 1000), "at most 60 s apart, got 1,000"),
        ("t.parquet", "nonsense", "must be a Parquet file"),
        ("t.npz", "nonsense", "npz"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(RecordError, match=message):
        read_frame(tmp_path / name)


@pytest.mark.slow
def test_small_files_that_decode_to_much_are_refused(tmp_path):
    (tmp_path / "t.parquet").write_bytes(bomb("text"))
    with pytest.raises(RecordError, match="must decode to at most 536870912"):
        read_frame(tmp_path / "t.parquet")
    with zipfile.ZipFile(tmp_path / "t.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(10):
            archive.writestr(f"{number}.npy", bytes(64 << 20), compresslevel=1)
    with pytest.raises(RecordError, match="must decode to at most 536870912"):
        read_frame(tmp_path / "t.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    (tmp_path / "array.npy").rename(tmp_path / "array.npz")
    with pytest.raises(RecordError, match="npz"):
        read_frame(tmp_path / "array.npz")


def test_other_endings_missing_files_and_wrong_shapes_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="ends in"):
        write_frame(tmp_path / "t.json", small_frame())
    with pytest.raises(ConfigError, match="no file"):
        read_frame(tmp_path / "t.csv")
    np.savez(tmp_path / "t.npz", ts=np.arange(3), machines=["a"], cpu_usage=np.zeros((2, 1)))
    with pytest.raises(RecordError, match="shape"):
        read_frame(tmp_path / "t.npz")
    np.savez(tmp_path / "p.npz", ts=np.array([object()]))
    with pytest.raises(RecordError, match="plain arrays"):
        read_frame(tmp_path / "p.npz")
