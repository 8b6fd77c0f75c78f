"""What programs share that kill processes: rounds of a place, a signal and an invariant.

A program gives `play_rounds` a function that plays one round in a folder of its own: it starts
something, waits for a moment or an event that the round's random numbers choose, gives the signal,
and asserts what must hold afterwards. `parser` makes the command line, `Held` finds what processes
have left on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import getpass
import os
import random
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import marked, shared_memory_of, wait_until_none

RENDEZVOUS = "vllm_dist_"
"""How temporary files of vLLM begin that it removes at its end, and so not when it is killed."""


def parser(description: str | None, rounds: int = 20) -> argparse.ArgumentParser:
    """Return a command line with the number of rounds, and the seed that repeats their kills."""
    made = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds)
    made.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32))
    return made


def play_rounds(
    name: str,
    num_rounds: int,
    seed: int,
    folder: Path,
    play: Callable[[int, Path, random.Random], str],
) -> list[str]:
    """Play rounds, print a line for each, and return what was wrong.

    Args:
        name: of what is killed; with the seed it chooses the random numbers of each round.
        num_rounds: how many.
        seed: of the command line.
        folder: where each round has one of its own, which goes with it.
        play: takes the number of a round, its folder and its random numbers; returns what was done,
            and raises AssertionError where an invariant does not hold.
    """
    began = time.monotonic()
    failures = []
    for number in range(num_rounds):
        place = folder / f"round-{number}"
        place.mkdir(parents=True)
        try:
            text = play(number, place, random.Random(f"{seed} {name} {number}"))
        except AssertionError as error:
            text = f"WRONG: {error}"
            failures.append(f"round {number}: {error}")
        shutil.rmtree(place, ignore_errors=True)
        seconds = time.monotonic() - began
        print(f"{seconds:7.1f} s  {name} {number}: {text}", flush=True)
    return failures


def kill_marked(folder: Path) -> None:
    """Kill every process of a round, and wait until none is left."""
    for pid in marked(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until_none(folder, 60.0)


def make_scratch(folder: Path) -> None:
    """Make a folder for temporary files, but for what torch compiles, which programs share."""
    folder.mkdir(parents=True)
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
    compiled.mkdir(exist_ok=True)
    (folder / compiled.name).symlink_to(compiled)


@dataclass
class Held:
    """What processes have had: shared memory, and sockets by inode."""

    before: set[str] = field(default_factory=lambda: shared_memory())
    memory: set[str] = field(default_factory=set)
    sockets: set[str] = field(default_factory=set)

    def look(self, pids: Sequence[int]) -> None:
        """Note what processes have now."""
        self.memory |= shared_memory_of(pids)
        for pid in pids:
            with contextlib.suppress(OSError):
                for path in Path(f"/proc/{pid}/fd").iterdir():
                    with contextlib.suppress(OSError):
                        target = os.readlink(path)
                        self.sockets |= set(re.findall(r"^socket:\[(\d+)\]", target))

    def left(self) -> list[str]:
        """Return what is still there although its processes have ended."""
        memory = [name for name in self.memory - self.before if Path(name).exists()]
        return sorted([*memory, *(f"socket {one}" for one in self.sockets & listening())])


def shared_memory() -> set[str]:
    """Return the files of shared memory of this machine."""
    return {str(path) for path in Path("/dev/shm").iterdir()}


def listening() -> set[str]:
    """Return the inodes of the TCP sockets of this machine that listen."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            found |= {words[9]} if words[3] == "0A" else set()
    return found
