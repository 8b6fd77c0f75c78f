"""Starts N gloo ranks as processes of their own that run one function of a test module.

The function is called as `scenario(rank, size, folder, **arguments)` and returns something JSON can
hold. Ranks end with the test: a rank that hangs is killed at the time limit. `ckpt_forks` starts
ranks much sooner; these here know nothing of one another, and end as a trainer does.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Outcome:
    """How one rank ended."""

    code: int
    value: object
    error: str
    """Traceback of a scenario that raised, empty otherwise."""
    output: str


class Ranks:
    """Running ranks; leaving the context kills what still runs."""

    def __init__(self, scenario, size, folder, *, environment=None, **arguments):
        self.size, self.folder = size, Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        rendezvous = self.folder / f"rendezvous-{time.monotonic_ns()}"
        job = {"scenario": scenario, "size": size, "folder": str(folder), "arguments": arguments}
        self.processes = []
        for rank in range(size):
            (self.folder / f"result-{rank}.json").unlink(missing_ok=True)
            # Named for what they are: what a rank writes must not fill a pipe.
            log = open(self.folder / f"log-{rank}.txt", "w+b")  # noqa: SIM115
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.integration.ckpt_ranks", json.dumps(job)],
                    cwd=REPOSITORY,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={
                        **os.environ,
                        "OMP_NUM_THREADS": "1",
                        "CKPT_RANK": str(rank),
                        "CKPT_RENDEZVOUS": str(rendezvous),
                        **(environment or {}),
                    },
                )
            )
            log.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def kill(self, rank, number=signal.SIGKILL):
        self.processes[rank].send_signal(number)

    def pid(self, rank):
        return self.processes[rank].pid

    def wait(self, timeout=120.0):
        """Return the outcome of every rank; raises TimeoutExpired with the ranks' output."""
        limit = time.monotonic() + timeout
        for process in self.processes:
            try:
                process.wait(max(0.1, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                logs = "\n".join(self.log(rank)[-3000:] for rank in range(self.size))
                self.__exit__()
                raise TimeoutError(f"ranks still ran after {timeout} s\n{logs}") from None
        return [self._outcome(rank) for rank in range(self.size)]

    def log(self, rank):
        return (self.folder / f"log-{rank}.txt").read_text("utf-8", errors="replace")

    def _outcome(self, rank):
        path = self.folder / f"result-{rank}.json"
        found = json.loads(path.read_text()) if path.exists() else {"value": None, "error": ""}
        return Outcome(self.processes[rank].returncode, output=self.log(rank), **found)


def main(job):
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["CKPT_RANK"]), job["size"]
    folder = Path(job["folder"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['CKPT_RENDEZVOUS']}", rank=rank, world_size=size
    )
    module, _, name = job["scenario"].partition(":")
    result, code = {"value": None, "error": ""}, 0
    try:
        scenario = getattr(importlib.import_module(module), name)
        result["value"] = scenario(rank, size, folder, **job["arguments"])
    except BaseException:
        result["error"], code = traceback.format_exc(), 1
    partial = folder / f"result-{rank}.partial"
    partial.write_text(json.dumps(result))
    partial.rename(folder / f"result-{rank}.json")
    if code == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.exit(code)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
