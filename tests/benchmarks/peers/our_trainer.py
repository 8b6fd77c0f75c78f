"""DAPO as this project does it: one process that runs the stages of an iteration at each `go`.

`python -m tests.benchmarks.peers.our_trainer JOB.json`; rollout, reward, train and checkpoint are
called as the pipeline calls them, with record sets, train state and exported policy written.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import torch

from planish.models.policy import load_policy
from planish.records import layout
from planish.records.io import read_manifest
from planish.run.stage import PathArtifact
from planish.stages.export.stage import run as checkpoint
from planish.stages.reward.stage import run as reward
from planish.stages.rollout.stage import run as rollout
from planish.stages.train.stage import run as train
from tests.benchmarks.peers.turns import Turns

STAGES = ("rollout", "reward", "train", "checkpoint")


class Iterations:
    """A run whose root, prompts and first policy are there already."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.root, self.digest = job["root"], job["config_sha256"]
        self.artifacts = Path(job["folder"]) / "artifacts"
        start = layout.policy(self.root, 0)
        self.policy_pin, self.state_pin = read_manifest(start).ref(start).pin(), ""

    def run(self, number: int) -> dict[str, float]:
        """Do one iteration; returns the seconds of each stage."""

        def at(name: str) -> PathArtifact:
            return PathArtifact(str(self.artifacts / f"{number}-{name}"))

        of_run = {"root": self.root, "config_sha256": self.digest, "number": number, "offset": 0}
        times = [time.perf_counter()]
        common = {**of_run, "policy_pin": self.policy_pin}
        rollout(**common, shard=0, num_shards=1, state_pin=self.state_pin,
                rollouts=at("rollouts"), metrics=at("rollout"))  # fmt: skip
        times.append(time.perf_counter())
        reward(**common, num_shards=1, rewards=at("rewards"), metrics=at("reward"))
        times.append(time.perf_counter())
        trained = train(**common, num_shards=1, state_pin=self.state_pin, rewards=at("rewards"),
                        state=at("state"), metrics=at("train"))  # fmt: skip
        times.append(time.perf_counter())
        exported = checkpoint(**common, state=at("state"), policy=at("policy"))
        times.append(time.perf_counter())
        self.policy_pin, self.state_pin = exported.policy_pin, trained.state_pin
        return {
            name: later - earlier
            for name, earlier, later in zip(STAGES, times, times[1:], strict=False)
        }

    def result(self, number: int, seconds: dict[str, float]) -> dict[str, Any]:
        def metrics(name: str) -> dict[str, float]:
            found: dict[str, float] = json.loads(
                (self.artifacts / f"{number}-{name}").read_text("utf-8")
            )
            return found

        sampled, trained, scored = metrics("rollout"), metrics("train"), metrics("reward")
        return {
            "seconds": sum(seconds.values()),
            "stages": seconds,
            "policy": self.policy_pin,
            "accuracy": scored["accuracy_mean"],
            "num_rollouts": trained["num_rollouts"],
            "num_tokens": trained["num_tokens"],
            "generated_groups": sampled["num_generated_groups"],
        }


def main(path: str) -> None:
    torch.set_num_threads(1)
    job = json.loads(Path(path).read_text("utf-8"))
    iterations = Iterations(job)
    turns = Turns()
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    # The other side's imports are not timed either.
    for module in (
        "engines.transformers.engine",
        "stages.rollout.generate",
        "stages.train.ranks.worker",
        "stages.train.fsdp2",
    ):
        importlib.import_module(f"planish.{module}")
    load_policy(iterations.policy_pin, dtype=torch.float32)
    turns.ready()
    number = 0
    while turns.next():
        number += 1
        processor = time.process_time()
        seconds = iterations.run(number)
        processor = time.process_time() - processor
        turns.done({**iterations.result(number, seconds), "processor_seconds": processor})


if __name__ == "__main__":
    main(sys.argv[1])
