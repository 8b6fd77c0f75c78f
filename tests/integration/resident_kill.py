"""Kill a task of several iterations again and again; what it leaves must be as if nobody had.

`python -m tests.integration.resident_kill --rounds 30` prints a line for each round and exits 1
where a record differs from those of tasks apart, or a process or shared memory is left. In a round
the task is killed at two random moments, as a whole or one of its processes, and run again each
time; `--seed` repeats the moments.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from planish.base.config import config_sha256
from planish.records.manifest import read_manifest
from planish.run.stage import read_run
from tests.integration.resident_equal import WAYS, records, run
from tests.processes import below, marked, marks, shared_memory_of, wait_until_none

SHARDS = 2
KEPT = ("run.json", "prompts", "policies/00000")
"""What a root has before the first iteration."""


def before_iterations(source: Path, root: Path) -> None:
    """Copy what a run has made before its first iteration."""
    for name in KEPT:
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        (shutil.copytree if (source / name).is_dir() else shutil.copy)(source / name, target)


def command(root: Path, iterations: int) -> list[str]:
    """Return the command of one task with all iterations."""
    uri = root.as_uri()
    policy = f"{uri}/policies/00000"
    digest = config_sha256(read_run(uri)["config"])
    line = [sys.executable, "-m", "planish.run", "iterate", "--root", uri]
    line += ["--config-sha256", digest, "--number", "1", "--count", str(iterations)]
    line += ["--offset", "0", "--num-shards", str(SHARDS), "--state-pin", ""]
    return [*line, "--policy-pin", read_manifest(policy).ref(policy).pin()]


def iterations_of(root: Path) -> dict[str, bytes]:
    """Return the records of iterations, without evaluations at the end."""
    return {name: data for name, data in records(root).items() if not name.startswith("evals/")}


def kill_all(folder: Path) -> None:
    """Kill every process of a round."""
    for pid in marked(folder):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until_none(folder, 60.0)


def kill(process: subprocess.Popen[bytes], draw: random.Random, folder: Path) -> str:
    """Kill the whole task or one process of it; return which."""
    if draw.random() < 0.5:
        kill_all(folder)
        return "all"
    chosen = draw.choice([process.pid, *below(process.pid)])
    with contextlib.suppress(ProcessLookupError):
        os.kill(chosen, signal.SIGKILL)
    return "itself" if chosen == process.pid else "a child"


def killed_round(
    source: Path, folder: Path, iterations: int, draw: random.Random, seconds: float
) -> list[str]:
    """Run one round; return what is wrong afterwards."""
    root, log = folder / "root", folder / "log"
    before_iterations(source, root)
    told: list[str] = []
    shared: set[str] = set()
    code = -1
    for number in range(8):
        with log.open("ab") as out:
            process = subprocess.Popen(
                command(root, iterations), env=marks(folder), stdout=out, stderr=out
            )
        until = time.monotonic() + draw.uniform(0.0, seconds)
        while number < 2 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        if number < 2 and process.poll() is None:
            shared |= shared_memory_of(marked(folder))
            told.append(kill(process, draw, folder))
        code = process.wait()
        # What the death of one process leaves ends with its pod.
        kill_all(folder)
        if code == 0:
            break
    told = told or ["nothing"]
    print(f"    killed {', '.join(told)}; ended with {code}", flush=True)
    if code:
        return [f"the task must end, got {code}: {log.read_text(errors='replace')[-2000:]}"]
    wanted, found = iterations_of(source), iterations_of(root)
    faults = sorted(k for k in wanted.keys() | found.keys() if wanted.get(k) != found.get(k))
    faults += sorted(name for name in shared if Path(name).exists())
    left = [path for name in ("commits", "steps") for path in root.glob(f"iterations/*/{name}")]
    return faults + [str(path) for path in left if any(p.is_file() for p in path.rglob("*"))]


def main(argv: Sequence[str]) -> int:
    """Run the rounds; 0 where nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="dapo-tiny")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--ways", default="one rank,two ranks")
    options = parser.parse_args(argv)
    draw, bad = random.Random(options.seed), 0
    for way in options.ways.split(","):
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "apart"
            run(source, options.preset, options.iterations, WAYS[way], "--resident", "0")
            began = time.monotonic()
            whole = Path(folder) / "whole"
            before_iterations(source, whole)
            subprocess.run(command(whole, options.iterations), check=True, capture_output=True)
            seconds = time.monotonic() - began
            for number in range(options.rounds):
                place = Path(folder) / f"round-{number}"
                place.mkdir()
                faults = killed_round(source, place, options.iterations, draw, seconds)
                print(f"{way} round {number}: {faults or 'right'}", flush=True)
                bad += bool(faults)
                shutil.rmtree(place)
    print(f"rounds with faults: {bad}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
