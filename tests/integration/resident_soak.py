"""Run many iterations in one task, and look whether it grows or slows down.

`python -m tests.integration.resident_soak --iterations 200` prints a row for each tenth of the
run, in medians, and exits 1 where the last tenth has more memory, descriptors or threads than the
second by more than `GROWTH`, or where its iterations take that much longer than the first twenty.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planish.base.config import config_sha256
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.run.stage import read_run
from tests.integration.resident_equal import WAYS, run
from tests.processes import below

GROWTH = 1.05


@dataclass
class Sample:
    """What all processes of the task have at the end of an iteration."""

    seconds: float
    """Since the end of the iteration before."""
    bytes: int
    descriptors: int
    threads: int


def sample(pid: int, seconds: float) -> Sample:
    """Look at a process and at all that it has started."""
    found = Sample(seconds, 0, 0, 0)
    for each in [pid, *below(pid)]:
        try:
            status = Path(f"/proc/{each}/status").read_text()
            fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
            found.bytes += 1024 * int(fields["RssAnon"].split()[0])
            found.threads += int(fields["Threads"])
            found.descriptors += sum(1 for _ in Path(f"/proc/{each}/fd").iterdir())
        except (OSError, KeyError):
            continue
    return found


def soak(root: str, iterations: int) -> list[Sample]:
    """Go on from the first iteration of a run with the others in one task."""
    policy, config = layout.policy(root, 0), read_run(root)["config"]
    line = [sys.executable, "-m", "planish.run", "iterate", "--root", root]
    line += ["--config-sha256", config_sha256(config), "--number", "1"]
    line += ["--count", str(iterations), "--offset", "0", "--num-shards", "2", "--state-pin", ""]
    line += ["--policy-pin", read_manifest(policy).ref(policy).pin()]
    samples: list[Sample] = []
    with subprocess.Popen(line, stderr=subprocess.DEVNULL) as task:
        since = time.monotonic()
        for iteration in range(1, iterations + 1):
            ends = Path(layout.policy(root, iteration).removeprefix("file://")) / "manifest.json"
            while not ends.exists() and task.poll() is None:
                time.sleep(0.005)
            if task.poll():
                raise SystemExit(f"the task ended with {task.returncode} in {iteration}")
            now = time.monotonic()
            samples.append(sample(task.pid, now - since))
            since = now
    return samples


def median(samples: Sequence[Sample], name: str) -> float:
    """Return the median of a field."""
    return statistics.median(getattr(each, name) for each in samples)


def main(argv: Sequence[str]) -> int:
    """Soak; 0 where nothing grows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--preset", default="dapo-tiny")
    parser.add_argument("--way", choices=WAYS, default="one rank")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name) / "root"
        # What comes before the iterations; the task begins anew with the first of them.
        # A small model may end with all of its answers right, and must go on.
        settings = (*WAYS[options.way], "rollout.max_iterations_without_signal=0")
        run(root, options.preset, 1, settings, "--resident", "1")
        for iteration in (*root.glob("iterations/*"), root / "policies/00001", root / "states"):
            subprocess.run(["rm", "-rf", str(iteration)], check=True)
        samples = soak(root.as_uri(), options.iterations)
    tenth = max(1, options.iterations // 10)
    print(f"{'iterations':<12}{'seconds':>9}{'MB':>9}{'descriptors':>13}{'threads':>9}")
    for first in range(0, options.iterations, tenth):
        part = samples[first : first + tenth]
        print(
            f"{first + 1:>4}-{first + len(part):<7}{median(part, 'seconds'):>9.3f}"
            f"{median(part, 'bytes') / 1e6:>9.1f}{median(part, 'descriptors'):>13.0f}"
            f"{median(part, 'threads'):>9.0f}"
        )
    early, late = samples[tenth : 2 * tenth], samples[-tenth:]
    # The first iteration opens trainer and engine.
    pairs = {name: (median(early, name), median(late, name)) for name in Sample.__annotations__}
    pairs["seconds"] = (median(samples[1:20], "seconds"), median(late, "seconds"))
    grown = [name for name, (before, after) in pairs.items() if after > GROWTH * before]
    print(f"grown: {grown or 'nothing'}")
    return int(bool(grown))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
