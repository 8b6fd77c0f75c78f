"""Inventory of this machine: packages of each extra, devices, servers and tools."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from rich.console import Console
from rich.table import Table
from rich.text import Text

from planish import __version__
from planish.base.errors import ConfigError, PlanishError
from planish.base.parallel import driver_fault
from planish.base.text import bytes_text

TOOLS = {
    "go": "builds the servers of the tests",
    "chromium": "takes the picture of the report",
    "docker": "builds the images",
    "kubectl": "talks to a cluster",
}
"""Map from program to its use."""

_EXTRA = re.compile(r"extra\s*==\s*['\"]([a-z-]+)['\"]")


@dataclass(frozen=True)
class MachineFact:
    """One line of the inventory."""

    what: str
    state: str
    """`ok`, `absent` (fine unless needed) or `wrong` (must be mended)."""
    detail: str
    """Versions, counts, or the remedy."""


def packages(requirements: list[str] | None = None) -> list[MachineFact]:
    """Return one line for the base packages and one per extra."""
    if requirements is None:
        requirements = metadata.requires("planish") or []
    groups: dict[str, list[Requirement]] = {}
    for text in requirements:
        wanted, extra = Requirement(text), _EXTRA.search(text)
        if wanted.name != "planish":
            groups.setdefault(extra[1] if extra else "", []).append(wanted)
    own = MachineFact("planish", "ok", f"{__version__}, Python {platform.python_version()}")
    facts = [own]
    for group, wanted_here in sorted(groups.items()):
        versions = {wanted.name: _version(wanted.name) for wanted in wanted_here}
        missing = sorted(name for name, version in versions.items() if version is None)
        others = sorted(
            f"{wanted.name} {version} in place of {wanted.specifier}"
            for wanted in wanted_here
            if (version := versions[wanted.name])
            and not wanted.specifier.contains(version, prereleases=True)
        )
        title = f"extra {group}" if group else "base packages"
        target = f"'planish[{group}]'" if group else "planish"
        state, detail = "ok", ", ".join(f"{n} {v}" for n, v in sorted(versions.items()))
        if missing or others:
            # Nobody needs every extra, but installed versions must be those with which the tests
            # ran.
            state = "wrong" if others or not group else "absent"
            told = [f"missing {', '.join(missing)}"] * bool(missing) + others
            detail = f"{'; '.join(told)}: pip install {target}"
        facts.append(MachineFact(title, state, detail))
    return facts


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def devices() -> list[MachineFact]:
    """Return lines on processors, memory, free disk and accelerators."""
    cpus = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = shutil.disk_usage(Path.cwd()).free
    machine = f"{cpus} processors, {bytes_text(memory)} memory, {bytes_text(free)} free disk"
    state, detail = "absent", "torch is not installed"
    if _version("torch") is not None:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if names := [torch.cuda.get_device_name(n) for n in range(count)]:
            state, detail = "ok", ", ".join(names)
        elif fault := driver_fault():
            state, detail = "wrong", fault
        else:
            detail = "none; everything runs on the processors"
    return [MachineFact("machine", "ok", machine), MachineFact("accelerators", state, detail)]


def servers() -> list[MachineFact]:
    """Return whether the configured S3 server answers, and which servers for tests are built."""
    own = Path.cwd() / ".cache" / "bin" / "minio"
    path = shutil.which("minio") or (str(own) if own.is_file() else "")
    state, detail = ("ok", path) if path else ("absent", "only tests need it: make servers")
    return [_s3(), MachineFact("minio program", state, detail)]


def _s3() -> MachineFact:
    from planish.store.s3 import S3Store, read_settings

    try:
        settings = read_settings()
    except ConfigError as error:
        return MachineFact("s3 server", "absent", str(error))
    try:
        S3Store(replace(settings, retry_seconds=0.0), "planish-doctor").folder("")
    except ConfigError as error:
        # A missing bucket is fine: the server has answered and accepted the keys.
        if "bucket 'planish-doctor' must exist" not in str(error):
            return MachineFact("s3 server", "wrong", str(error))
    except PlanishError as error:
        return MachineFact("s3 server", "wrong", str(error))
    return MachineFact("s3 server", "ok", f"{settings.endpoint} answers and takes the keys")


def tools(which: Callable[[str], str | None] = shutil.which) -> list[MachineFact]:
    """Return which programs are on the PATH."""
    paths = {name: which(name) for name in TOOLS}
    return [
        MachineFact(name, "ok" if path else "absent", path or TOOLS[name])
        for name, path in paths.items()
    ]


def doctor(console: Console) -> int:
    """Print all lines; return 1 if one is `wrong`, else 0."""
    findings = [*packages(), *devices(), *servers(), *tools()]
    style = {"ok": "green", "absent": "yellow", "wrong": "red"}
    table = Table(show_edge=False, pad_edge=False)
    for column in ("what", "state", "detail"):
        table.add_column(column, overflow="fold")
    for fact in findings:
        table.add_row(fact.what, Text(fact.state, style[fact.state]), Text(fact.detail))
    console.print(table)
    return int(any(fact.state == "wrong" for fact in findings))
