"""The monitor stage names a faulty machine, and never fails a run because it can not look."""

import json

import numpy as np
import pytest

from planish import store
from planish.minder.detect.frame import Frame
from planish.minder.detect.result import Result
from planish.minder.lab.files import write_frame
from planish.records import layout
from planish.run.avoid import avoided
from planish.run.stage import PathArtifact
from planish.stages.monitor_check.stage import run
from tests.unit.tiny_run import make_run

NAMES = tuple(f"node-{i}" for i in range(8))
ADDRESSES = tuple(f"10.0.0.{i}:9100" for i in range(8))
SETTINGS = """
[detect]
metrics = ["cpu_usage"]

[denoise]
denoiser = "none"
"""


@pytest.fixture
def recorded(tmp_path):
    """Return what writes a trace in which one machine is faulty from a second on."""

    def record(faulty_from=10**6, names=NAMES):
        rng = np.random.default_rng(0)
        wave = 5 * np.sin(np.arange(1500)[:, None] / 4)
        values = (30 + wave + rng.normal(0, 1, (1500, 8))).astype(np.float32)
        values[faulty_from:, 3] -= 20
        frame = Frame("pretrain", np.arange(1000, 2500), names, {"cpu_usage": values})
        write_frame(tmp_path / "trace.npz", frame)
        (tmp_path / "minder.toml").write_text(SETTINGS)
        return f"file://{tmp_path}/trace.npz"

    return record


def check(root, tmp_path, *, trace="", settings="minder.toml", **changes):
    result, metrics = (PathArtifact(str(tmp_path / "out" / n)) for n in ("result", "metrics"))
    given = {
        "number": 1,
        "offset": 2,
        "settings": f"file://{tmp_path}/{settings}" if settings else "",
        "trace": trace,
        "job": "",
        "watch_seconds": 0,
        **changes,
    }
    found = run(root=root, config_sha256=make_run(root), **given, result=result, metrics=metrics)
    texts = [(tmp_path / "out" / name).read_text() for name in ("result", "metrics")]
    return found.faulty_machine, *(json.loads(text) for text in texts)


def test_a_faulty_machine_of_a_recording_is_named(file_root, tmp_path, recorded):
    machine, result, metrics = check(file_root, tmp_path, trace=recorded(800))
    assert machine == "node-3"
    assert result["status"] == "fault"
    assert result["job"] == "trace"
    assert [finding["machine"] for finding in result["findings"]] == ["node-3"]
    assert abs(result["findings"][0]["run_start"] - 1800) <= 8
    assert set(result) == set(Result.__dataclass_fields__)
    assert metrics == {
        "num_calls": 1.0,
        "num_failed_calls": 0.0,
        "num_findings": 1.0,
        "num_machines": 8.0,
    }
    (path,) = (tmp_path / "root").rglob("*monitor_check*.json")
    log = json.loads(path.read_text())
    assert (log["state"], log["iteration"]) == ("done", 3)


def test_a_faulty_machine_is_written_down_for_the_runs_that_follow(
    file_root, tmp_path, recorded, monkeypatch
):
    monkeypatch.setenv("RUN_ID", "run-a")
    trace = recorded(800)
    for _ in range(2):
        check(file_root, tmp_path, trace=trace)
    (node,) = avoided(file_root)
    assert (node.name, node.named_by) == ("node-3", "monitor_check")
    assert (node.run_id, node.iteration) == ("run-a", 3)


def test_a_machine_that_is_no_node_is_named_but_not_written_down(file_root, tmp_path, recorded):
    machine, _, _ = check(file_root, tmp_path, trace=recorded(800, ADDRESSES))
    assert machine == "10.0.0.3:9100"
    assert avoided(file_root) == []


def test_a_healthy_recording_names_nobody(file_root, tmp_path, recorded):
    machine, result, _ = check(file_root, tmp_path, trace=recorded(), job="mine")
    assert (machine, result["status"], result["job"]) == ("", "ok", "mine")
    assert avoided(file_root) == []


def test_a_stopped_iteration_is_not_looked_at(file_root, tmp_path):
    store.create(layout.stopped_file(file_root, 3), b"{}")
    machine, result, _ = check(file_root, tmp_path, settings="")
    assert (machine, result["status"]) == ("", "skipped")


def test_a_prometheus_that_is_away_does_not_fail_the_run(
    file_root, tmp_path, recorded, closed_port
):
    recorded()
    where = f'\n[prometheus]\nurl = "http://127.0.0.1:{closed_port}"\n'
    jobs = '\n[[jobs]]\nname = "pretrain"\nmachines = ["a", "b", "c", "d"]\n'
    (tmp_path / "minder.toml").write_text(where + jobs + SETTINGS)
    machine, result, metrics = check(file_root, tmp_path)
    assert (machine, result["status"]) == ("", "skipped")
    assert (metrics["num_calls"], metrics["num_failed_calls"]) == (1.0, 1.0)


def test_wrong_settings_end_the_task_for_good(file_root, tmp_path, recorded):
    recorded()
    (tmp_path / "minder.toml").write_text("[detekt]\nx = 1\n")
    with pytest.raises(SystemExit) as error:
        check(file_root, tmp_path)
    assert error.value.code == 2
