"""What a call of the monitor costs, in seconds of the processor.

Frames of 15 minutes of seven metrics come from the simulator; models are those of the package. A
*first* call is that of a new monitor. A *renewed* one falls into the half hour in which baselines
are learned; a *steady* one comes later. Each call sees one minute more. The time of the server is
not in it, and each size runs in a process of its own.

    python -m tests.benchmarks.bench_minder
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

from planish.minder.detect.config import minder_config
from planish.minder.detect.frame import Frame
from planish.minder.detect.job_monitor import JobMonitor
from planish.minder.detect.model_files import default_models, load_models
from tests.benchmarks.facts import write_result
from tests.minder_lab.simulator import simulate

SIZES = (64, 256, 1024)
GROUP = 64
"""Machines that are simulated at once: making the frame must not set the peak of memory."""
WINDOW_MINUTES = 15
LEARN_MINUTES = 30
STEADY_CALLS = 5


def job_frame(machines: int, minutes: int, metrics: tuple[str, ...]) -> Frame:
    """Return a healthy job: copies of a group of machines with noise of their own."""
    group = simulate(7, machines=min(GROUP, machines), minutes=minutes, metrics=metrics).frame
    copies = max(1, machines // GROUP)
    rng = np.random.default_rng(1)
    values = {}
    for name in metrics:
        whole = np.tile(group.values[name], (1, copies))
        noise = rng.standard_normal(whole.shape, np.float32)
        values[name] = whole * (1 + 0.002 * noise)
    names = tuple(f"node-{index:04d}" for index in range(machines))
    seconds = np.arange(len(whole)) + 1_700_000_000
    return Frame("bench", seconds, names, values)


def measure(machines: int) -> dict:
    """Return processor seconds of calls, and the peak of memory in bytes."""
    config = minder_config()
    metrics = tuple(config.detect.metrics)
    models = load_models(default_models(), config.denoise, metrics)
    minutes = WINDOW_MINUTES + LEARN_MINUTES + STEADY_CALLS
    frame = job_frame(machines, minutes, metrics)
    monitor = JobMonitor("bench", models, config)
    costs = []
    for minute in range(WINDOW_MINUTES, minutes):
        end = int(frame.ts[0]) + 60 * minute
        seen = frame.slice(end - 60 * WINDOW_MINUTES, end)
        begun = time.process_time()
        monitor.call(seen)
        costs.append(time.process_time() - begun)
    renewed, steady = costs[1:LEARN_MINUTES], costs[LEARN_MINUTES:]
    return {
        "machines": machines,
        "metrics": len(metrics),
        "first_seconds": costs[0],
        "renewed_seconds": statistics.median(renewed),
        "renewed_seconds_worst": max(renewed),
        "steady_seconds": statistics.median(steady),
        "steady_seconds_worst": max(steady),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    """Measure each size and write the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=int, default=0, help="measure this size in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one)))
        return
    rows = []
    for machines in SIZES:
        command = [sys.executable, "-m", "tests.benchmarks.bench_minder", "--one", str(machines)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout))
        print(json.dumps(rows[-1]), flush=True)
    facts = {"rows": rows}
    print(write_result("minder_speed", "measured-cpu", facts, "tests.benchmarks.bench_minder"))


if __name__ == "__main__":
    main()
