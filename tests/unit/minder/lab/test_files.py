"""Traces in files: what is written comes back, and what can not be read is told."""

import logging
import zipfile

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from planish.base.errors import ConfigError, RecordError
from planish.minder.detect.frame import Frame
from planish.minder.lab.files import read_frame, write_frame, write_samples
from tests.minder_lab.simulator import simulate
from tests.unit.records.bombs import bomb

HEADER = "ts,machine,metric,value\n"


def made():
    values = np.arange(30, dtype=np.float32).reshape(10, 3)
    values[4:6, 1] = np.nan
    frame = Frame("x", np.arange(500, 510), ("a", "b", "c"), {"cpu_usage": values})
    return frame


@pytest.mark.parametrize("ending", [".npz", ".csv", ".parquet"])
def test_a_frame_comes_back_as_it_was(tmp_path, ending):
    frame = made()
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


def lines(start, step):
    return "".join(f"{start + step * i},a,cpu_usage,{i}\n" for i in range(900))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.csv", "a,b\n1,2\n", "columns"),
        ("t.csv", HEADER + "x,a,cpu_usage,1\n", "as numbers"),
        ("t.csv", HEADER + "1,a,nothing,1\n", "known metrics"),
        ("t.csv", HEADER, "known metrics"),
        ("t.csv", HEADER + "1,a,cpu_usage,1\n9e11,a,cpu_usage,1\n", "one trace"),
        ("t.csv", HEADER + lines(1_700_000_000_000, 1000), "unix seconds, got 1700000000000"),
        ("t.csv", HEADER + lines(0, 1000), "at most 60 s apart, got 1,000"),
        ("t.parquet", "nonsense", "readable table"),
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
        write_frame(tmp_path / "t.json", made())
    with pytest.raises(ConfigError, match="no file"):
        read_frame(tmp_path / "t.csv")
    np.savez(tmp_path / "t.npz", ts=np.arange(3), machines=["a"], cpu_usage=np.zeros((2, 1)))
    with pytest.raises(RecordError, match="shape"):
        read_frame(tmp_path / "t.npz")
    np.savez(tmp_path / "p.npz", ts=np.array([object()]))
    with pytest.raises(RecordError, match="plain arrays"):
        read_frame(tmp_path / "p.npz")
