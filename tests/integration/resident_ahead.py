"""Two ranks that sample ahead of one that trains: prompts, staleness, accuracy and time.

`python -m tests.integration.resident_ahead` prints a line for each measurement and exits 1 where

* a killed task leaves other records than an undisturbed one, or a prompt that no iteration has, or
  that two have; as `resident_kill`, on a MinIO, at random requests (`--rounds`);
* a token is trained on that is more than one policy version old;
* the held-out accuracy after equally many rollouts differs from that of rollouts in turn by more
  than chance (`--seeds`; Student's t of two means, 95 %);
* a task whose rollouts and training last `--seconds` each by a sleep is less than 1.5x as fast.
"""

import argparse
import json
import math
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from planish.base.config import config_sha256
from planish.records import layout
from planish.records.io import read_set
from planish.records.manifest import Manifest, read_manifest
from planish.records.reports import EvalReport, read_report
from planish.records.rollouts import RolloutSet
from planish.run.stage import read_run
from planish.stages.iterate.job import Block
from planish.stages.prepare.run_file import start_after
from planish.stages.rollout.job import read_data
from planish.stages.train.stage import launch
from tests.integration.resident_equal import QUICK, run
from tests.integration.resident_kill import (
    VICTIMS,
    copy_start,
    count_requests,
    killed_round,
    site_of,
)

THREE = ("train.num_processes=3", "algorithm.correction=token_truncate")
AHEAD = (*THREE, "rollout.ahead=1", "train.split=2:1")
SEEDS = "101,102,103"
"""Fixed before the first measurement."""
STUDENT = {2: 4.303, 4: 2.776, 6: 2.447, 8: 2.306}
"""Degrees of freedom to the quantile 0.975 of Student's t."""
LEAST_SPEED = 1.5


def shards(root: str, iteration: int) -> list[tuple[str, Manifest]]:
    """Return places and manifests of the rollouts of an iteration."""
    places = [layout.rollouts(root, iteration, n) for n in range(read_run(root)["num_shards"])]
    return [(place, read_manifest(place)) for place in places]


def prompt_faults(root: str, iterations: int) -> list[str]:
    """Return which ordinals of the stream were consumed twice, or skipped."""
    found = [
        ordinal
        for iteration in range(1, iterations + 1)
        for _, manifest in shards(root, iteration)
        for ordinal in manifest.attributes["consumed"]
    ]
    cursor = read_data(start_after(root, iterations).state).cursor
    wanted = set(range(cursor["next"])) - set(cursor["pending"])
    twice = sorted({n for n in found if found.count(n) > 1})
    return [
        *(f"twice: {n}" for n in twice),
        *(f"lost: {n}" for n in sorted(wanted - set(found))),
        *(f"not in the state: {n}" for n in sorted(set(found) - wanted)),
    ]


def staleness(root: str, iterations: int) -> list[int]:
    """Return by how many versions the oldest token of each iteration is older than its trainer."""
    ages = []
    for iteration in range(1, iterations + 1):
        found = []
        for uri, manifest in shards(root, iteration):
            tokens = read_set(RolloutSet, uri, sha256=manifest.sha256).policy_version.values
            found += [manifest.attributes["policy_version"], *tokens.tolist()]
        ages.append(iteration - 1 - min(found))
    return ages


def kill_rounds(rounds: int, iterations: int, seed: int) -> int:
    """Kill a rank, and then something more, again and again; return the rounds with faults."""
    draw, bad = random.Random(seed), 0
    with (
        tempfile.TemporaryDirectory() as name,
        site_of(Path(name), "dapo-tiny", AHEAD, iterations, size=iterations) as site,
    ):
        folder = Path(name)
        count_requests(site, folder)
        whole = staleness("s3://kill/whole", iterations)
        bad += max(whole) > 1
        print(f"undisturbed: {site.num_requests} requests, staleness {whole}", flush=True)
        for number in range(rounds):
            place = folder / f"round-{number}"
            place.mkdir()
            victims = ("process", draw.choice(VICTIMS))
            told, faults = killed_round(site, place, victims, draw)
            if not faults:
                root = f"s3://kill/{place.name}"
                faults = prompt_faults(root, iterations)
                faults += ["stale"] * (max(staleness(root, iterations)) > 1)
            print(f"round {number}: {', '.join(told)}: {faults or 'right'}", flush=True)
            bad += bool(faults)
    return bad


def accuracies(seeds: Sequence[int], iterations: int) -> int:
    """Train from each seed in both ways; return 1 where the means differ by more than chance."""
    found: dict[str, list[float]] = {"in turn": [], "ahead": []}
    for seed in seeds:
        for way, settings in (("in turn", THREE), ("ahead", AHEAD)):
            with tempfile.TemporaryDirectory() as name:
                place, options = Path(name) / "run", ("--resident", str(iterations))
                run(place, "dapo-tiny", iterations, settings, *options, "--seed", str(seed))
                root = place.as_uri()
                before, after = (
                    read_report(EvalReport, f"{layout.evaluation(root, version)}/{layout.REPORT}")
                    for version in (0, iterations)
                )
                tokens = sum(
                    int(manifest.attributes["metrics"]["num_generated_tokens"])
                    for iteration in range(1, iterations + 1)
                    for _, manifest in shards(root, iteration)
                )
                ages = staleness(root, iterations)
            start, end = before.scalars["accuracy"], after.scalars["accuracy"]
            found[way].append(end)
            print(
                f"seed {seed} {way:<8} accuracy {start:.4f} -> {end:.4f} after {tokens} tokens, "
                f"staleness {max(ages)}",
                flush=True,
            )
    one, other = found.values()
    gap = statistics.mean(other) - statistics.mean(one)
    error = math.sqrt((statistics.variance(one) + statistics.variance(other)) / len(one))
    limit = STUDENT[2 * len(one) - 2] * error
    print(f"ahead - in turn: {gap:+.4f}, chance explains {limit:.4f}", flush=True)
    return int(abs(gap) > limit)


def padded_seconds(folder: Path, settings: Sequence[str], seconds: float, iterations: int) -> float:
    """Return the time from the first rollout of a task to its last export."""
    source, root = folder / "start", (folder / "run").as_uri()
    run(source, "dapo-tiny", 1, (*QUICK, *settings), "--resident", "1")
    copy_start(source, root)
    facts, policy = read_run(root), layout.policy(root, 0)
    pin = read_manifest(policy).ref(policy).pin()
    block = Block(
        root, facts["config"], config_sha256(facts["config"]), 1, facts["num_shards"], pin, "", "",
        count=iterations, earlier_pin=pin,
    )  # fmt: skip
    os.environ["SLOW_SECONDS"] = str(seconds)
    launch(block, 3, "tests.integration.ahead_rank")
    entries = [json.loads(path.read_text()) for path in (folder / "run" / "logs").glob("*.json")]
    ends = [entry["start_seconds"] + entry["seconds"] for entry in entries]
    return max(ends) - min(entry["start_seconds"] for entry in entries)


def speed(seconds: float, iterations: int) -> int:
    """Compare both ways where rollouts and training last equally long; return 1 if too slow."""
    found = []
    for way, settings in (("in turn", THREE), ("ahead", AHEAD)):
        with tempfile.TemporaryDirectory() as name:
            found.append(padded_seconds(Path(name), settings, seconds, iterations))
        print(f"{iterations} iterations of 2 x {seconds} s {way:<8}{found[-1]:.2f} s", flush=True)
    print(f"ahead is {found[0] / found[1]:.2f}x as fast", flush=True)
    return int(found[0] < LEAST_SPEED * found[1])


def main(argv: Sequence[str]) -> int:
    """Measure what the command line asks for; 0 where all is right."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--iterations", type=int, default=4, help="of a round")
    parser.add_argument("--seeds", default=SEEDS, help="of the runs whose accuracy is compared")
    parser.add_argument("--length", type=int, default=12, help="iterations of these")
    parser.add_argument("--seconds", type=float, default=4.0, help="of rollouts, of training; 0")
    options = parser.parse_args(argv)
    bad = speed(options.seconds, 8) if options.seconds else 0
    if options.seeds:
        bad += accuracies([int(seed) for seed in options.seeds.split(",")], options.length)
    if options.rounds:
        bad += kill_rounds(options.rounds, options.iterations, options.seed)
    print(f"faults: {bad}")
    return int(bad > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
