"""Identity of a process and its machine; a later process with the same id has another identity."""

from __future__ import annotations

import os
from pathlib import Path


def process_line(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; empty without such a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def process_start(pid: int) -> int:
    """Return the start of a live process, in clock ticks since boot; 0 if there is none."""
    fields = process_line(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else 0


def process_space() -> str:
    """Return an id of the process-id namespace of this process; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
