"""Runs the runs: a few processes at a time, bases first, finished ones never again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.benchmarks.studies.arms import REPOSITORY, Arm, run_root
from tests.benchmarks.studies.runner import BASE, is_finished

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Job:
    """One run of one arm."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.arm.task}/{self.arm.name}/seed{self.seed}"

    @property
    def base(self) -> Job:
        """The job that makes its prompts and initial policy."""
        return Job(Arm(self.arm.task, BASE), self.seed)


def unfinished(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs still to be done, each once and after its base."""
    wanted: dict[Job, None] = {}
    for job in jobs:
        wanted[job.base] = None
        wanted[job] = None
    return [job for job in wanted if not is_finished(job.arm, job.seed)]


def _start(job: Job) -> subprocess.Popen[bytes]:
    log = run_root(job.arm, job.seed).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.benchmarks.studies.runner"]
    command += [json.dumps(job.arm.to_json()), str(job.seed)]
    # One torch thread per process: at these sizes a second one only gets in the way.
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **threads},
        )


def _next(waiting: list[Job], running: Iterable[Job]) -> Job | None:
    """Take the first job whose base is neither waiting nor running."""
    busy = {*waiting, *running}
    for job in waiting:
        if job.arm.name == BASE or job.base not in busy:
            waiting.remove(job)
            return job
    return None


def run_all(jobs: Sequence[Job], *, parallel: int) -> list[Job]:
    """Do the jobs, `parallel` at a time; returns those that failed.

    A job whose base has failed fails too. Stopping this process stops its children.
    """
    waiting = unfinished(jobs)
    failed: list[Job] = []
    running: dict[Job, subprocess.Popen[bytes]] = {}
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn()]
    with Progress(*columns, MofNCompleteColumn(), TimeElapsedColumn()) as bar:
        line = bar.add_task("runs", total=len(waiting))
        try:
            while waiting or running:
                while len(running) < parallel and (job := _next(waiting, running)):
                    if job.base in failed:
                        failed.append(job)
                    else:
                        running[job] = _start(job)
                bar.update(line, description=", ".join(job.name for job in running) or "runs")
                time.sleep(POLL_SECONDS)
                for job in [job for job, process in running.items() if process.poll() is not None]:
                    if running.pop(job).returncode != 0:
                        failed.append(job)
                        bar.console.print(f"failed: {job.name}, see its .log under runs/studies")
                    bar.advance(line)
        finally:
            for process in running.values():
                process.terminate()
    return failed
