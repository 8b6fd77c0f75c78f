"""What this machine has: packages by extra, devices, servers and tools."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from planish import __version__
from planish.base.errors import ConfigError, PlanishError

TOOLS = {
    "go": "builds the servers of the tests",
    "chromium": "takes the picture of the report",
    "docker": "builds the images",
    "kubectl": "talks to a cluster",
}
"""Program -> what it is for."""

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([a-z-]+)['\"]")


@dataclass(frozen=True)
class Finding:
    """One line of the answer."""

    what: str
    """Short name."""
    state: str
    """`ok`, `absent` (fine unless wanted) or `wrong` (must be mended)."""
    detail: str
    """Versions, counts, or the remedy."""


def examine() -> list[Finding]:
    """Look at packages, devices, servers and tools; nothing is changed."""
    return [*packages(), *devices(), *servers(), *tools()]


def packages(requirements: list[str] | None = None) -> list[Finding]:
    """Return one finding for the base and one per extra."""
    if requirements is None:
        requirements = metadata.requires("planish") or []
    groups: dict[str, list[str]] = {}
    for text in requirements:
        name, extra = _REQUIREMENT.match(text), _EXTRA.search(text)
        if name and name[1] != "planish":
            groups.setdefault(extra[1] if extra else "", []).append(name[1])
    own = Finding("planish", "ok", f"{__version__}, Python {platform.python_version()}")
    return [own, *(_group(extra, names) for extra, names in sorted(groups.items()))]


def _group(extra: str, names: list[str]) -> Finding:
    versions = {name: _version(name) for name in sorted(set(names))}
    missing = [name for name, version in versions.items() if version is None]
    title = f"extra {extra}" if extra else "base packages"
    if not missing:
        return Finding(title, "ok", ", ".join(f"{n} {v}" for n, v in versions.items()))
    target = f"'planish[{extra}]'" if extra else "planish"
    remedy = f"missing {', '.join(missing)}: pip install {target}"
    return Finding(title, "absent" if extra else "wrong", remedy)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[Finding]:
    """Return processors, memory, free disk and accelerators."""
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(Path.cwd()).free
    machine = (
        f"{cpus} processors, {memory / 2**30:.1f} GiB memory, {free / 2**30:.1f} GiB free disk"
    )
    return [Finding("machine", "ok", machine), _accelerators()]


def _accelerators() -> Finding:
    if _version("torch") is None:
        return Finding("accelerators", "absent", "torch is not installed")
    import torch

    if not torch.cuda.is_available():
        return Finding("accelerators", "absent", "none; everything runs on the processors")
    names = [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]
    return Finding("accelerators", "ok", ", ".join(names))


def servers() -> list[Finding]:
    """Return whether the S3 server of the environment answers, and which test server is built."""
    built = shutil.which("minio") or _built("minio")
    state = (
        Finding("minio program", "ok", str(built))
        if built
        else Finding("minio program", "absent", "only tests need it: make servers")
    )
    return [_s3(), state]


def _built(name: str) -> Path | None:
    path = Path.cwd() / ".cache" / "bin" / name
    return path if path.is_file() else None


def _s3() -> Finding:
    from planish.store.s3 import S3Store, read_settings

    try:
        settings = read_settings()
    except ConfigError as error:
        return Finding("s3 server", "absent", str(error))
    try:
        S3Store(replace(settings, retry_seconds=0.0), "planish-doctor").folder("")
    except ConfigError as error:
        # No such bucket: the server answers and takes the keys.
        if "bucket 'planish-doctor' must exist" not in str(error):
            return Finding("s3 server", "wrong", str(error))
    except PlanishError as error:
        return Finding("s3 server", "wrong", str(error))
    return Finding("s3 server", "ok", f"{settings.endpoint} answers and takes the keys")


def tools(which: Callable[[str], str | None] = shutil.which) -> list[Finding]:
    """Return which programs are on the PATH."""
    found = []
    for name, purpose in TOOLS.items():
        path = which(name)
        found.append(Finding(name, "ok", path) if path else Finding(name, "absent", purpose))
    return found


def doctor(console: Console) -> int:
    """Print all findings; return 1 when something must be mended, else 0."""
    findings = examine()
    style = {"ok": "green", "absent": "yellow", "wrong": "red"}
    table = Table(show_edge=False, pad_edge=False)
    for column in ("what", "state", "detail"):
        table.add_column(column, overflow="fold")
    for found in findings:
        table.add_row(found.what, Text(found.state, style[found.state]), Text(found.detail))
    console.print(table)
    return int(any(found.state == "wrong" for found in findings))
