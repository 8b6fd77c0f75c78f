"""Telemetry of a real run on this machine: each rank of a gang as a machine, second by second.

It is a healthy case for the detector, and none that anybody has made up: processes that wait for
each other, with the scheduler of this machine between them.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from planish.minder.detect.frame import Frame
from planish.minder.lab.files import write_frame
from tests.integration.slow_rank import gang, gang_job, rank_process, wait_for_training

TICKS = os.sysconf("SC_CLK_TCK")
PAGES = os.sysconf("SC_PHYS_PAGES")


def used(pid: int) -> tuple[float, float]:
    """Return the processor seconds that a process has used, and its share of the memory in %."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return (int(fields[11]) + int(fields[12])) / TICKS, 100.0 * resident / PAGES


def record_run(path: Path, *, num_ranks: int, seconds: int) -> Frame:
    """Record a gang that trains, and write its trace."""
    with tempfile.TemporaryDirectory() as name:
        log, job = Path(name) / "log", gang_job(Path(name) / "run", num_ranks)
        with gang(job, num_ranks, log) as process:
            pids = [rank_process(process.pid, rank) for rank in range(num_ranks)]
            wait_for_training(log, num_ranks)
            looks, stamps = [], []
            begun = int(time.time()) + 1
            for second in range(begun, begun + seconds + 1):
                time.sleep(max(0.0, second - time.time()))
                with contextlib.suppress(FileNotFoundError):
                    looks.append([used(pid) for pid in pids])
                    stamps.append(time.time())
    spent, memory = np.array(looks).transpose(2, 0, 1)
    busy = 100.0 * np.diff(spent, axis=0) / np.diff(stamps)[:, None]
    grid = np.arange(begun, begun + len(busy), dtype=np.int64)
    values = {"cpu_usage": np.clip(busy, 0.0, 100.0), "memory_usage": memory[1:]}
    frame = Frame(
        f"gang-of-{num_ranks}",
        grid,
        tuple(f"rank-{rank}" for rank in range(num_ranks)),
        {metric: array.astype(np.float32) for metric, array in values.items()},
    )
    write_frame(path, frame)
    return frame
