"""The process table: which live processes belong to one test, and which to one process."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from planish.store.processes import process_line


def marks(folder: Path) -> dict[str, str]:
    """Return the environment whose processes `marked` finds by this folder."""
    return {**os.environ, "TEST_FOLDER": str(folder)}


def marked(folder: Path) -> list[int]:
    """Return the ids of the live processes that inherited the environment of `marks`."""
    mark = f"TEST_FOLDER={folder}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "environ").read_bytes().split(b"\0")
            state = (path / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        if mark in words and state not in ("Z", "X"):
            found.append(int(path.name))
    return sorted(found)


def is_running(pid: int) -> bool:
    """Return True if a process lives; one that has ended and was not waited for does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until_none(folder: Path, seconds: float) -> None:
    """Wait until no marked process is left."""
    deadline = time.monotonic() + seconds
    while found := marked(folder):
        assert time.monotonic() < deadline, [
            Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in found
        ]
        time.sleep(0.1)


def python(*words: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python to its end; return its exit code and what it has printed."""
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def below(pid: int) -> list[int]:
    """Return the ids of the processes that a process has started, and of theirs."""
    children = [int(path.name) for path in Path("/proc").glob("[0-9]*") if _parent(path) == pid]
    return [member for child in children for member in (child, *below(child))]


def shared_memory_of(pids: Iterable[int]) -> set[str]:
    """Return the files of shared memory that live processes map or hold open.

    Other processes of the machine may have files there at any moment, so a test looks at its own.
    """
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
            found |= set(re.findall(r"/dev/shm/\S+", maps))
            for path in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    target = os.readlink(path)
                    found |= {target} if target.startswith("/dev/shm/") else set()
    return found


def _parent(process: Path) -> int:
    fields = process_line(int(process.name))
    return int(fields[1]) if fields else 0
