"""One run in one process: the stages of a pipeline, called one after the other.

    python -m tests.benchmarks.studies.runner '<arm as JSON>' <seed>

A process that is started again goes on after the last finished iteration.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import planish
from planish.base.config import config_sha256, resolve_config
from planish.records import layout
from planish.records.io import read_manifest, read_set
from planish.records.refs import parse_pin
from planish.records.reports import EvalReport, read_report
from planish.records.rollouts import FinishReason, RolloutSet
from planish.run.stage import PathArtifact
from planish.stages.prepare.run_file import RunFile, StartPins, write_run_file
from planish.store.documents import read_json
from tests.benchmarks.facts import commit
from tests.benchmarks.studies.arms import (
    SHARED,
    Arm,
    base_root,
    result_file,
    run_root,
    task_tables,
)
from tests.benchmarks.studies.generated import dataset_file

BASE = "base"
"""Name of the arm that only makes prompts and the initial policy."""


def write_json(path: Path, value: Any) -> None:
    """Write JSON so that a reader sees the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(value, sort_keys=True) + "\n", "utf-8")
    part.replace(path)


class Stages:
    """Calls stages on one run root and keeps what they say and what they cost."""

    def __init__(self, root: Path, config: dict[str, dict[str, Any]], start: StartPins) -> None:
        self.root, self._folder = root.as_uri(), root / "artifacts"
        self.digest = config_sha256(config)
        write_run_file(self.root, RunFile(config, planish.__version__, "", start, start))

    def artifact(self, name: str) -> PathArtifact:
        """Return the artifact file of that name."""
        return PathArtifact(str(self._folder / name))

    def call(self, stage: str, run: Callable[..., Any], **options: Any) -> tuple[Any, Any]:
        """Run a stage; returns its output parameters and its metrics with seconds."""
        wall, cpu = time.perf_counter(), time.process_time()
        if "metrics" in inspect.signature(run).parameters:
            options["metrics"] = self.artifact(f"{stage}-metrics")
        values = run(root=self.root, config_sha256=self.digest, **options)
        log = read_json(layout.stage_log(self.root, stage, options.get("number", 0), 0))
        metrics = dict(log["metrics"])
        metrics["wall_seconds"] = time.perf_counter() - wall
        metrics["cpu_seconds"] = time.process_time() - cpu
        return values, metrics

    def evaluate(self, pin: str) -> dict[str, float]:
        """Return the scores of one policy on the held-out prompts."""
        from planish.stages.evaluate.stage import SAMPLED, run

        _, metrics = self.call(
            "evaluate",
            run,
            baseline_pin=pin,
            policy_pin=pin,
            evaluation=self.artifact("evaluation"),
        )
        uri, digest = parse_pin(pin)
        version = int(read_manifest(uri, sha256=digest).attributes["policy_version"])
        folder = layout.evaluation(self.root, version)
        scores = dict(read_report(EvalReport, f"{folder}/report.json").scalars)
        sampled = read_set(RolloutSet, f"{folder}/{SAMPLED}")
        # The mean of -log p over tokens that the policy itself sampled estimates its entropy.
        scores["entropy"] = -float(np.mean(sampled.rollout_logprobs.values))
        scores["wall_seconds"] = metrics["wall_seconds"]
        return scores


def make_base(arm: Arm, seed: int) -> dict[str, Any]:
    """Make prompts and initial policy of a task; returns the content of the result file."""
    from planish.stages.curate.stage import run as curate
    from planish.stages.sft.stage import run as sft

    definition = arm.definition(seed)
    root = base_root(arm.task, seed)
    dataset = task_tables(arm.task)["study"].get("dataset")
    if dataset:
        dataset_file(dataset)
    stages = Stages(root, resolve_config(definition["tables"]), StartPins())
    prompts = stages.artifact("prompts")
    stages.call("curate", curate, prompts=prompts, report=stages.artifact("report"))
    start, found = stages.call("sft", sft, prompts=prompts, policy=stages.artifact("policy"))
    return {
        "policy_pin": start.policy_pin,
        "sft": found,
        "evaluations": [{"iteration": 0, **stages.evaluate(start.policy_pin)}],
    }


@dataclass
class Training:
    """The iterations of one run."""

    stages: Stages
    policy_pin: str
    state_pin: str = ""
    number: int = 0
    """Iterations done, those that only pretrain a critic included."""

    def iterate(self) -> dict[str, Any]:
        """Run one iteration; returns the metrics of its stages."""
        from planish.stages.export.stage import run as checkpoint
        from planish.stages.reward.stage import run as reward
        from planish.stages.rollout.stage import run as rollout
        from planish.stages.train.stage import run as train

        stages, policy_pin = self.stages, self.policy_pin
        place = {"number": self.number + 1, "offset": 0}
        shards = {**place, "num_shards": 1, "policy_pin": policy_pin}
        rewards, state = stages.artifact("rewards"), stages.artifact("state")
        row: dict[str, Any] = {"iteration": place["number"]}
        _, row["rollout"] = stages.call(
            "rollout",
            rollout,
            **shards,
            shard=0,
            state_pin=self.state_pin,
            rollouts=stages.artifact("rollouts"),
        )
        row["finished_lengths"] = finished_lengths(stages.root, place["number"])
        _, row["reward"] = stages.call("reward", reward, **shards, rewards=rewards)
        trained, row["train"] = stages.call(
            "train", train, **shards, state_pin=self.state_pin, rewards=rewards, state=state
        )
        exported, row["checkpoint"] = stages.call(
            "checkpoint",
            checkpoint,
            **place,
            policy_pin=policy_pin,
            state=state,
            policy=stages.artifact("policy"),
        )
        self.policy_pin, self.state_pin = exported.policy_pin, trained.state_pin
        row["pins"] = {"policy_pin": self.policy_pin, "state_pin": self.state_pin}
        self.number += 1
        return row


def finished_lengths(root: str, iteration: int) -> list[int]:
    """Return the tokens of each response that an iteration has finished, all its windows."""
    rollouts = read_set(RolloutSet, layout.rollouts(root, iteration, 0))
    lengths = rollouts.response_tokens.lengths[rollouts.finish != FinishReason.WINDOW]
    return [int(length) for length in lengths]


def is_pretraining(row: dict[str, Any]) -> bool:
    """Tell whether an iteration trained the critic only."""
    return bool(row["train"].get("pretraining", 0.0))


def train_arm(arm: Arm, seed: int) -> dict[str, Any]:
    """Train one arm from the common start; returns the content of the result file."""
    definition = arm.definition(seed)
    base = json.loads(result_file(Arm(arm.task, BASE), seed).read_text("utf-8"))
    root = run_root(arm, seed)
    if not (root / "prompts").exists():
        shutil.copytree(base_root(arm.task, seed) / "prompts", root / "prompts")
    start = StartPins(base["policy_pin"])
    stages = Stages(root, resolve_config(definition["tables"]), start)
    rows: list[dict[str, Any]] = []
    evaluations = list(base["evaluations"])
    training = Training(stages, start.policy)
    progress = root / "progress.json"
    if progress.exists():
        saved = json.loads(progress.read_text("utf-8"))
        rows, evaluations = saved["rows"], saved["evaluations"]
        training = Training(stages, **rows[-1]["pins"], number=len(rows))
    while (done := sum(not is_pretraining(row) for row in rows)) < definition["iterations"]:
        row = training.iterate()
        rows.append(row)
        every = definition["evaluate_every"]
        if not is_pretraining(row) and ((done + 1) % every == 0):
            scores = stages.evaluate(training.policy_pin)
            evaluations.append({"iteration": row["iteration"], **scores})
        write_json(progress, {"rows": rows, "evaluations": evaluations})
    return {"start_pin": start.policy, "rows": rows, "evaluations": evaluations}


def shared_definition(definition: dict[str, Any]) -> dict[str, Any]:
    """Return what decides prompts and initial policy."""
    tables = definition["tables"]
    return {name: tables.get(name, {}) for name in (*SHARED, "evaluate", "run")}


def identity(arm: Arm, seed: int) -> dict[str, Any]:
    """Return what a finished run must have been asked for to count as this one."""
    definition = arm.definition(seed)
    return shared_definition(definition) if arm.name == BASE else definition


def is_finished(arm: Arm, seed: int) -> bool:
    """Tell whether a run stands finished with the present settings."""
    try:
        found = json.loads(result_file(arm, seed).read_text("utf-8"))
    except FileNotFoundError:
        return False
    return bool(found["definition"] == identity(arm, seed))


def _clear(arm: Arm, seed: int) -> None:
    """Remove a root that was begun with other settings."""
    root, asked = run_root(arm, seed), identity(arm, seed)
    marker = root / "definition.json"
    if root.exists() and (not marker.exists() or json.loads(marker.read_text()) != asked):
        shutil.rmtree(root)
    write_json(marker, asked)


def main(argv: list[str]) -> int:
    """Make one run and write its result file."""
    arm, seed = Arm.from_json(json.loads(argv[0])), int(argv[1])
    _clear(arm, seed)
    found = make_base(arm, seed) if arm.name == BASE else train_arm(arm, seed)
    head = {"arm": arm.name, "task": arm.task, "seed": seed, "commit": commit()}
    write_json(result_file(arm, seed), {**head, "definition": identity(arm, seed), **found})
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
