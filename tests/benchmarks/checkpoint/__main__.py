"""Checkpoint benchmark: `python -m tests.benchmarks.checkpoint` writes `results/checkpoint.json`.

Ranks of one job run a training loop with steps of half a second; in their turns, systems save the
same state into a real MinIO server (or a folder beside it), or load it. Data lie on tmpfs, in some
phases on disk (the page cache is never dropped). Medians of `--rounds` turns after two warm-ups,
lowest and highest in brackets, the order of systems rotated. Ratios are of figures of one phase.
It does not start on a machine that does other work; `--rehearse` does, and writes nothing. `--rows`
prints the rows of docs/results.md for the last result.

call    the time inside `save()`; the slowest rank
stall   the step that saves, less the median step without, but never less than `call`
save    from the start of `save()` until the checkpoint is durable; the last rank
slowdown   steps beside an upload over steps without
cpu     processor seconds of all ranks and their uploaders in a turn, the steps' own left out
load    from a barrier before to a barrier after; the first load of each system is compared bitwise

Peers live in environments of their own, named by variables; without them their rows are left out:

CKPT_PEER_PYTHON (this project too; all systems but B5 then run in it, in one process):
    uv venv PEER -p 3.11 && uv pip install -p PEER/bin/python -e . torch==2.13.0 psutil \
        's3torchconnector[dcp]==1.5.0' s3fs==2026.9.0
BYTECHECKPOINT_PYTHON (its pin of torch <= 2.5 is overridden by the torch of all others):
    uv venv BCP -p 3.11 && uv pip install -p BCP/bin/python bytecheckpoint==0.0.2 setuptools \
        --override <(echo torch==2.13.0)

Without `--phase` and `--workload` the phases are run that docs/results.md tells of, about 24
minutes on two idle cores, W2 and W3 at half their size. `--scale` shrinks all workloads,
`--minutes` ends a run early: phases come in order of importance, and what was measured is written
after every round.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Grid

from tests.benchmarks.checkpoint.measure import Bench, run_phase
from tests.benchmarks.checkpoint.rows import result_rows
from tests.benchmarks.checkpoint.schedule import PHASES, Phase
from tests.benchmarks.checkpoint.table import HEADINGS, Table, figures
from tests.benchmarks.checkpoint.workloads import ABOUT
from tests.benchmarks.facts import RESULTS, require_idle_machine, write_result
from tests.servers.program import REPOSITORY

MODULE = "tests.benchmarks.checkpoint"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}")
    parser.add_argument("--workload", nargs="+", default=[], help="W1 to W5, with all their phases")
    parser.add_argument("--phase", nargs="+", default=[], help="names of phases")
    parser.add_argument("--systems", nargs="+", default=[], help="names of systems; all without")
    parser.add_argument("--scale", type=float, default=1.0, help="of all workloads")
    parser.add_argument("--rounds", type=int, default=7, help="measured turns per system")
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=25.0, help="no phase begins after")
    parser.add_argument("--rehearse", action="store_true", help="on a busy machine, for nothing")
    parser.add_argument("--rows", action="store_true", help="print the rows of the page and end")
    parser.add_argument("--logs", type=Path, default=None, help="folder for what ranks print")
    return parser.parse_args()


def chosen(options: argparse.Namespace) -> list[Phase]:
    """Return the phases to run, with what they load from."""
    found = [
        phase
        for phase in PHASES
        if phase.name in options.phase
        or phase.workload.partition("-")[0] in options.workload
        or not (options.phase or options.workload or phase.is_extra)
    ]
    names = {phase.name for phase in found}
    sources = {phase.source for phase in found} - names
    found += [phase for phase in PHASES if phase.name in sources]
    found.sort(key=PHASES.index)
    if options.systems:
        found = [
            dataclasses.replace(
                phase, systems=tuple(s for s in phase.systems if s in options.systems)
            )
            for phase in found
        ]
    return [phase for phase in found if phase.systems]


def report(console: Console, phases: dict[str, Any]) -> Table:
    """Print figures per phase and the table of targets."""
    table = Table(phases)
    for name, raw in phases.items():
        grid = Grid(*HEADINGS, title=f"{name} ({ABOUT[raw['workload']]}; {raw['place']})")
        for line in figures(raw, table.summaries[name]):
            grid.add_row(*line)
        console.print(grid)
        for system, reason in raw["failed"].items():
            console.print(f"{name}: {system}: {reason.splitlines()[0]}", style="red")
    grid = Grid("phase", "quantity", "ours", "other", "value", "target", "paper", "limit", "")
    for row in table.rows():
        value = "" if row.value is None else f"{row.value:.2f}"
        grid.add_row(
            row.workload, row.quantity, row.ours, row.other, value, row.target, row.paper,
            row.limit, row.verdict, style="red" if row.verdict == "missed" else None,
        )  # fmt: skip
    console.print(grid)
    return table


def minio_version() -> str:
    """Return the version of the server's Go module; the binary does not know it."""
    lines = (REPOSITORY / "tests" / "servers" / "minio" / "go.mod").read_text("utf-8").splitlines()
    found = [line.split()[1] for line in lines if "github.com/minio/minio v" in line]
    return found[0] if found else ""


def result_of(options: argparse.Namespace, phases: dict[str, Any], busy: float) -> dict[str, Any]:
    """Return what has been measured so far."""
    table = Table(phases)
    return {
        "busy_cores_before": busy,
        "scale": options.scale,
        "load_average": list(os.getloadavg()),
        "page_cache": "kept",
        "minio_server": minio_version(),
        "workloads": ABOUT,
        "table": [dataclasses.asdict(row) for row in table.rows()],
        "summaries": table.summaries,
        "turns": phases,
    }


def show_plan(console: Console, phases: list[Phase], options: argparse.Namespace) -> float:
    """Print what will be run; returns about how many seconds it takes."""
    total, turns = 0.0, options.rounds + options.warmups
    for phase in phases:
        seconds = phase.seconds(options.scale, turns)
        total += seconds
        systems = ", ".join(phase.systems)
        console.print(
            f"{phase.name}: {turns} turns of {systems} at {options.scale * phase.scale:g} of the "
            f"size, about {seconds:.0f} s"
        )
    console.print(f"about {total / 60:.0f} minutes; no phase begins after {options.minutes:g}")
    return total


def main() -> None:
    options = arguments()
    if options.rows:
        print(result_rows(json.loads((RESULTS / "checkpoint.json").read_text("utf-8"))))
        return
    console = Console(width=200)
    phases = chosen(options)
    total = show_plan(console, phases, options)
    busy = -1.0 if options.rehearse else require_idle_machine()
    logs = options.logs or Path(tempfile.mkdtemp(prefix="ckpt-bench-logs-"))
    logs.mkdir(parents=True, exist_ok=True)
    # What was started and written must go when the run is ended from outside, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    deadline = began + 60 * options.minutes
    found: dict[str, Any] = {}
    bench = Bench(options.scale, options.warmups, options.rounds, logs)
    try:
        for number, phase in enumerate(phases):
            if time.monotonic() > deadline:
                console.print(f"no time for {phase.name}", style="red")
                continue
            bench.need(phases[number:])
            load = list(os.getloadavg())
            for turn, raw in enumerate(run_phase(bench, phase, deadline), 1):
                found[phase.name] = raw
                raw["load_average"] = load
                if not options.rehearse:
                    result = result_of(options, found, busy)
                    write_result("checkpoint", "measured-cpu", result, MODULE)
                console.print(
                    f"{phase.name}: turn {turn} of {options.rounds + options.warmups}, "
                    f"{time.monotonic() - began:.0f} s of about {total:.0f}"
                )
    finally:
        bench.close()
    report(console, found)
    result = result_of(options, found, busy)
    if options.rehearse:
        print(result_rows({"label": "rehearsed", "result": result}))
        return
    path = write_result("checkpoint", "measured-cpu", result, MODULE)
    console.print(path)
    print(result_rows(json.loads(path.read_text("utf-8"))))


if __name__ == "__main__":
    main()
