"""The curves that `planish track` writes are the records of the run, once."""

import argparse
import math
import os
import signal
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from planish.__main__ import main
from planish.base.errors import EXIT_TRANSIENT, BackendUnavailable, exit_code
from planish.records import EvalReport, UpdateReport, layout
from planish.records.reports import write_report
from planish.show import trackers
from planish.show.track import Follower, RunReader, track
from planish.show.trackers import Point, Tracker
from planish.store.documents import write_json
from tests.integration.waiting import wait_for
from tests.processes import python

UPDATES = {
    1: ({"loss": 0.5, "entropy": 1.25}, [{"grad_norm": 1.0}, {"grad_norm": 2.0}]),
    2: ({"loss": 0.25, "entropy": math.nan}, [{"grad_norm": 3.0}, {"grad_norm": math.inf}]),
}


def log(root: str, stage: str, iteration: int, *, start: float, state="done", shard=0, **metrics):
    """Write the log entry of a task."""
    entry = {"stage": stage, "iteration": iteration, "shard": shard, "state": state}
    entry |= {"start_seconds": start, "seconds": 2.0, "metrics": metrics, "already_done": False}
    write_json(layout.stage_log(root, stage, iteration, shard), entry)


def write_iteration(root: str, number: int) -> None:
    """Write what the stages of an iteration leave."""
    scalars, steps = UPDATES[number]
    for shard in (0, 1):
        log(root, "rollout", number, start=10.0 * number, shard=shard, accuracy_mean=0.1 * shard)
    attributes = {"iteration": number, "step": 2 * number}
    write_report(layout.update(root, number), UpdateReport(scalars, steps, attributes))
    finite = {name: value for name, value in scalars.items() if math.isfinite(value)}
    log(root, "train", number, start=10.0 * number + 3, update_seconds=1.5, **finite)


@pytest.fixture
def root(tmp_path) -> str:
    made = (tmp_path / "run").as_uri()
    write_json(layout.run_file(made), {"config": {"train": {"learning_rate": 0.001}}})
    log(made, "sft", 0, start=1.0, accuracy=0.3)
    write_iteration(made, 1)
    return made


def evaluate(root: str, version: int) -> None:
    """Write an evaluation of a policy."""
    report = EvalReport({"cons@8": 0.5}, {"sums, hard": {"accuracy": 0.75}}, {})
    write_report(f"{layout.evaluation(root, version)}/report.json", report)
    log(root, "evaluate", 0, start=90.0, accuracy_after=0.75)


EXPECTED = {
    "sft/accuracy": [(0, 0.3)],
    "rollout_00/accuracy_mean": [(1, 0.0), (2, 0.0)],
    "rollout_01/accuracy_mean": [(1, 0.1), (2, 0.1)],
    "train/loss": [(1, 0.5), (2, 0.25)],
    "train/entropy": [(1, 1.25), (2, math.nan)],
    "train/update_seconds": [(1, 1.5), (2, 1.5)],
    "train_step/grad_norm": [(1, 1.0), (2, 2.0), (3, 3.0), (4, math.inf)],
    "evaluate/cons_at_8": [(2, 0.5)],
    "evaluate/sums_ hard/accuracy": [(2, 0.75)],
}


def curves(points) -> dict[str, list[tuple[int, float]]]:
    """Return the values of each name by step."""
    found = defaultdict(list)
    for point in points:
        found[point.name].append((point.step, point.value))
    return {name: sorted(values) for name, values in found.items()}


def same(one: dict, other: dict) -> bool:
    return str({n: one[n] for n in sorted(one)}) == str({n: other[n] for n in sorted(other)})


class Memory(Tracker):
    """Keeps what it is given; fails when told to."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.opened: list[tuple[str, dict]] = []
        self.is_down = False
        self.ended: list[tuple[bool, bool]] = []

    def open(self, run_id, config):
        self.opened.append((run_id, dict(config)))
        self.run_id = run_id or "the run"

    def write(self, points, batch):
        if self.is_down:
            raise ConnectionError("no route")
        self.points.extend(points)

    def close(self, *, has_ended, has_failed):
        self.ended.append((has_ended, has_failed))


def test_every_value_of_every_record_is_written_once(root):
    memory = Memory()
    follower = Follower(RunReader(root), "memory", memory)
    assert follower.advance() == 8
    assert follower.advance() == 0
    write_iteration(root, 2)
    evaluate(root, 2)
    assert follower.advance() == 9
    assert same(curves(memory.points), EXPECTED)
    assert memory.opened == [("", {"train.learning_rate": 0.001})]
    later = Follower(RunReader(root), "memory", memory)
    assert later.advance() == 0
    # What another release has left there is no record.
    for number, entry in enumerate(({}, {"state": "done"}, {"stage": "train", "state": "failed"})):
        write_json(layout.stage_log(root, "reward", 90 + number, 0), entry)
    assert later.advance() == 0
    other = Memory()
    assert Follower(RunReader(root), "another", other).advance() == 17
    assert same(curves(other.points), EXPECTED)


def test_each_evaluation_has_the_time_of_the_task_that_made_it(root):
    for version in (0, 1, 2):
        report = EvalReport({"accuracy": 0.25 * version}, {}, {})
        write_report(f"{layout.evaluation(root, version)}/report.json", report)
    for iteration in (1, 2):
        log(root, "evaluate", iteration, start=10.0 * iteration, policy_version=iteration - 1.0)
    log(root, "evaluate", 0, start=90.0, accuracy_after=0.5)
    memory = Memory()
    Follower(RunReader(root), "memory", memory).advance()
    points = [point for point in memory.points if point.name == "evaluate/accuracy"]
    assert points == [
        Point("evaluate/accuracy", 0, 0.0, 12.0),
        Point("evaluate/accuracy", 1, 0.25, 22.0),
        Point("evaluate/accuracy", 2, 0.5, 92.0),
    ]


def test_a_tracker_that_was_down_gets_everything_later(root):
    memory = Memory()
    memory.is_down = True
    follower = Follower(RunReader(root), "memory", memory)
    with pytest.raises(ConnectionError):
        follower.advance()
    write_iteration(root, 2)
    memory.is_down = False
    assert follower.advance() == 15
    # A later follower goes on with the run that this one has begun.
    write_report(
        layout.update(root, 3), UpdateReport({"loss": 1.0}, [], {"iteration": 3, "step": 9})
    )
    log(root, "train", 3, start=50.0)
    assert Follower(RunReader(root), "memory", memory).advance() == 1
    assert [run for run, _ in memory.opened] == ["", "the run"]


def test_a_task_that_is_tried_again_is_written_again(root):
    reader, memory = RunReader(root), Memory()
    follower = Follower(reader, "memory", memory)
    log(root, "reward", 1, start=20.0, state="running")
    follower.advance()
    log(root, "reward", 1, start=20.0, state="failed", reward_mean=0.0)
    assert follower.advance() == 1
    follower.close()
    log(root, "reward", 1, start=30.0, reward_mean=0.5)
    log(root, "report", 0, start=40.0, num_tokens=1.0)
    assert follower.advance() == 1
    follower.close()
    assert curves(memory.points)["reward/reward_mean"] == [(1, 0.0), (1, 0.5)]
    assert memory.ended == [(False, True), (True, False)]


def test_a_damaged_record_is_left_out_and_told(root, caplog):
    write_iteration(root, 2)
    path = Path(layout.update(root, 2).removeprefix("file://"))
    path.write_text(path.read_text().replace('"loss"', '"loss'))
    memory = Memory()
    assert Follower(RunReader(root), "memory", memory).advance() == 10
    assert "update.json" in caplog.text
    assert curves(memory.points)["train/loss"] == [(1, 0.5)]


def test_event_files_hold_the_curves_and_a_second_try_replaces_a_batch(root):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_iteration(root, 2)
    options = {"experiment": "", "name": ""}
    tracker = trackers.open_tracker("tensorboard", root, **options)
    tracker.write([Point("train/loss", 7, 9.0, 1.0)], 0)  # by a follower that was killed then
    assert main(["track", root, "--to", "tensorboard"]) == 0
    evaluate(root, 2)
    assert main(["track", root, "--to", "tensorboard"]) == 0
    folder = Path(f"{layout.trackers(root)}/tensorboard".removeprefix("file://"))
    assert len(list(folder.iterdir())) == 2
    read = EventAccumulator(str(folder))
    read.Reload()
    found = {
        name: [(event.step, event.value) for event in read.Scalars(name)]
        for name in read.Tags()["scalars"]
    }
    assert found.keys() == EXPECTED.keys()
    for name, values in found.items():
        steps, numbers = zip(*sorted(values), strict=True)
        wanted_steps, wanted = zip(*EXPECTED[name], strict=True)
        assert steps == wanted_steps
        assert numbers == pytest.approx(wanted, rel=1e-6, nan_ok=True)
    times = {event.wall_time for event in read.Scalars("train/loss")}
    assert times == {15.0, 25.0}


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("tensorbord", "must be tensorboard"),
        ("", "must be tensorboard"),
        ("mlflow", "needs the URI of its server"),
        ("tensorboard=gs://b/x", "a store URI must begin with one of"),
    ],
)
def test_a_target_that_cannot_be_is_refused(root, target, words, capsys, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["track", root, "--to", target]) == 2
    assert words in capsys.readouterr().err


def test_the_extra_of_a_package_that_is_missing_is_named(root, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["track", root, "--to", "wandb"]) == 2
    assert capsys.readouterr().err.endswith(": pip install 'planish[trackers]'\n")


def test_a_root_without_a_run_is_refused(tmp_path, capsys):
    assert main(["track", str(tmp_path), "--to", "tensorboard"]) == 1
    assert "run.json" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_one_tracker_that_fails_keeps_nothing_from_the_other(root, monkeypatch):
    memory, broken = Memory(), Memory()
    broken.is_down = True
    made = {"a=secret": broken, "b": memory}
    monkeypatch.setattr("planish.show.track.open_tracker", lambda target, *_, **__: made[target])
    options = argparse.Namespace(
        root=root, to=list(made), follow=False, every=1.0, experiment="", name=""
    )
    told = "got a: ConnectionError: no route; the same command"
    with pytest.raises(BackendUnavailable, match=told) as raised:
        track(options)
    assert exit_code(raised.value) == EXIT_TRANSIENT
    assert len(memory.points) == 8


@pytest.mark.slow
def test_the_password_of_a_server_that_is_down_is_printed_nowhere(
    root, monkeypatch, capsys, closed_port
):
    pytest.importorskip("mlflow", reason="needs the extra trackers")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    target = f"mlflow=http://me:geheim@127.0.0.1:{closed_port}"
    assert main(["track", root, "--to", target]) == EXIT_TRANSIENT
    told = "".join(capsys.readouterr())
    assert "http://***@127.0.0.1" in told
    assert "geheim" not in told
    assert main(["track", root, "--to", f"ml{target}"]) == 2
    assert "geheim" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_follower_ends_with_everything_at_a_signal(root):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = [sys.executable, "-m", "planish", "track", root, "--to", "tensorboard", "--follow"]
    process = subprocess.Popen([*command, "--every", "0.1"], stdout=subprocess.PIPE, text=True)
    folder = Path(f"{layout.trackers(root)}/tensorboard".removeprefix("file://"))
    wait_for(lambda: folder.exists() or process.poll() is not None, 120.0)
    write_iteration(root, 2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert (process.returncode, output) == (0, "15 values written to tensorboard\n")
    read = EventAccumulator(str(folder))
    read.Reload()
    assert [event.step for event in read.Scalars("train_step/grad_norm")] == [1, 2, 3, 4]


def records_of(data: bytes) -> list[bytes]:
    """Return the records of a file of Weights & Biases, a log in the form of LevelDB."""
    records, at = [b""], 7  # after what names the format
    while at + 7 <= len(data):
        left = -at % 32768 or 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        records[-1] += data[at + 7 : at + 7 + size]
        if kind in (1, 4):  # whole, or the last part
            records.append(b"")
        at += 7 + size
    return records[:-1]


@pytest.mark.slow
def test_an_offline_run_of_weights_and_biases_holds_the_curves(root, tmp_path):
    from wandb.proto import wandb_internal_pb2

    write_iteration(root, 2)
    evaluate(root, 2)
    environment = {**os.environ, "WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path)}
    done = python("-m", "planish", "track", root, "--to", "wandb=planishing", env=environment)
    assert done.stdout.splitlines()[-1] == "17 values written to wandb"
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found = defaultdict(list)
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
        for name, value in row.items():
            if name in EXPECTED:
                step = int(row[f"{name.rpartition('/')[0]}/step"])
                found[name].append((step, float(value.replace('"', ""))))
    assert found.keys() == EXPECTED.keys()
    assert same({name: sorted(values) for name, values in found.items()}, EXPECTED)
