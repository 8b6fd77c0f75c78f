"""What a call of the monitor costs: all of a frame, and then minute by minute.

Frames of 15 minutes of seven metrics, made by the simulator; models as they come with the package.
The cold call is that of a new monitor; in the steady state each call sees one minute more, with
baselines learned and settled. Every size runs in a process of its own, whose peak of memory
is its own. The server's time is not in it.

    python -m tests.benchmarks.bench_minder
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import numpy as np

from tests.benchmarks.facts import write_result

SIZES = (64, 256, 512, 1024)
TARGETS = {64: (1.0, 0.1), 256: (4.0, 0.3), 1024: (20.0, 2.0)}
"""Machines to seconds of a cold and of a steady call."""
MEMORY_TARGET = 2 << 30
LEARN_MINUTES = 16


def measure(machines: int, rounds: int) -> dict:
    """Seconds of the cold call and of steady calls, and the peak of memory."""
    from planish.minder.detect.config import minder_config
    from planish.minder.detect.frame import Frame
    from planish.minder.detect.job_monitor import JobMonitor
    from planish.minder.detect.model_files import default_models, load_models
    from tests.minder_lab.simulator import simulate

    config = minder_config()
    metrics = config.detect.metrics
    models = load_models(default_models(), config.denoise, metrics)
    minutes = LEARN_MINUTES + rounds + 1
    # Groups of 64 machines, so that making the traces does not set the peak of memory.
    parts = [
        simulate(7, machines=min(64, machines), minutes=minutes, metrics=metrics).frame
        for _ in range(max(1, machines // 64))
    ]
    values = {
        name: np.concatenate([part.values[name] for part in parts], axis=1) for name in metrics
    }
    rng = np.random.default_rng(1)
    for name, array in values.items():
        array *= 1 + 0.002 * rng.standard_normal(array.shape, np.float32)
        values[name] = array
    names = tuple(f"node-{i:04d}" for i in range(machines))
    ts = np.arange(len(next(iter(values.values())))) + 1_700_000_000
    frame = Frame("bench", ts, names, values)
    del parts

    def call(monitor: JobMonitor, minute: int) -> float:
        end = int(ts[0]) + 60 * minute
        started = time.perf_counter()
        monitor.call(frame.slice(end - 900, end))
        return time.perf_counter() - started

    # The largest take long enough for one call to tell.
    colds = 3 if machines < 512 else 1
    cold = [call(JobMonitor("bench", models, config), 15 + i) for i in range(colds)]
    monitor = JobMonitor("bench", models, config)
    for minute in range(1, LEARN_MINUTES + 1):
        call(monitor, minute)
    steady = [call(monitor, LEARN_MINUTES + 1 + i) for i in range(rounds)]
    return {
        "machines": machines,
        "metrics": len(metrics),
        "cold_seconds": statistics.median(cold),
        "cold_seconds_range": [min(cold), max(cold)],
        "steady_seconds": statistics.median(steady),
        "steady_seconds_range": [min(steady), max(steady)],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def exponent(rows: list[dict], key: str) -> float:
    """Slope of the logarithm of the cost over that of the size."""
    sizes, costs = ([row[name] for row in rows] for name in ("machines", key))
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def in_process(machines: int, rounds: int) -> dict:
    command = [sys.executable, "-m", "tests.benchmarks.bench_minder", "--one", str(machines)]
    done = subprocess.run(
        [*command, "--rounds", str(rounds)], capture_output=True, text=True, check=True
    )
    row: dict = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--one", type=int, default=0, help="measure this size in this process")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.rounds)))
        return
    rows = []
    for machines in SIZES:
        row = in_process(machines, options.rounds)
        if machines in TARGETS:
            cold, steady = TARGETS[machines]
            row["targets"] = {"cold_seconds": cold, "steady_seconds": steady}
            row["held"] = {
                "cold": row["cold_seconds"] <= cold,
                "steady": row["steady_seconds"] <= steady,
                "memory": row["peak_bytes"] <= MEMORY_TARGET,
            }
        rows.append(row)
        print(json.dumps(row), flush=True)
    result = {
        "rows": rows,
        "exponent_cold": exponent(rows, "cold_seconds"),
        "exponent_steady": exponent(rows, "steady_seconds"),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    print(write_result("minder_speed", "measured-cpu", result, "tests.benchmarks.bench_minder"))


if __name__ == "__main__":
    main()
