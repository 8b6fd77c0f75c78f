"""Run many iterations in one task, and look whether it grows or slows down.

`python -m tests.integration.resident_soak --iterations 200` prints medians of every 20 iterations,
and exits 1 where the last have more than `GROWTH` times the time, memory, descriptors or threads
of the first. The policy learns too slowly to change, so that all iterations are alike. What a
machine does in a second changes by a fifth within minutes, so time is counted in runs of a piece of
fixed work, which goes on beside the task. Memory is what the task holds of its own: it has
an allocator that gives back what was freed, and pages of libraries do not count, which are shared
with whatever else runs.
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

from planish import store
from planish.records import layout
from tests.integration.resident_equal import QUICK, WAYS, run
from tests.integration.resident_kill import command, copy_start

GROWTH = 1.05
PART = 20
"""Iterations of a median."""
COLUMNS = ("seconds", "works", "MB", "descriptors", "threads")
"""All but the seconds are judged."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""glibc keeps freed blocks below a size that it raises up to 32 MiB, unless it is told one."""


def work() -> float:
    """Return the seconds of a fixed piece of work, in Python and in numpy."""
    values = np.ones((96, 96), dtype=np.float32)
    since = time.monotonic()
    for _ in range(20):
        values = values @ values / 96
        sum(range(500))
    return time.monotonic() - since


def held(pid: int) -> list[float]:
    """Return what a process and all that it has started hold: MB, descriptors and threads."""
    found = np.zeros(3)
    task = psutil.Process(pid)
    for process in (task, *task.children(recursive=True)):
        with contextlib.suppress(psutil.Error, OSError):
            pages = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            sizes = re.findall(r"^Pss_(?:Anon|Shmem): +(\d+) kB", pages, re.MULTILINE)
            memory = sum(int(size) for size in sizes) * 1024 / 1e6
            found += memory, process.num_fds(), process.num_threads()
    return list(found)


def soak(root: str, iterations: int) -> Iterator[list[float]]:
    """Run all iterations of a root in one task; yield `COLUMNS` of each once it has trained."""
    environment = os.environ | ALLOCATOR
    line = command(root, iterations)
    with subprocess.Popen(line, stderr=subprocess.DEVNULL, env=environment) as task:
        since = time.monotonic()
        for iteration in range(1, iterations + 1):
            works = [work()]
            while not store.exists(layout.update(root, iteration)):
                if task.poll() is not None:
                    raise SystemExit(f"the task ended with {task.returncode} in {iteration}")
                works.append(work())
                time.sleep(0.01)
            now = time.monotonic()
            yield [now - since, (now - since) / float(np.mean(works)), *held(task.pid)]
            since = now
    if task.returncode:
        raise SystemExit(f"the task ended with {task.returncode}")


def main(argv: Sequence[str]) -> int:
    """Soak; 0 where nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--way", choices=WAYS, default="one rank")
    options = parser.parse_args(argv)
    settings = (*QUICK, *WAYS[options.way], "train.learning_rate=1e-12")
    # So weak a policy has iterations in a row without a right response.
    settings += ("rollout.max_iterations_without_signal=0",)
    medians = []
    print(f"{'until':<10}" + "".join(f"{column:>13}" for column in COLUMNS))
    with tempfile.TemporaryDirectory() as name:
        before, root = Path(name) / "before", (Path(name) / "root").as_uri()
        run(before, "dapo-tiny", 1, settings, "--resident", "1")
        copy_start(before, root)
        rows = []
        for row in soak(root, options.iterations):
            rows.append(row)
            if len(rows) % PART == 0:
                medians.append(np.median(rows[-PART:], axis=0))
                numbers = "".join(f"{value:>13.3f}" for value in medians[-1])
                print(f"{len(rows):<10}{numbers}", flush=True)
    # Few descriptors and threads come and go with an upload.
    is_grown = medians[-1] > GROWTH * medians[0] + np.array([np.inf, 0, 0, 2, 2])
    print(f"grown: {', '.join(np.array(COLUMNS)[is_grown]) or 'nothing'}")
    return int(is_grown.any())


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
