"""Programs of the pipeline as forks of one process that has loaded what they import.

`python -m pipelines.local` loads kfp, and its tasks load torch and transformers, for seconds each
time that a test runs it. Here they are loaded once for all tests of a worker. What is started here
differs in nothing else: it has its own session, arguments, environment and output, its module runs
as `__main__`, and its warm process is a fork of it. The tests of the commands themselves start them
as a user does: test_pipeline_local, test_local_run, test_quickstart_page.
"""

import atexit
import ctypes
import functools
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from pipelines import warm
from planish.run.signals import STOP_SIGNALS
from tests.integration.ckpt_forks import Forks, begin_child, serve
from tests.integration.waiting import wait_for

ROOM_BYTES = 32_768
"""For the arguments of a program, and for its environment."""
LOADED = (
    *("pipelines.local", "pipelines.post_train", "pipelines.reshard", "kfp.local"),
    "planish.stages.report.stage",
)


class Child:
    """A process, with what is used here of `subprocess.Popen`."""

    def __init__(self, pid: int):
        self.pid = pid
        self.returncode: int | None = None

    def _ended(self) -> int | None:
        """Return the exit code of a child of this process; None while it runs."""
        ended, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if ended else None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._ended()
        return self.returncode

    def wait(self, timeout: float = 600.0) -> int:
        try:
            wait_for(lambda: self.poll() is not None, timeout)
        except AssertionError:
            raise subprocess.TimeoutExpired(str(self.pid), timeout) from None
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Program(Child):
    """A program that was started: a child of the process that forks."""

    def __init__(self, forks: Forks, pid: int):
        super().__init__(pid)
        self._forks = forks

    def _ended(self) -> int | None:
        (code,) = self._forks.ask(do="codes", pids=[self.pid])
        return code


@functools.cache
def _loaded() -> Forks:
    with mock.patch.dict(os.environ, ROOM_FOR_OTHERS=" " * ROOM_BYTES):
        forks = Forks(__name__, " " * ROOM_BYTES)
    atexit.register(forks.close)
    return forks


def start(
    module: str,
    *arguments: str,
    log: Path,
    environment: dict[str, str] | None = None,
    stdin: int | None = None,
) -> Program:
    """Start `python -m module arguments` in a session of its own; its output goes to `log`.

    As with `subprocess`, no environment is that of this process. `stdin` is a descriptor of this
    process; without one there is no input.
    """
    forks = _loaded()
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as door:
        door.bind(f"{folder}/door")
        door.listen()
        door.settimeout(300.0)
        (pid,) = forks.ask(
            do="fork",
            module=module,
            arguments=arguments,
            log=str(log.absolute()),
            environment=dict(os.environ if environment is None else environment),
            door="" if stdin is None else f"{folder}/door",
        )
        if stdin is not None:
            with door.accept()[0] as child:
                socket.send_fds(child, [b"."], [stdin])
    # From then on a signal to its process group reaches it.
    wait_for(lambda: os.getsid(pid) == pid)
    return Program(forks, pid)


def run(
    module: str,
    *arguments: str,
    environment: dict[str, str] | None = None,
    timeout: float = 600.0,
) -> tuple[int, str]:
    """Run `python -m module arguments`; returns its exit code and all that it has printed.

    Past the limit it is killed with all that it has started.
    """
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        program = start(module, *arguments, log=log, environment=environment)
        try:
            code = program.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(program.pid, signal.SIGKILL)
            raise
        return code, log.read_text(errors="replace")


def _start_warm(starter: Any) -> None:
    """Fork the warm process of a run, where `Starter` starts a new Python."""
    starter._channel, theirs = socket.socketpair()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        starter._channel.close()
        plain_signals()
        os.environ.update(warm.RUNTIME)
        name_process([sys.executable, "-m", "pipelines.warm", str(theirs.fileno())])
        warm.run_to_the_end(lambda: warm.main([str(theirs.detach())]))
    theirs.close()
    starter._process = Child(pid)


def name_process(words: Sequence[str]) -> None:
    """Let the table of processes show these words and this environment, as that of a new program.

    A lock asks for the words, and tests find by its environment what a run has left. They take the
    place of what the process was started with, which has room for them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for first, shown in ((45, words), (47, [f"{k}={v}" for k, v in os.environ.items()])):
        start, end = int(fields[first]), int(fields[first + 1])
        block = "\0".join(shown).encode()[: end - start - 1]
        ctypes.memmove(start, block.ljust(end - start, b"\0"), end - start)


def plain_signals() -> None:
    """Handle signals as a new Python does."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _fork(job: dict[str, Any]) -> list[int]:
    pid = os.fork()
    if pid == 0:
        _become(job)
    return [pid]


def _become(job: dict[str, Any]) -> None:
    """Be the program of a job; does not return."""
    os.setsid()
    begin_child(job["log"], job["environment"])
    if job["door"]:
        with socket.socket(socket.AF_UNIX) as door:
            door.connect(job["door"])
            _, (stdin,), _, _ = socket.recv_fds(door, 1, 1)
        os.dup2(stdin, 0)
        os.close(stdin)
    tempfile.tempdir = None  # which may be that of the process that forks
    sys.argv[1:] = job["arguments"]
    sys.modules.pop(job["module"], None)
    name_process([sys.executable, "-m", job["module"], *job["arguments"]])
    with mock.patch.object(warm.Starter, "_start", _start_warm):
        warm.run_to_the_end(
            lambda: runpy.run_module(job["module"], run_name="__main__", alter_sys=True)
        )


def main() -> None:
    """Load, then fork as lines of JSON on the standard input ask."""
    warm.load()
    for name in LOADED:
        __import__(name)
    gc.freeze()
    serve(_fork)


if __name__ == "__main__":
    main()
