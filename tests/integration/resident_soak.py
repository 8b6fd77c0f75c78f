"""Run many iterations in one task, and look whether it grows or slows down.

`python -m tests.integration.resident_soak --iterations 200` prints a row for each tenth of the
run, in medians, and exits 1 where the last tenth has more memory, descriptors or threads than the
second by more than `GROWTH`, or where its iterations take that much longer than the first twenty.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from planish.records import layout
from tests.integration.resident_equal import WAYS, run
from tests.integration.resident_kill import command, copy_start
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
    """Run all iterations of a root in one task."""
    samples: list[Sample] = []
    with subprocess.Popen(command(root, iterations), stderr=subprocess.DEVNULL) as task:
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
        before, root = Path(name) / "before", (Path(name) / "root").as_uri()
        # A small model may end with all of its answers right, and must go on.
        settings = (*WAYS[options.way], "rollout.max_iterations_without_signal=0")
        run(before, options.preset, 1, settings, "--resident", "1")
        copy_start(before, root)
        samples = soak(root, options.iterations)
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
