"""What a measurement must carry to be believed: machine, versions, commit, command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "kfp", "pyarrow", "numpy", "minio")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def commit() -> str:
    """Return the commit of this checkout, short."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


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
            **{name: metadata.version(name) for name in PACKAGES},
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
