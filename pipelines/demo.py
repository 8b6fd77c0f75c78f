"""Run the post-training pipeline on this machine and show what happens, one line a stage.

The pipeline is the one that a cluster runs, run by kfp's local runner in a child process whose
output goes to a log file; this module watches the run root, prints, and measures the control.

    python -m pipelines.demo --seed 0
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from pipelines.local import STOP_SECONDS, run_parameters
from planish import store
from planish.base.config import preset_names
from planish.base.errors import EXIT_FAILED, PlanishError, exit_code
from planish.records import layout
from planish.records.rewards import nothing_learnt
from planish.run.lock import check_free, current_holder
from planish.run.signals import Terminated, end_descendants, on_signal
from planish.stages.curate.problem import MUCH
from planish.store import file_uri, normal_uri

REPOSITORY = Path(__file__).resolve().parent.parent
POLL_SECONDS = 0.3
TRACKER_SECONDS = 60.0
"""For trackers to take the rest of a run that has ended."""
SAMPLING = re.compile(
    r"sampling kept=(\d+) goal=(\d+) dropped=(\d+) tokens_per_second=(\d+) slots=(\d+) "
    r"seconds_left=(\w+)"
)
"""What a rollout task tells of itself every few seconds."""

WORK_SECONDS = {"rollout": "sample_seconds", "train": "update_seconds"}
"""Stage to the metric that holds its seconds without process start, imports and loading."""

FACTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "curate": (
        ("num_train", "prompts", "{:.0f}"),
        ("num_evaluation", "held out", "{:.0f}"),
    ),
    "sft": (("steps", "steps", "{:.0f}"), ("accuracy", "accuracy", "{:.3f}")),
    "rollout": (
        ("accuracy_mean", "accuracy", "{:.3f}"),
        ("ds/kept_frac", "kept", "{:.0%}"),
        ("response_length_mean", "tokens each", "{:.1f}"),
    ),
    "reward": (("reward_mean", "reward", "{:+.3f}"), ("accuracy_mean", "accuracy", "{:.3f}")),
    "train": (
        ("loss", "loss", "{:+.4f}"),
        ("entropy", "entropy", "{:.3f}"),
        ("clipfrac_high", "clipped high", "{:.2%}"),
        ("grad_norm", "grad norm", "{:.2f}"),
    ),
    "evaluate": (
        ("accuracy", "avg@n", "{:.3f}"),
        ("accuracy_before", "avg@n before", "{:.3f}"),
        ("accuracy_after", "after", "{:.3f}"),
    ),
}
"""Stage to (metric, words, format): what its progress line shows."""


@dataclass(frozen=True)
class EndedTask:
    """One ended task attempt, read from its stage log."""

    stage: str
    iteration: int
    shard: int
    state: str
    start_seconds: float
    startup_seconds: float
    seconds: float
    metrics: Mapping[str, float]
    already_done: bool
    error: str

    @property
    def key(self) -> tuple[int, str, int]:
        """What makes the task unique in a run."""
        return (self.iteration, self.stage, self.shard)


def read_tasks(root: str, since: float) -> list[EndedTask]:
    """Return the ended attempts that began after `since` (Unix seconds), in order of their end."""
    tasks = []
    for uri in store.list_uris(layout.logs(root) + "/"):
        if not uri.endswith(".json"):
            continue
        try:
            entry: dict[str, Any] = json.loads(store.read(uri))
        except (ValueError, OSError):
            continue  # it is being replaced at this very moment: the next look sees it
        if entry["state"] == "running" or entry["start_seconds"] < since:
            continue
        tasks.append(
            EndedTask(
                stage=entry["stage"],
                iteration=entry["iteration"],
                shard=entry["shard"],
                state=entry["state"],
                start_seconds=entry["start_seconds"],
                startup_seconds=entry.get("startup_seconds", 0.0),
                seconds=entry["seconds"],
                metrics=entry.get("metrics", {}),
                already_done=entry.get("already_done", False),
                error=entry.get("error", ""),
            )
        )
    return sorted(tasks, key=lambda task: task.start_seconds + task.seconds)


def progress_line(task: EndedTask, elapsed: float) -> str:
    """Return the line about one ended task.

    Example:
        >>> task = EndedTask("reward", 2, 0, "done", 0, 0, 1.5, {"reward_mean": -0.2}, False, "")
        >>> progress_line(task, 9)
        '    9.0 s  iteration 2  reward       1.5 s  reward -0.200'
    """
    where = f"iteration {task.iteration}" if task.iteration else ""
    name = f"{task.stage} {task.shard + 1}" if task.stage == "rollout" else task.stage
    facts = [
        f"{words} {form.format(task.metrics[key])}"
        for key, words, form in FACTS.get(task.stage, ())
        if key in task.metrics
    ]
    if task.stage == "curate":
        facts += rows_facts(task.metrics)
    if told := nothing_learnt(task.metrics):
        facts = [told]
    if task.metrics.get("cold_start_skipped"):
        facts = ["cold start skipped: the data set has no worked traces"]
    if task.already_done:
        facts = ["already done"]
    if task.state == "failed":
        facts = [f"FAILED: {task.error}"]
    return (
        f"{elapsed:7.1f} s  {where:<11}  {name:<10} {task.seconds:5.1f} s  {'  '.join(facts)}"
    ).rstrip()


def rows_facts(metrics: Mapping[str, float]) -> list[str]:
    """Return how many rows of a data set were read and kept, and what each filter dropped.

    Example:
        >>> rows_facts({"in_rows_of_the_data_set": 9, "num_train": 4, "num_evaluation": 1,
        ...             "in_near_duplicates": 9, "dropped_near_duplicates": 4})
        ['of 9 rows', 'dropped by near duplicates 4 (44%, see the curation report)']
    """
    if "in_rows_of_the_data_set" not in metrics:
        return []
    facts = [f"of {metrics['in_rows_of_the_data_set']:.0f} rows"]
    for key, number in metrics.items():
        if key.startswith("dropped_"):
            name = key.removeprefix("dropped_")
            part = number / metrics[f"in_{name}"]
            much = f" ({part:.0%}, see the curation report)" if part > MUCH else ""
            facts.append(f"dropped by {name.replace('_', ' ')} {number:.0f}{much}")
    return facts


def sampling_line(log: str) -> str:
    """Return how far the sampling is that a log told last, or "".

    Example:
        >>> sampling_line("I sampling kept=3 goal=8 dropped=2 tokens_per_second=90 slots=16 "
        ...               "seconds_left=12")
        'sampling: 3 of 8 kept, 2 dropped, 90 tokens/s, 16 slots in use, 12 s left'
    """
    found = SAMPLING.findall(log)
    if not found:
        return ""
    kept, goal, dropped, speed, slots, left = found[-1]
    facts = f"{kept} of {goal} kept, {dropped} dropped, {speed} tokens/s, {slots} slots in use"
    return f"sampling: {facts}" + ("" if left == "unknown" else f", {left} s left")


def watch(
    process: subprocess.Popen[bytes],
    root: str,
    console: Console,
    log: Path,
    begin: Callable[[], None],
) -> list[EndedTask]:
    """Print one line for each task until the run ends; return the tasks of this run.

    On a terminal a last line tells how far the sampling is that goes on. `begin` is called once,
    when a first task has succeeded: from then on the root is this run's.
    """
    began = time.time()
    shown: dict[tuple[int, str, int], EndedTask] = {}
    told, sampling = 0, ""
    with console.status("") if console.is_terminal else nullcontext() as status:
        while True:
            ended = process.poll() is not None
            for task in read_tasks(root, began - 1):
                if shown.get(task.key) != task:
                    is_first = all(seen.state == "failed" for seen in shown.values())
                    if is_first and task.state == "done":
                        begin()
                    shown[task.key] = task
                    told, sampling = log.stat().st_size, ""
                    style = "bold red" if task.state == "failed" else None
                    line = progress_line(task, time.time() - began)
                    console.print(line, style=style, highlight=False)
            if ended:
                return list(shown.values())
            if status is not None:
                with log.open("rb") as stream:
                    stream.seek(told)
                    news = stream.read()
                told += len(news)
                sampling = sampling_line(news.decode("utf-8", "replace")) or sampling
                status.update(sampling)
            time.sleep(POLL_SECONDS)


def seconds_by_stage(tasks: Sequence[EndedTask]) -> dict[str, float]:
    """Return wall seconds by stage; shards that ran side by side count once, from first to last."""
    spans: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for task in tasks:
        span = (task.start_seconds, task.start_seconds + task.seconds)
        spans[task.stage, task.iteration].append(span)
    total: dict[str, float] = defaultdict(float)
    for (stage, _), parts in sorted(spans.items()):
        total[stage] += max(end for _, end in parts) - min(start for start, _ in parts)
    return {stage: round(seconds, 2) for stage, seconds in total.items()}


def work_seconds(tasks: Sequence[EndedTask]) -> float:
    """Return the seconds spent on sampling and updating; of parallel shards the slowest counts."""
    slowest: dict[tuple[str, int], float] = defaultdict(float)
    for task in tasks:
        metric = WORK_SECONDS.get(task.stage, "")
        key = (task.stage, task.iteration)
        slowest[key] = max(slowest[key], task.metrics.get(metric, 0.0))
    return sum(slowest.values())


def default_root(arguments: argparse.Namespace) -> str:
    """Return the folder of this demo: one for each seed, preset and choice of data."""
    choice = [arguments.config, arguments.overrides, arguments.model, arguments.dataset]
    choice += [str(arguments.iterations), str(arguments.shards)]
    choice += filter(None, [arguments.dataset_map])
    digest = hashlib.sha256("\n".join(choice).encode()).hexdigest()[:8]
    folder = REPOSITORY / "runs" / f"{arguments.preset}-seed{arguments.seed}-{digest}"
    return file_uri(folder)


def start_run(arguments: argparse.Namespace, log_path: Path) -> subprocess.Popen[bytes]:
    """Start the local runner with its output in `log_path`."""
    command = [sys.executable, "-m", "pipelines.local"]
    for name, value in vars(arguments).items():
        if name in ("no_control", "track", "no_track") or value in (None, "", False):
            continue
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(str(value))
    with log_path.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=REPOSITORY)


def start_follower(arguments: argparse.Namespace, log_path: Path) -> subprocess.Popen[bytes] | None:
    """Start what writes the curves of the run to its trackers; None where there is none."""
    trackers = arguments.track or ["tensorboard"] * (find_spec("tensorboard") is not None)
    if arguments.no_track or not trackers:
        return None
    command = [sys.executable, "-m", "planish", "track", arguments.root, "--follow"]
    command += [word for tracker in trackers for word in ("--to", tracker)]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=lambda: os.nice(10)
        )


def end_follower(follower: subprocess.Popen[bytes], console: Console, log_path: Path) -> None:
    """Let the trackers have the rest; what became of them changes nothing in the run."""
    follower.terminate()
    try:
        code = follower.wait(TRACKER_SECONDS)
    except subprocess.TimeoutExpired:
        follower.kill()
        code = follower.wait()
    if code != 0:
        console.print(f"the trackers did not get everything; see {log_path}", highlight=False)


def run_control(root: str, seconds: float, log_path: Path) -> dict[str, float]:
    """Spend `seconds` on more supervised training of the same start instead; return its scores."""
    command = [sys.executable, "-m", "planish.stages.sft.control", "--root", root]
    command += ["--seconds", f"{seconds:.1f}"]
    with log_path.open("ab") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, cwd=REPOSITORY, check=True
        )
    result: dict[str, float] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return result


def read_summary(root: str) -> dict[str, Any]:
    """Return what the exit report wrote about the run."""
    uri = f"{layout.report(root)}/summary.json"
    summary: dict[str, Any] = json.loads(store.read(uri))
    return summary


def tiny_preset(name: str) -> str:
    """Return the preset that a demo runs: the tiny one where only an algorithm is named.

    Example:
        >>> tiny_preset("vapo"), tiny_preset("dapo-paper")
        ('vapo-tiny', 'dapo-paper')
    """
    return f"{name}-tiny" if f"{name}-tiny" in preset_names() else name


def demo_parser() -> argparse.ArgumentParser:
    """Return the command line of the demo."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    run_parameters(parser, root_required=False)
    parser.add_argument("--no-control", action="store_true", help="skip the supervised control")
    parser.add_argument(
        "--track",
        action="append",
        metavar="TRACKER",
        help="tensorboard[=FOLDER], mlflow[=URI] or wandb[=PROJECT]; may be given again "
        "(default: tensorboard, below the root)",
    )
    parser.add_argument("--no-track", action="store_true", help="write to no tracker")
    return parser


def open_log(root: str) -> Path:
    """Return a new file for the output of a run: a log that another run writes stays whole."""
    logs = REPOSITORY / "runs" / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    prefix = f"{hashlib.sha256(root.encode()).hexdigest()[:8]}-"
    descriptor, path = tempfile.mkstemp(".log", prefix, logs)
    os.close(descriptor)
    return Path(path)


def show_run(arguments: argparse.Namespace, console: Console) -> int:
    """Run to the end and show it; returns the exit code.

    Raises:
        PlanishError: the root cannot be, is in use, or its store failed.
    """
    arguments.root = normal_uri(arguments.root or default_root(arguments))
    check_free(arguments.root, current_holder())
    log_path = open_log(arguments.root)
    console.print(f"run root   {arguments.root}", highlight=False)
    console.print(f"log        {log_path}", highlight=False)
    began = time.monotonic()
    process = start_run(arguments, log_path)
    followers: list[subprocess.Popen[bytes]] = []

    def begin() -> None:
        follower = start_follower(arguments, log_path)
        followers.extend([follower] if follower else [])

    try:
        tasks = watch(process, arguments.root, console, log_path, begin)
        for follower in followers:
            end_follower(follower, console, log_path)
    except BaseException:
        end_descendants(STOP_SECONDS)
        raise
    if process.returncode != 0:
        if not any(task.state == "failed" for task in tasks):
            reason = log_path.read_text("utf-8", "replace").rstrip().rpartition("\n")[2]
            console.print(reason, style="bold red", highlight=False)
        console.print(f"the run failed; see {log_path}", style="bold red", highlight=False)
        return max(process.returncode, EXIT_FAILED)
    return finish(arguments, tasks, began, log_path, console)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; the last line of standard output is JSON."""
    arguments = demo_parser().parse_args(argv)
    arguments.preset = tiny_preset(arguments.preset)
    # Paths, settings and errors may hold brackets: none of them is markup.
    console = Console(soft_wrap=True, markup=False, emoji=False)

    def stop(number: int) -> None:
        raise Terminated(number, 128 + number)

    try:
        with on_signal(stop):
            return show_run(arguments, console)
    except PlanishError as error:
        sys.stderr.write(f"error: {error}\n")
        return exit_code(error)
    except Terminated as stopped:
        sys.stderr.write(f"{stopped}; the same command resumes\n")
        raise


def finish(
    arguments: argparse.Namespace,
    tasks: Sequence[EndedTask],
    began: float,
    log_path: Path,
    console: Console,
) -> int:
    """Measure the control and print the result of a run that succeeded."""
    stages = seconds_by_stage(tasks)
    summary = read_summary(arguments.root)
    result: dict[str, Any] = {
        key: summary[key]
        for key in (
            "accuracy_before",
            "accuracy_after",
            "greedy_before",
            "greedy_after",
            "iterations",
            "mismatch_k3_max",
        )
    }
    learning = work_seconds(tasks)
    traced = any(task.metrics.get("num_traces") for task in tasks if task.stage == "curate")
    if not arguments.no_control and learning > 0 and traced:
        control = run_control(arguments.root, learning, log_path)
        console.print(
            f"control: {learning:.0f} s more of supervised training (lr 1e-3) from the same start: "
            f"avg@n {control['accuracy']:.3f}, greedy {control['greedy']:.3f}",
            highlight=False,
        )
        result["control"] = control
    result["seconds"] = round(time.monotonic() - began, 1)
    result["seconds_by_stage"] = stages
    starts = [task.startup_seconds for task in tasks]
    result["process_start_seconds_mean"] = round(sum(starts) / max(1, len(starts)), 2)
    result["report"] = f"{layout.report(arguments.root)}/report.html"
    console.print(f"report     {result['report']}", highlight=False)
    print(json.dumps(result, sort_keys=True))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    raise SystemExit(main())
