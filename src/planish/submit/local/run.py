"""The command `planish run`: runs the pipeline on this machine and prints a line for each stage.

kfp's local runner runs the pipeline in a child process whose output goes to a log file. This module
watches the run root, prints progress, and runs the control.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from planish import store
from planish.base.config import preset_names
from planish.base.errors import EXIT_FAILED, ConfigError
from planish.records import layout
from planish.run.lock import check_free, current_holder
from planish.run.signals import RUN_STOP_SECONDS, end_descendants
from planish.stages.report.facts import TaskLog
from planish.store import file_uri, normal_uri
from planish.submit.local.progress import seconds_by_stage, watch, work_seconds
from planish.submit.local.small_model import SMOLLM2, model_address

PACKAGE = Path(__file__).resolve().parents[2]
TRACKER_SECONDS = 60.0
"""Seconds in which trackers may write the rest of an ended run."""
OWN_OPTIONS = ("command", "no_control", "track", "no_track")
"""Options of this command that the local runner does not have."""


def pipelines_folder() -> Path:
    """Return the folder with `pipelines` and `components`, in the wheel or else in the checkout."""
    shipped = PACKAGE / "_pipelines"
    return shipped if shipped.is_dir() else PACKAGE.parents[1]


def environment() -> dict[str, str]:
    """Return the environment of child processes, in which other folders named `pipelines` cannot
    shadow ours.
    """
    places = [str(pipelines_folder()), *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"PYTHONPATH": os.pathsep.join(places), "PYTHONSAFEPATH": "1"}
    return {"OMP_NUM_THREADS": "1", **os.environ, **ours}


def default_root(arguments: argparse.Namespace) -> str:
    """Return the URI of a run's default folder, which depends on seed, preset, data and other
    choices.
    """
    choice = [arguments.config, arguments.overrides, arguments.model, arguments.dataset]
    choice += [str(arguments.iterations), str(arguments.shards)]
    choice += filter(None, [arguments.dataset_map])
    digest = hashlib.sha256("\n".join(choice).encode()).hexdigest()[:8]
    seed = f"-seed{arguments.seed}" * (arguments.seed >= 0)
    return file_uri(Path("runs") / f"{arguments.preset}{seed}-{digest}")


def start_run(arguments: argparse.Namespace, log_path: Path) -> subprocess.Popen[bytes]:
    """Start the local runner; its output goes to `log_path`."""
    command = [sys.executable, "-m", "pipelines.local"]
    for name, value in vars(arguments).items():
        if name in OWN_OPTIONS or value is None or value is False or value == "":
            continue
        command.append(f"--{name.replace('_', '-')}")
        if value is not True:
            command.append(str(value))
    with log_path.open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment())


def start_follower(arguments: argparse.Namespace, log_path: Path) -> subprocess.Popen[bytes] | None:
    """Start the process that writes the run's curves to trackers; return None if there are no
    trackers.
    """
    trackers = arguments.track or ["tensorboard"] * (find_spec("tensorboard") is not None)
    if arguments.no_track or not trackers:
        return None
    command = [sys.executable, "-m", "planish", "track", arguments.root, "--follow"]
    command += [word for tracker in trackers for word in ("--to", tracker)]
    with log_path.open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment(),
            preexec_fn=lambda: os.nice(10),
        )


def end_follower(follower: subprocess.Popen[bytes], console: Console, log_path: Path) -> None:
    """Let the trackers write the rest, then end them; their failures never fail the run."""
    follower.terminate()
    try:
        code = follower.wait(TRACKER_SECONDS)
    except subprocess.TimeoutExpired:
        follower.kill()
        code = follower.wait()
    if code != 0:
        console.print(f"the trackers did not get everything; see {log_path}", highlight=False)


def run_control(root: str, seconds: float, log_path: Path) -> dict[str, float]:
    """Continue supervised training for `seconds` from the start of reinforcement learning; return
    its scores.
    """
    command = [sys.executable, "-m", "planish.stages.sft.control", root, f"{seconds:.1f}"]
    with log_path.open("ab") as log:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=log, env=environment(), check=True
        )
    result: dict[str, float] = json.loads(done.stdout.decode().strip().splitlines()[-1])
    return result


def read_summary(root: str) -> dict[str, Any]:
    """Return the summary of the run that the report stage wrote."""
    uri = f"{layout.report(root)}/summary.json"
    summary: dict[str, Any] = json.loads(store.read(uri))
    return summary


def chosen_preset(name: str, model: str) -> str:
    """Return the preset of a run: that for a trained or a new model if only an algorithm is named.

    Example:
        >>> chosen_preset("", ""), chosen_preset("", "smollm2"), chosen_preset("grpo", "")
        ('dapo-tiny', 'dapo-small', 'grpo-tiny')
    """
    sizes = ["small"] * bool(model) + ["tiny"]
    sized = [f"{name or 'dapo'}-{size}" for size in sizes]
    return next((preset for preset in sized if preset in preset_names()), name)


def open_log(root: str) -> Path:
    """Return the path of a new log file, which no other run uses."""
    logs = Path("runs/logs").absolute()
    logs.mkdir(parents=True, exist_ok=True)
    prefix = f"{hashlib.sha256(root.encode()).hexdigest()[:8]}-"
    descriptor, path = tempfile.mkstemp(".log", prefix, logs)
    os.close(descriptor)
    return Path(path)


def show_run(arguments: argparse.Namespace, console: Console) -> int:
    """Run the pipeline and print the progress; return the exit code."""
    if find_spec("kfp") is None:
        raise ConfigError("the extra `demo` must be installed: pip install 'planish[demo]'")
    arguments.preset = chosen_preset(arguments.preset, arguments.model)
    arguments.overrides = " ".join(arguments.overrides)
    arguments.root = normal_uri(arguments.root or default_root(arguments))
    check_free(arguments.root, current_holder())
    log_path = open_log(arguments.root)
    console.print(f"run root   {arguments.root}", highlight=False)
    console.print(f"log        {log_path}", highlight=False)
    console.print(f"report     {layout.report(arguments.root)}/report.html", highlight=False)
    if arguments.model == SMOLLM2:
        console.print(f"model      {SMOLLM2}, fetched once", highlight=False)
        arguments.model = model_address()
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
        end_descendants(RUN_STOP_SECONDS)
        raise
    if process.returncode != 0:
        failed = [task.error for task in tasks if task.state == "failed"]
        last = log_path.read_text("utf-8", "replace").rstrip().rpartition("\n")[2]
        reason = failed[0] if failed else last.removeprefix("error: ")
        told = f"the run failed: {reason}; see {log_path}"
        console.print(told, style="bold red", highlight=False)
        return max(process.returncode, EXIT_FAILED)
    return finish(arguments, tasks, began, log_path, console)


def finish(
    arguments: argparse.Namespace,
    tasks: Sequence[TaskLog],
    began: float,
    log_path: Path,
    console: Console,
) -> int:
    """Run the control and print the result of a successful run."""
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
        # Only drawing a control needs this import of a stage.
        from planish.stages.report.stage import add_control

        control = run_control(arguments.root, learning, log_path)
        add_control(arguments.root, summary["state"], control)
        console.print(
            f"control: {learning:.0f} s more of supervised training (lr 1e-3) from the same start: "
            f"avg@n {control['accuracy']:.3f}, greedy {control['greedy']:.3f}",
            highlight=False,
        )
        result["control"] = control
    elif summary.get("control"):
        # This is the control of an earlier call; reports of earlier versions have none.
        result["control"] = summary["control"]
    result["seconds"] = round(time.monotonic() - began, 1)
    result["seconds_by_stage"] = stages
    starts = [task.startup_seconds for task in tasks]
    result["process_start_seconds_mean"] = round(sum(starts) / max(1, len(starts)), 2)
    result |= {"root": arguments.root, "policy": summary["last_policy"]}
    result["report"] = f"{layout.report(arguments.root)}/report.html"
    print(json.dumps(result, sort_keys=True))
    return 0
