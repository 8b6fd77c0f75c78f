"""The real pipeline through kfp's local runner, on stages that only write down that they ran."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration import runs
from tests.integration.fake_stages import read_events, write_fake_stages

REPOSITORY = Path(__file__).resolve().parents[2]

RUNNER = """
import sys, tempfile, warnings
from kfp import local
from pipelines.post_train import build_post_train, profile_named
warnings.simplefilter("ignore")
root, iterations, shards = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
local.init(local.SubprocessRunner(use_venv=False), pipeline_root=sys.argv[4], raise_on_error=True)
profile = profile_named("cpu-tiny", num_iterations=iterations, num_shards=shards)
build_post_train(profile, one_machine=True)(root=root, seed=5)
"""


class Bench:
    """A run root, the stand-in stages, and the runner in a child process."""

    def __init__(self, folder):
        self.modules = write_fake_stages(folder / "modules")
        self.root = folder / "run"
        self.artifacts = folder / "artifacts"
        (self.root / "break").mkdir(parents=True)

    def start(self, *, iterations=2, shards=2, rollout_seconds=0.0, **variables):
        command = [sys.executable, "-c", RUNNER, f"file://{self.root}"]
        command += [str(iterations), str(shards), str(self.artifacts)]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.modules}:{REPOSITORY}:{os.environ['PYTHONPATH']}",
        }
        environment |= {"FAKE_ROLLOUT_SECONDS": str(rollout_seconds), **variables}
        return subprocess.Popen(
            command,
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run_command(self, *options):
        """Run the command line to the end; return as `run` does."""
        command = [sys.executable, "-m", "pipelines.local", "--root", f"file://{self.root}"]
        environment = {
            **os.environ,
            "PYTHONPATH": f"{self.modules}:{REPOSITORY}:{os.environ['PYTHONPATH']}",
        }
        done = subprocess.run(
            [*command, *options],
            env=environment,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        return done.returncode, read_events(self.root), done.stdout

    def run(self, **options):
        """Run to the end; return (exit code, events, output)."""
        process = self.start(**options)
        output, _ = process.communicate(timeout=300)
        return process.returncode, read_events(self.root), output

    def tell(self, stage, iteration, how):
        (self.root / "break" / f"{stage}-{iteration}").write_text(how)


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def order(events):
    inside = {"rollout-end", "evaluate-iteration"}
    return [(e["stage"], e["iteration"]) for e in events if e["stage"] not in inside]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two iterations and two shards that nothing disturbs: its bench and its events."""
    bench = Bench(tmp_path_factory.mktemp("whole"))
    code, events, output = bench.run(iterations=2, shards=2)
    assert code == 0, output[-3000:]
    return bench, events


def test_all_stages_run_in_order_and_hand_on_their_pins(whole):
    _, events = whole
    one = [("rollout", 3), ("rollout", 3), ("reward", 3), ("train", 3), ("checkpoint", 3)]
    two = [(stage, 4) for stage, _ in one]
    assert order(events) == [
        *(("prepare", 0), ("curate", 0), ("sft", 0)),
        *one,
        *two,
        *(("evaluate", 0), ("next", 0), ("report", 0)),
    ]
    pins = [
        (e["policy_pin"], e["state_pin"], e["number"], e["offset"])
        for e in events
        if e["stage"] == "rollout"
    ]
    assert pins == [("policy-2", "", 1, 2)] * 2 + [("policy-3", "state-3", 2, 2)] * 2
    # The first rollout task offers each policy to the evaluation, which looks whether it is due.
    offered = [e for e in events if e["stage"] == "evaluate-iteration"]
    assert [(e["iteration"], e["policy_pin"]) for e in offered] == [
        (3, "policy-2"),
        (4, "policy-3"),
    ]
    evaluated = next(e for e in events if e["stage"] == "evaluate")
    assert (evaluated["baseline_pin"], evaluated["policy_pin"]) == ("policy-2", "policy-4")
    prepared = events[0]
    assert (prepared["seed"], prepared["num_iterations"], prepared["num_shards"]) == (5, 2, 2)
    assert {e["threads"] for e in events} == {"1"}


def test_a_recorded_trace_is_looked_at_in_each_iteration(bench):
    options = ["--iterations", "2", "--monitor-trace", "s3://b/trace.npz"]
    code, events, output = bench.run_command(*options, "--monitor", "s3://b/minder.toml")
    assert code == 0, output[-3000:]
    looks = [e for e in events if e["stage"] == "monitor_check"]
    assert [(e["iteration"], e["watch_seconds"]) for e in looks] == [(3, 0), (4, 0)]
    assert {(e["settings"], e["trace"]) for e in looks} == {
        ("s3://b/minder.toml", "s3://b/trace.npz")
    }


def test_the_exit_task_hears_of_success_and_every_declared_output_exists(whole):
    bench, events = whole
    report = events[-1]
    assert report["stage"] == "report"
    assert (report["state"], report["error_message"]) == ("SUCCEEDED", "")
    files = {path.name for path in bench.artifacts.rglob("*") if path.is_file()}
    expected = {"plan", "curation_report", "prompts", "start_policy", "rollouts", "rewards"}
    assert expected | {"train_state", "policy", "evaluation", "report", "summary"} <= files


@pytest.mark.parametrize("stage", ["prepare", "train", "evaluate"])
def test_after_a_failure_nothing_but_the_exit_task_runs(bench, stage):
    iteration = 3 if stage == "train" else 0
    bench.tell(stage, iteration, "always")
    code, events, _ = bench.run(iterations=2)
    assert code == 1
    attempts = 1 if stage == "prepare" else 2
    assert order(events)[-1 - attempts :] == [
        *[(stage, iteration)] * attempts,
        ("report", 0),
    ]
    assert events[-1]["state"] == "FAILED"
    assert events[-1]["error_message"]


def test_a_failed_attempt_is_tried_again_with_the_same_inputs(bench):
    bench.tell("train", 3, "once")
    code, events, output = bench.run(iterations=1)
    assert code == 0, output[-3000:]
    attempts = [e for e in events if e["stage"] == "train"]
    assert len(attempts) == 2
    first, second = ({k: v for k, v in e.items() if k not in ("pid", "time")} for e in attempts)
    assert first == second
    assert 1.0 <= attempts[1]["time"] - attempts[0]["time"] < 60.0


def test_shards_run_once_each_side_by_side_in_processes_of_their_own(bench):
    # Each waits in its rollout until the other has begun.
    code, events, output = bench.run(iterations=1, shards=2, FAKE_ROLLOUTS_MEET="1")
    assert code == 0, output[-3000:]
    begun = [e for e in events if e["stage"] == "rollout"]
    assert sorted(e["shard"] for e in begun) == [0, 1]
    assert {e["num_shards"] for e in begun} == {2}
    assert len({e["pid"] for e in begun}) == 2


def test_a_killed_run_leaves_nothing_that_stops_the_next_one(bench):
    process = bench.start(iterations=2, rollout_seconds=1.0)
    deadline = time.monotonic() + 120
    while not any(e["stage"] == "rollout" for e in read_events(bench.root)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=30)
    before = len(read_events(bench.root))
    code, events, output = bench.run(iterations=2)
    assert code == 0, output[-3000:]
    assert order(events[before:])[-1] == ("report", 0)


@pytest.mark.parametrize("program", [["pipelines.local"], ["planish", "run"]])
def test_a_run_ends_with_the_code_of_the_stage_that_failed_and_takes_a_path_as_root(
    tmp_path, program
):
    command = [sys.executable, "-m", *program, "--root", "runs/one", "--config", str(runs.TINY)]
    done = subprocess.run(
        [*command, "--overrides", "train.learning_rate=-1.0"],
        env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ['PYTHONPATH']}"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2, done.stdout[-3000:]
    assert "`train.learning_rate`" in done.stdout
    assert (tmp_path / "runs" / "one" / "logs").is_dir()
