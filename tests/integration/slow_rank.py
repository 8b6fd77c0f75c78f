"""Gangs of gloo ranks of which one is slowed, and quiet ones: who is named, and after how long.

    python -m tests.integration.slow_rank --sizes 2,4 --quiet 10 --out FILE.json

A gang is a train task under torchrun as the stage starts it, of which the layers of one rank take
twice as long (`slowed_rank`); nothing asks a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from planish import store
from planish.records import layout
from planish.records.io import read_manifest
from planish.stages.train.ranks.job import TrainJob, write_job
from planish.store.documents import read_json
from tests.processes import below
from tests.unit.stages.train.runs import add_iteration, start_run, tiny_config

LONGEST_SECONDS = 180.0
MODEL = {"num_layers": 4, "hidden_size": 128, "head_dim": 32}


def gang_job(folder: Path, size: int, **train) -> TrainJob:
    """Return a task that trains for longer than any test lasts."""
    changes = {"tokens_per_microbatch": 512, "num_passes": 5000, **train}
    tiny = start_run(folder.as_uri(), tiny_config(**changes), **MODEL)
    add_iteration(tiny, 1)
    rewards = layout.rewards(tiny.root, 1)
    return TrainJob(
        root=tiny.root,
        config={**tiny.config, "train": {**tiny.config["train"], "num_processes": size}},
        config_sha256=tiny.digest,
        iteration=1,
        num_shards=2,
        policy_pin=tiny.policy_pin,
        state_pin="",
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )


@contextlib.contextmanager
def gang(job: TrainJob, size: int, log: Path, slow: int | None = None):
    """Start the ranks of a job under torchrun; they end with the block.

    Rank `slow` becomes slow once the file `slow` lies beside the log.
    """
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    line += ["--nproc-per-node", str(size), "-m", "tests.integration.slowed_rank", write_job(job)]
    facts = {"SLOW_RANK": str(slow), "SLOW_FILE": str(log.with_name("slow"))}
    with (
        log.open("wb") as file,
        subprocess.Popen(line, stdout=file, stderr=file, env=os.environ | facts) as process,
    ):
        try:
            yield process
        finally:
            for pid in below(process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.terminate()


def rank_process(launcher: int, rank: int) -> int:
    """Wait for a rank of a launcher and return its process id."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for pid in below(launcher):
            with contextlib.suppress(OSError):
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"RANK={rank}".encode() in variables:
                    return pid
        time.sleep(0.1)
    raise AssertionError(f"rank {rank} did not start")


def wait_for_training(log: Path, size: int) -> None:
    """Wait until every rank stands before its first step."""
    deadline = time.monotonic() + 300
    while log.read_text().count("rank leaves before its next step") < size:
        assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


def named(root: str) -> list[str]:
    """Return what was found slow under a root, as the metric of its alert says it."""
    alerts = [uri for uri in store.list_uris(layout.alerts(root)) if uri.endswith(".json")]
    return [read_json(uri)["metric"] for uri in alerts]


def one_gang(size: int, *, slow: int | None, healthy_seconds: float, seconds: float) -> dict:
    """Run one gang; a rank is slow after `healthy_seconds`, for at most `seconds`."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        job = gang_job(folder / "run", size)
        with gang(job, size, folder / "log", slow) as process:
            wait_for_training(folder / "log", size)
            time.sleep(healthy_seconds)
            early = named(job.root)
            if slow is not None:
                (folder / "slow").touch()
            began = time.monotonic()
            while process.poll() is None and time.monotonic() - began < seconds:
                if slow is not None and named(job.root):
                    break
                time.sleep(0.5)
            spent, found = time.monotonic() - began, named(job.root)
            is_alive = process.poll() is None
        lines = [line for line in (folder / "log").read_text().splitlines() if "slow rank=" in line]
    return {
        "ranks": size,
        "slow_rank": slow,
        "named_early": early,
        "named": found,
        "seconds": round(spent, 1),
        "alive": is_alive,
        "lines": lines,
    }


def is_right(result: dict) -> bool:
    """Tell whether a slow rank and nobody else was named, and none in a quiet gang."""
    names = [metric.rpartition(" ")[2] for metric in result["named"]]
    wanted = [] if result["slow_rank"] is None else [str(result["slow_rank"])]
    return result["alive"] and not result["named_early"] and names == wanted


def main() -> int:
    """Run all gangs and print one line of JSON each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="2,4")
    parser.add_argument("--slow", type=int, default=1, help="rounds of slow gangs")
    parser.add_argument("--quiet", type=int, default=10, help="quiet gangs, in turns of each size")
    parser.add_argument("--healthy", type=float, default=60.0, help="seconds before a rank is slow")
    parser.add_argument("--seconds", type=float, default=LONGEST_SECONDS)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    plans = [(size, size - 1, healthy) for size in sizes for healthy in (given.healthy, 0.0)]
    plans *= given.slow
    plans += [(sizes[number % len(sizes)], None, 0.0) for number in range(given.quiet)]
    results = []
    for size, slow, healthy in plans:
        results.append(one_gang(size, slow=slow, healthy_seconds=healthy, seconds=given.seconds))
        results[-1]["healthy_seconds"] = healthy
        print(json.dumps({**results[-1], "right": is_right(results[-1])}), flush=True)
    if given.out:
        given.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(not all(map(is_right, results)))


if __name__ == "__main__":
    raise SystemExit(main())
