import argparse
import dataclasses
import json
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from planish.__main__ import main, parser
from planish.engines import ENGINES
from planish.records import layout
from planish.stages.report.facts import TaskLog
from planish.store.documents import write_json
from planish.submit.local.progress import (
    progress_line,
    read_tasks,
    seconds_by_stage,
    work_seconds,
)
from planish.submit.local.run import default_root, finish, pipelines_folder, tiny_preset

REPOSITORY = Path(__file__).resolve().parents[4]
REWARD = TaskLog("reward", 2, 0, "done", 10.0, 1.5, metrics={"reward_mean": -0.2})


def test_a_progress_line_tells_a_failure_a_task_done_before_and_a_shard() -> None:
    failed = dataclasses.replace(REWARD, state="failed", error="no rows")
    assert progress_line(failed, 9).endswith("FAILED: no rows")
    done = dataclasses.replace(REWARD, already_done=True)
    assert progress_line(done, 9).endswith("already done")
    shard = dataclasses.replace(REWARD, stage="rollout", shard=1, metrics={"accuracy_mean": 0.5})
    assert "rollout 2 " in progress_line(shard, 9)
    assert "accuracy 0.500" in progress_line(shard, 9)


def test_parallel_shards_count_once() -> None:
    def shard(index: int, start: float, seconds: float, sampled: float) -> TaskLog:
        metrics = {"sample_seconds": sampled}
        return TaskLog("rollout", 1, index, "done", start, seconds, metrics=metrics)

    tasks = [shard(0, 0.0, 4.0, 2.0), shard(1, 1.0, 5.0, 3.0)]
    trained = TaskLog("train", 1, 0, "done", 6.0, 9.0, metrics={"update_seconds": 4.0})
    assert seconds_by_stage([*tasks, trained]) == {"rollout": 6.0, "train": 9.0}
    assert work_seconds([*tasks, trained]) == 7.0


def test_only_ended_attempts_of_this_run_are_read(tmp_path: Path) -> None:
    root = tmp_path.as_uri()

    def log(stage: str, state: str, start: float) -> None:
        entry = {"stage": stage, "iteration": 1, "shard": 0, "state": state}
        entry |= {"start_seconds": start, "seconds": 1.0, "metrics": {"a": 1.0}}
        write_json(layout.stage_log(root, stage, 1, 0), entry)

    log("reward", "done", 100.0)
    log("train", "running", 101.0)
    log("curate", "done", 50.0)
    (tmp_path / "logs" / "00001-checkpoint-00.json").write_text('{"half')
    found = read_tasks(root, since=99.0)
    assert [(task.stage, task.metrics) for task in found] == [("reward", {"a": 1.0})]


def test_the_last_line_tells_accuracies_and_the_largest_divergence_of_the_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, names = tmp_path.as_uri(), ("accuracy_before", "accuracy_after", "greedy_before")
    summary = dict.fromkeys((*names, "greedy_after"), 0.5)
    summary |= {"iterations": 3, "mismatch_k3_max": 4e-9, "last_policy": "pin"}
    summary["control"] = {"accuracy": 0.25}
    write_json(f"{layout.report(root)}/summary.json", summary)
    arguments = parser().parse_args(["run", "--root", root, "--no-control"])
    assert finish(arguments, [REWARD], time.monotonic(), tmp_path / "log", Console()) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["mismatch_k3_max"] == 4e-9
    assert (last["iterations"], last["accuracy_after"]) == (3, 0.5)
    assert (last["root"], last["policy"]) == (root, "pin")
    # No task worked here: an earlier call has measured it.
    assert last["control"] == {"accuracy": 0.25}


def test_an_algorithm_alone_means_its_tiny_preset() -> None:
    assert [tiny_preset(name) for name in ("grpo", "dapo-tiny", "dapo-paper", "typo")] == [
        "grpo-tiny",
        "dapo-tiny",
        "dapo-paper",
        "typo",
    ]


def test_no_text_is_taken_for_markup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "FAILED: `owner/name[/file][@revision]` or :smile: [red]"

    def show_run(_: object, console: Console) -> int:
        console.print(text, style="bold red", highlight=False)
        return 0

    monkeypatch.setattr("planish.submit.local.run.show_run", show_run)
    assert main(["run"]) == 0
    assert capsys.readouterr().out == f"{text}\n"
    monkeypatch.setattr("planish.show.track.track", lambda _: text)
    assert main(["track", "root", "--to", "tensorboard"]) == 0
    assert capsys.readouterr().out == f"{text}\n"


@pytest.mark.parametrize("name", ["vllmm", "", "vllm disagg"])
def test_an_engine_that_is_none_is_refused_before_anything_is_set_up(name: str) -> None:
    command = ["make", "--no-print-directory", "--dry-run", "demo", f"ENGINE={name}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"ENGINE must be one of {' '.join(sorted(ENGINES))}, got {name}" in done.stderr


def test_rows_of_a_data_set_are_told_with_what_each_filter_dropped() -> None:
    metrics = {"num_train": 60.0, "num_evaluation": 10.0, "in_rows_of_the_data_set": 100.0}
    metrics |= {"in_duplicates": 99.0, "dropped_duplicates": 9.0}
    metrics |= {"in_contamination": 80.0, "dropped_contamination": 20.0}
    task = dataclasses.replace(REWARD, stage="curate", iteration=0, metrics=metrics)
    assert progress_line(task, 9).endswith(
        "prompts 60  held out 10  of 100 rows  dropped by duplicates 9  "
        "dropped by contamination 20 (25%, see the curation report)"
    )


def test_each_choice_has_a_folder_of_its_own() -> None:
    options = dict.fromkeys(("config", "overrides", "model", "dataset", "dataset_map"), "")
    options["iterations"] = None
    base = argparse.Namespace(**options, shards=None, preset="dapo-tiny", seed=3)
    other = argparse.Namespace(**vars(base) | {"dataset": "x.jsonl"})
    assert "/runs/dapo-tiny-seed3-" in default_root(base)
    assert default_root(base) != default_root(other)


@pytest.mark.parametrize(
    ("root", "words"),
    [
        ("ftp://host/x", "a store URI must begin with one of"),
        ("file:///tmp/../x", "no empty, `.` or `..` segment"),
        ("s3://", "must name a bucket"),
    ],
)
def test_a_root_that_cannot_be_is_one_line_and_code_two(
    root: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--root", root]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert words in errors


def test_settings_of_all_options_are_one_text_in_the_order_of_the_command_line() -> None:
    words = ["run", "--engine", "vllm", "-o", "a.b=x y", "--overrides", "a.c=1 a.d=2"]
    asked = parser().parse_args([*words, "--trainer", "megatron"])
    told = "engine.name=vllm 'a.b=x y' a.c=1 a.d=2 train.trainer=megatron"
    assert " ".join(asked.overrides) == told


def test_without_the_extra_the_command_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("planish.submit.local.run.find_spec", lambda _: None)
    assert main(["run"]) == 2
    line = "planish: the extra `demo` must be installed: pip install 'planish[demo]'\n"
    assert capsys.readouterr() == ("", line)


def test_in_a_checkout_the_pipelines_are_those_of_its_root() -> None:
    assert pipelines_folder() == REPOSITORY
