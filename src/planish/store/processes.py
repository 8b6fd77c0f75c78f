"""Which process of which machine: an identity that a later process with the same id has not."""

from __future__ import annotations

import os
from pathlib import Path


def process_line(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on; empty where there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def process_start(pid: int) -> int:
    """Return when a live process began, in clock ticks since boot; 0 when there is none."""
    fields = process_line(pid)
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else 0


def process_space() -> str:
    """Return what tells where process ids of this process mean something; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("utf-8").strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
