"""Planning of saves and loads at up to 65,536 ranks, in one process, against the targets.

python -m tests.benchmarks.bench_planner [--layouts NAME ...] [--repeats 5]

Each run is a process of its own, so that its peak memory is its own. The coordinator's time is that
from all ranks' encoded columns to all ranks' encoded plans; the network is not in it. Of several
runs the one with the least wall time counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

from tests.benchmarks.facts import write_result

MODULE = "tests.benchmarks.bench_planner"
TARGETS = {"gpt-70b-2400": 1.5, "gpt-70b-4800": 3.0, "gpt-405b-8960": 6.0}
"""Seconds by the clock of a first plan."""
MAX_RSS = 2e9
"""Bytes, up to 8,960 ranks."""
LARGE = 20_000
"""Ranks over which one run has to do, and no load is planned: it would take minutes and 3 GB."""
MAX_EXPONENT = 1.1
MAX_US_PER_ITEM = 3.0
MAX_CACHED_S = {"4 ranks": 5e-3, "gpt-405b-8960": 50e-3}
MILLION = "million-shards"
MAX_MILLION = {"metadata_bytes": 64e6, "decode_metadata_s": 1.0}


def layouts() -> dict[str, Any]:
    """Return all layouts by name: those of the simulator and one of a million shards."""
    from tests.benchmarks.planner.layouts import GPT_70B, LAYOUTS, Layout

    return {**LAYOUTS, MILLION: Layout(GPT_70B, dp=1024, rows=True)}


def run_one(name: str) -> None:
    """Simulate one layout and print its figures as JSON."""
    from tests.benchmarks.planner.simulate import simulate

    layout = layouts()[name]
    print(json.dumps(simulate(layout, load=layout.ranks <= LARGE).summary))


def measured(name: str, repeats: int) -> dict[str, Any]:
    """Return the figures of the quickest of several processes."""
    runs = []
    for _ in range(repeats):
        command = [sys.executable, "-m", MODULE, "--one", name]
        load = os.getloadavg()[0]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        runs.append({"load_before": load, **json.loads(done.stdout)})
    best = min(runs, key=lambda run: float(run["plan_wall_s"]))
    return {**best, "plan_wall_s_of_all_runs": [run["plan_wall_s"] for run in runs]}


def cached_seconds_at_four_ranks() -> float:
    """Return the median seconds in which four signatures are compared and a plan is found."""
    from planish.checkpoint.format.items import Columns
    from planish.checkpoint.plan.save import SPLIT_BYTES, plan_save
    from planish.checkpoint.save.agree import plan_key
    from tests.benchmarks.planner.layouts import GPT_70B, Layout

    columns: list[Columns] = list(Layout(GPT_70B, dp=4, rows=True).columns())
    signatures = [one.signature() for one in columns]
    cache = {plan_key(signatures, split_bytes=SPLIT_BYTES): plan_save(columns)}
    seconds = []
    for _ in range(9):
        began = time.perf_counter()
        mine = columns[0].signature()
        found = cache.get(plan_key([mine, *signatures[1:]], split_bytes=SPLIT_BYTES))
        seconds.append(time.perf_counter() - began)
        assert found is not None
    return float(np.median(seconds))


def verdicts(results: dict[str, Any], cached: float) -> dict[str, Any]:
    """Compare the figures with the targets."""
    made: dict[str, Any] = {
        f"{name}: first plan by the clock, s": (results[name]["plan_wall_s"], limit)
        for name, limit in TARGETS.items()
        if name in results
    }
    made["cached plan at 4 ranks, s"] = (cached, MAX_CACHED_S["4 ranks"])
    for name in TARGETS:
        if name in results:
            one = results[name]
            made[f"{name}: us per item"] = (one["plan_cpu_us_per_item"], MAX_US_PER_ITEM)
            made[f"{name}: peak memory, bytes"] = (one["peak_rss_bytes"], MAX_RSS)
    if "gpt-405b-8960" in results:
        seconds = results["gpt-405b-8960"]["wall_s"]["cached_plan"]
        made["gpt-405b-8960: cached plan, s"] = (seconds, MAX_CACHED_S["gpt-405b-8960"])
    if MILLION in results:
        one = results[MILLION]
        per_million = 1e6 / one["shards"]
        size = (one["metadata_bytes"] - one["checksum_bytes"]) * per_million
        made["metadata of a million shards without checksums, bytes"] = (
            size,
            MAX_MILLION["metadata_bytes"],
        )
        made["decoding the metadata of a million shards, s"] = (
            one["wall_s"]["decode_metadata"] * per_million,
            MAX_MILLION["decode_metadata_s"],
        )
    grown = [results[name] for name in results if name.startswith("gpt-")]
    if len(grown) > 1:
        sizes, seconds = (np.log([run[key] for run in grown]) for key in ("items", "plan_cpu_s"))
        made["exponent of the seconds in the items"] = (
            float(np.polyfit(sizes, seconds, 1)[0]),
            MAX_EXPONENT,
        )
    return {
        name: {"measured": round(float(value), 6), "target": limit, "met": bool(value <= limit)}
        for name, (value, limit) in made.items()
    }


def show(results: dict[str, Any], checks: dict[str, Any]) -> None:
    """Print the figures and the verdicts."""
    head = ("layout", "ranks", "items", "plan s", "cpu s", "us/item", "share s", "RSS MB")
    print(("{:<18}{:>7}{:>10}" + "{:>9}" * 5).format(*head))
    for name, run in results.items():
        row = (run["plan_wall_s"], run["plan_cpu_s"], run["plan_cpu_us_per_item"])
        more = run["cpu_s"].get("share", float("nan")), run["peak_rss_bytes"] / 1e6
        print(
            f"{name:<18}{run['ranks']:>7.0f}{run['items']:>10.0f}"
            + "".join(f"{value:>9.2f}" for value in (*row, *more))
        )
    for name, check in checks.items():
        word = "met" if check["met"] else "MISSED"
        print(f"{word:<7}{name}: {check['measured']:g} (at most {check['target']:g})")


def main() -> int:
    """Measure all layouts, compare them with the targets, write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one", help="simulate one layout in this process")
    parser.add_argument("--layouts", nargs="+", default=list(layouts()))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if options.one:
        run_one(options.one)
        return 0
    cached = cached_seconds_at_four_ranks()
    results = {
        name: measured(name, 1 if layouts()[name].ranks > LARGE else options.repeats)
        for name in options.layouts
    }
    checks = verdicts(results, cached)
    show(results, checks)
    path = write_result("planner", "simulated", {"layouts": results, "targets": checks}, MODULE)
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
