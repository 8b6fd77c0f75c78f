import argparse
import dataclasses
import io
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

import planish
from planish.__main__ import main, parser
from planish.base.config import parse_override
from planish.base.errors import ConfigError, PlanishError
from planish.engines import ENGINES
from planish.records import layout
from planish.stages.prepare.settings import build_config, split_overrides
from planish.stages.report.facts import TaskLog
from planish.store.documents import write_json
from planish.submit.local.pipeline import Result
from planish.submit.local.progress import (
    progress_line,
    read_tasks,
    sampling_line,
    seconds_by_stage,
    watch,
    work_seconds,
)
from planish.submit.local.run import chosen_preset, default_root, finish, pipelines_folder
from tests.unit.submit.kfp_server import Server

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


@pytest.mark.parametrize("variables", [{}, {"FORCE_COLOR": "1"}, {"TTY_COMPATIBLE": "1"}])
def test_nothing_is_animated_where_the_output_is_no_terminal(variables, tmp_path, monkeypatch):
    """As in notebooks and on GitHub, which ask for colours of a pipe."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("planish.submit.local.progress.POLL_SECONDS", 0.0)
    log = tmp_path / "log"
    log.write_text("sampling kept=3 goal=8 dropped=1 tokens_per_second=9 slots=2 seconds_left=5\n")
    looks = iter([None] * 200 + [0])
    process = SimpleNamespace(poll=lambda: next(looks))
    out = io.StringIO()
    assert watch(process, f"file://{tmp_path}/root", Console(file=out), log, lambda: None) == []
    assert out.getvalue() == ""


def test_warnings_of_the_plan_stand_below_the_line_of_prepare(tmp_path, monkeypatch):
    monkeypatch.setattr("planish.submit.local.progress.POLL_SECONDS", 0.0)
    root, looks, out = tmp_path.as_uri(), iter([None, 0]), io.StringIO()
    entry = {"stage": "prepare", "iteration": 0, "shard": 0, "state": "done", "seconds": 1.0}
    write_json(layout.stage_log(root, "prepare", 0, 0), {**entry, "start_seconds": time.time()})
    log = tmp_path / "log"
    log.write_text("plan\n# What will happen\n\n## Warnings\n\n- one\n- two\n\nmore\n- no\n")
    process = SimpleNamespace(poll=lambda: next(looks))
    watch(process, root, Console(file=out, width=200), log, lambda: None)
    assert out.getvalue().splitlines()[1:] == ["- one", "- two"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (
            "sampling kept=3 goal=8 dropped=1 tokens_per_second=9 slots=2 seconds_left=5",
            "sampling: 3 of 8 kept, 1 dropped, 9 tokens/s, 2 slots in use, 5 s left",
        ),
        (
            "generating done=3 goal=8 tokens_per_second=9",
            "generating: 3 of 8 responses, 9 tokens/s",
        ),
    ],
)
def test_the_newest_progress_of_a_log_is_shown(line, shown):
    assert sampling_line(f"x\n{line}\ny\n") == shown


def test_a_machine_that_is_named_meanwhile_is_printed_once(tmp_path, monkeypatch):
    monkeypatch.setattr("planish.submit.local.progress.POLL_SECONDS", 0.0)
    root, looks, out = tmp_path.as_uri(), iter(range(6)), io.StringIO()
    alert = {"machine": "gpu-7", "metric": "seconds of rank 9", "state": "firing"}
    write_json(f"{layout.alerts(root)}/before.json", {**alert, "machine": "gpu-1"})

    def poll():
        if (look := next(looks)) == 2:
            write_json(f"{layout.alerts(root)}/new.json", alert)
        return 0 if look == 5 else None

    log = tmp_path / "log"
    log.touch()
    process = SimpleNamespace(poll=poll)
    watch(process, root, Console(file=out, width=200), log, lambda: None)
    assert out.getvalue() == "gpu-7 unlike its peers in seconds of rank 9\n"


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


@pytest.mark.parametrize(
    ("name", "model", "preset"),
    [
        ("", "", "dapo-tiny"),
        ("", "smollm2", "dapo-small"),
        ("grpo", "", "grpo-tiny"),
        ("grpo", "m", "grpo-small"),
        # It has no preset for a trained model.
        ("gspo", "m", "gspo-tiny"),
        ("dapo-tiny", "m", "dapo-tiny"),
        ("dapo-paper", "m", "dapo-paper"),
        ("typo", "m", "typo"),
    ],
)
def test_an_algorithm_alone_means_the_preset_of_a_trained_or_a_new_model(
    name: str, model: str, preset: str
) -> None:
    assert chosen_preset(name, model) == preset


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


def test_a_seed_among_the_settings_holds_unless_the_option_is_given():
    for words, seed in (((), 5), (("--seed", "0"), 0)):
        asked = parser().parse_args(["run", "-o", "run.seed=5", *words])
        asked.overrides = " ".join(asked.overrides)
        keys = ("preset", "config", "overrides", "model", "dataset", "seed")
        config = build_config(**{key: getattr(asked, key) for key in keys})
        assert config["run"]["seed"] == seed
        assert ("-seed" in default_root(asked)) == bool(words)


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


SUMMARY = {"root": "file:///r", "policy": "p#sha256=0", "accuracy_before": 0.25}
SUMMARY |= {"accuracy_after": 0.5, "report": "file:///r/report/report.html", "iterations": 2}

PROGRAM = """#!{python}
import json, sys
sys.stderr.write("a warning\\n")
print(json.dumps(sys.argv[1:]))
print({told!r})
sys.stderr.write({error!r})
raise SystemExit({code})
"""


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Stand in for Python with a program that prints its arguments and what it is told to."""

    def stand_in(told="", error="", code=0):
        path = tmp_path / "python"
        path.write_text(PROGRAM.format(python=sys.executable, told=told, error=error, code=code))
        path.chmod(0o700)
        monkeypatch.setattr("sys.executable", str(path))

    return stand_in


def test_options_and_settings_reach_the_command_and_its_last_line_is_the_result(command, capsys):
    command(told=json.dumps(SUMMARY), error="a warning of the end\n")
    table = {"train": {"betas": [0.9, 0.95]}, "curate.verifier": "it's x", "model": {"path": None}}
    table["reward"] = {"functions": [{"name": "mine:f", "weight": 0.5}]}
    result = planish.run_pipeline(table, root="r", iterations=2, no_control=True, no_track=False)
    given = json.loads(capsys.readouterr().out.splitlines()[1])
    assert given[:5] == ["-m", "planish", "run", "--preset", ""]
    assert given[-3:] == ["--root=r", "--iterations=2", "--no-control"]
    asked = parser().parse_args(given[2:])
    assert [parse_override(word) for word in split_overrides(" ".join(asked.overrides))] == [
        ("train", "betas", [0.9, 0.95]),
        ("curate", "verifier", "it's x"),
        ("model", "path", "none"),
        ("reward", "functions", [{"name": "mine:f", "weight": 0.5}]),
    ]
    assert (result.root, result.policy) == ("file:///r", "p#sha256=0")
    assert (result.accuracy_before, result.accuracy_after, result.control) == (0.25, 0.5, None)
    assert result.summary == SUMMARY


@pytest.mark.parametrize(("code", "kind"), [(2, ConfigError), (1, PlanishError)])
def test_a_command_that_fails_raises_its_last_line(command, code, kind):
    command(error="planish: no such preset\n", code=code)
    with pytest.raises(PlanishError, match=r"^no such preset$") as raised:
        planish.run_pipeline("mine.toml")
    assert type(raised.value) is kind


def test_the_package_has_no_other_names():
    with pytest.raises(AttributeError, match="run_pipelines"):
        planish.run_pipelines  # noqa: B018


FILE = """
preset = "dapo-qwen2.5-0.5b"
seed = 3
overrides = { "train.grad_clip" = 1.0, "train.learning_rate" = 1e-3 }
[[runs]]
name = "a"
[[runs]]
name = "b"
seed = 4
[runs.overrides.train]
learning_rate = 1e-4
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "rates.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def started(monkeypatch):
    """Return the options of the runs that were started; those of a root in `broken` fail."""
    seen, broken = [], []

    def run_command(words):
        seen.append(words)
        if words[1].rpartition("/")[2] in broken:
            raise PlanishError("out of memory")
        return Result(words[1], "pin", 0.25, 0.5, None, "report", {})

    monkeypatch.setattr("planish.submit.local.sweep.run_command", run_command)
    return seen, broken


def test_a_run_that_fails_stops_no_other_and_only_it_is_done_again(file, started, capsys):
    seen, broken = started
    broken.append("a")
    assert main(["sweep", str(file)]) == 1
    root = f"{file.parent.as_uri()}/runs/rates"

    def options(name, seed, rate):
        shared = ["--preset=dapo-qwen2.5-0.5b", f"--seed={seed}", "-o", "train.grad_clip=1.0"]
        return ["--root", f"{root}/{name}", *shared, "-o", f"train.learning_rate={rate}"]

    assert seen == [options("a", 3, 0.001), options("b", 4, 0.0001)]
    told = capsys.readouterr().out
    assert "a: out of memory" in told
    assert "seed=4 train.learning_rate=0.0001" in told
    broken.clear()
    assert main(["sweep", str(file)]) == 0
    assert [words[1] for words in seen[2:]] == [f"{root}/a"]
    told = capsys.readouterr().out.splitlines()
    assert told[-1] == f"planish compare {root}/a {root}/b"
    # Another setting is another run.
    file.write_text(FILE.replace("1e-4", "1e-5"))
    assert main(["sweep", str(file)]) == 0
    assert [words[1] for words in seen[3:]] == [f"{root}/b"]


def test_a_cluster_gets_each_run_in_one_experiment(file, capsys):
    server = Server()
    words = ["sweep", str(file), "--root", "s3://bucket/rates", "--kubeflow"]
    assert main([*words, "--host", server.url, "--profile", "gpu-1x8"]) == 0
    server.close()
    sent = [body["runtime_config"]["parameters"] for body in server.posted("runs")]
    assert [run["root"] for run in sent] == ["s3://bucket/rates/a", "s3://bucket/rates/b"]
    assert [run["seed"] for run in sent] == [3, 4]
    assert sent[1]["overrides"] == "train.grad_clip=1.0 train.learning_rate=0.0001"
    (experiment,) = server.objects["experiments"].values()
    assert experiment["display_name"] == "rates"
    assert set(server.objects["runs"]) <= set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "`sweep.runs`"),
        ("[[runs]]\nname='a'\nseeds=1", "did you mean `seed`?"),
        ("[[runs]]\nname='a/b'", "`sweep.runs.0.name`"),
        ("[[runs]]\nname='a'\n[[runs]]\nname='a'", "a name of its own"),
    ],
)
def test_a_file_that_is_no_list_of_runs_is_one_line_and_code_two(file, text, words, capsys):
    file.write_text(text)
    assert main(["sweep", str(file)]) == 2
    output, errors = capsys.readouterr()
    assert (output, errors.count("\n")) == ("", 1)
    assert words in errors
