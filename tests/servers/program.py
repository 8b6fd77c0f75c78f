"""A program that a test starts, waits for and ends: what all servers for tests have in common."""

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
BIN = REPOSITORY / ".cache" / "bin"
"""Where `build.sh` puts what it builds."""


def free_port() -> int:
    """Return a TCP port that the kernel gives to nobody else in the next minute.

    A closed connection holds it: a server may bind it by its number, as all that are meant to be
    started again may, but it is no candidate for sockets that leave the choice to the kernel.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address):
            # The side that closes first is the one that holds the port.
            listener.accept()[0].close()
        return int(address[1])


def require(*programs: str | Path, remedy: str) -> None:
    """Skip the test on a machine that lacks one of the programs."""
    import pytest

    lacking = [Path(program).name for program in programs if shutil.which(program) is None]
    if lacking:
        pytest.skip(f"no {' and no '.join(lacking)} here: {remedy}")


def few_variables(home: Path) -> dict[str, str]:
    """Return an environment without anything of the test's own, for programs written in Go."""
    return {"PATH": os.environ["PATH"], "HOME": str(home), "GOMAXPROCS": "2"}


@dataclass
class Program:
    """A program that may run, be ended and be started again; what it says is added to a file."""

    log: Path
    process: subprocess.Popen | None = None

    def start(
        self, command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start it, with the environment of this process unless another is given."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_for(self, url: str) -> None:
        """Wait until a page is there."""
        wait_for_answer(lambda: urllib.request.urlopen(url, timeout=2).close(), [self])

    def terminate(self, seconds: float = 20.0) -> int:
        """End it politely and return its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=seconds)
        self.process = None
        return code

    def kill(self) -> None:
        """End it as a crash would, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=30)
            self.process = None


def wait_for_answer(
    ask: Callable[[], object], programs: Sequence[Program], *, seconds: float = 120.0
) -> None:
    """Ask until there is an answer and no `OSError`.

    Raises:
        RuntimeError: a program has ended, or the time is up; with the last that they said.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and all(program.is_running for program in programs):
        try:
            ask()
            return
        except OSError:
            time.sleep(0.1)
    logs = (f"{one.log.name}:\n{one.log.read_text()[-2000:]}" for one in programs)
    raise RuntimeError("no answer\n" + "\n".join(logs))
