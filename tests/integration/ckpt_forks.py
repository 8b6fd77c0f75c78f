"""Ranks that start in a fifth of a second: forks of one process that has imported torch.

Use: `with Forks() as forks: ranks = forks.start("tests.integration.x:scenario", 2, folder, ...)`.
A scenario is called as `scenario(rank, size, folder, **arguments)` and returns something JSON can
hold; one that calls `get_ready` waits there until the test has seen all of its ranks ready and
calls `go`. Every rank ends with the forking process, and that one with the test.
"""

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.integration.waiting import wait_for

REPOSITORY = Path(__file__).resolve().parents[2]
_DIE_WITH_PARENT = 1
_numbers = itertools.count()


@dataclasses.dataclass
class Outcome:
    """How one rank ended."""

    code: int
    value: object
    error: str
    """Traceback of a scenario that raised, empty otherwise."""
    output: str


class Forks:
    """The process that forks."""

    def __init__(self, module="tests.integration.ckpt_forks", *arguments):
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=REPOSITORY,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """End the process, and with it every rank."""
        self._process.kill()
        self._process.wait(timeout=30)
        self._process.stdin.close()
        self._process.stdout.close()

    def ask(self, **fields):
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(self, scenario, size, folder, *, own=None, environment=None, **arguments):
        """Start `size` ranks; their files lie in `own`, else in a new folder below `folder`."""
        own = Path(own or Path(folder) / f"{scenario.partition(':')[2]}-{next(_numbers)}")
        own.mkdir(parents=True, exist_ok=True)
        for pattern in ("rendezvous", "result-*.json", "ready-*.json", "log-*.txt", "go"):
            for path in own.glob(pattern):
                path.unlink()
        pids = self.ask(
            do="fork",
            scenario=scenario,
            size=size,
            folder=str(own),
            environment={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
            arguments=arguments,
        )
        return ForkedRanks(self, own, pids)

    def run(self, scenario, size, folder, *, timeout=300.0, **rest):
        """Run a scenario to its end and return what each rank returned; fails if a rank failed."""
        ranks = self.start(scenario, size, folder, **rest)
        ranks.go()
        outcomes = ranks.wait(timeout)
        for rank, outcome in enumerate(outcomes):
            assert outcome.code == 0, f"rank {rank}: {outcome.error or outcome.output}"
        return [outcome.value for outcome in outcomes]


@functools.cache
def shared_forks():
    """Return the forking process of this process; what it has imported it imports only once."""
    forks = Forks()
    atexit.register(forks.close)
    return forks


def run_ranks(scenario, size, folder, *, timeout=300.0, **rest):
    """Run a scenario to its end and return what each rank returned; fails if a rank failed.

    Ranks are told `folder` itself.
    """
    return shared_forks().run(scenario, size, folder, own=folder, timeout=timeout, **rest)


class ForkedRanks:
    """The ranks of one job."""

    def __init__(self, forks, folder, pids):
        self._forks, self.folder, self.pids = forks, folder, pids

    @property
    def group(self):
        """What `os.kill` takes to reach all ranks and what they have started."""
        return -self.pids[0]

    def ready(self, timeout=300.0):
        """Wait until every rank is ready; returns what each told `get_ready`."""
        paths = [self.folder / f"ready-{rank}.json" for rank in range(len(self.pids))]

        def seen():
            return all(path.exists() for path in paths) or not self.running()

        wait_for(seen, timeout, "readiness of all ranks")
        assert all(path.exists() for path in paths), self.logs()
        return [json.loads(path.read_text()) for path in paths]

    def go(self):
        (self.folder / "go").touch()

    def kill(self, rank=None, number=signal.SIGKILL):
        """Send a signal to one rank, or to all with what they have started."""
        os.kill(self.group if rank is None else self.pids[rank], number)

    def running(self):
        return any(code is None for code in self._forks.ask(do="codes", pids=self.pids))

    def wait(self, timeout=300.0):
        """Return the outcome of every rank; ranks that still run at the end are killed."""
        try:
            wait_for(lambda: not self.running(), timeout, "the end of all ranks")
        except AssertionError as error:
            self.kill(number=signal.SIGABRT)  # each thread's position goes to the log
            time.sleep(0.5)
            raise AssertionError(f"{error}: {self.logs()}") from None
        codes = self._forks.ask(do="codes", pids=self.pids)
        outcomes = []
        for rank, code in enumerate(codes):
            path = self.folder / f"result-{rank}.json"
            found = json.loads(path.read_text()) if path.exists() else {"value": None, "error": ""}
            outcomes.append(Outcome(code, output=self._log(rank), **found))
        return outcomes

    def logs(self):
        return {rank: self._log(rank)[-4000:] for rank in range(len(self.pids))}

    def _log(self, rank):
        path = self.folder / f"log-{rank}.txt"
        return path.read_text(errors="replace") if path.exists() else ""


def get_ready(folder, rank, **facts):
    """In a scenario: tell the test that this rank is ready, and wait for its word."""
    write_json(Path(folder) / f"ready-{rank}.json", facts)
    wait_for((Path(folder) / "go").exists, 60.0, "the word to go")


def write_json(path, value):
    """Write a file that appears as a whole."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    partial.rename(path)


def begin_child(log, environment):
    """In a fork: end with the forking process, print to the end of `log`, have this environment."""
    atexit._clear()
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)


def _child(rank, job):
    """Be one rank; does not return."""
    import faulthandler

    import torch
    import torch.distributed as dist

    folder, result, code = Path(job["folder"]), {"value": None, "error": ""}, 0
    begin_child(folder / f"log-{rank}.txt", job["environment"])
    faulthandler.enable(file=2)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=job["size"]
        )
        result["value"] = _found(job["scenario"])(rank, job["size"], folder, **job["arguments"])
    except BaseException:
        result["error"], code = traceback.format_exc(), 1
    write_json(folder / f"result-{rank}.json", result)
    if code == 0:
        # What a process does at its end, without the handlers of the one it was forked from.
        dist.destroy_process_group()
        atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _found(scenario):
    module, _, name = scenario.partition(":")
    return getattr(importlib.import_module(module), name)


def _fork(job):
    # Imported once, here; `preload` of a test module imports what its scenarios import late.
    module = sys.modules[_found(job["scenario"]).__module__]
    getattr(module, "preload", lambda: None)()
    pids = []
    for rank in range(job["size"]):
        pid = os.fork()
        if pid == 0:
            _child(rank, job)
        pids.append(pid)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pids[0])
    return pids


def serve(fork):
    """Fork as lines of JSON on the standard input ask; `fork` returns the processes of a job."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    codes = {}
    for line in sys.stdin:
        job = json.loads(line)
        if job["do"] == "fork":
            answer = fork(job)
            for pid in answer:
                codes.pop(pid, None)
        else:
            for pid in job["pids"]:
                if pid not in codes:
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        codes[pid] = os.waitstatus_to_exitcode(status)
            answer = [codes.get(pid) for pid in job["pids"]]
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main():
    """Fork ranks."""
    import torch  # noqa: F401  (before the first fork)

    serve(_fork)


if __name__ == "__main__":
    main()
