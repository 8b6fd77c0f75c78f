"""The iterations of one task, one after the other, as each of its ranks runs them.

Every iteration goes through the functions of the stages rollout, reward, train and checkpoint, and
each writes the records, the metrics and the log that it writes as a task of its own. Rank r samples
every shard whose number leaves r, and the first rank does what one process does: it judges, exports
and evaluates. Whoever comes after a task that was cut off finds the finished parts done.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from threading import Event

from planish.base.errors import (
    EXIT_CONFIG,
    EXIT_TRANSIENT,
    ConfigError,
    PeerLost,
    PlanishError,
)
from planish.base.parallel import SINGLE, Ranks, join, local_rank, pick_device
from planish.base.startup import spare_collections
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.run.signals import Terminated
from planish.run.stage import Context, Outcome, execute, is_stopped
from planish.run.update import Pins
from planish.stages.evaluate.iteration import evaluate_iteration
from planish.stages.export.stage import export, passed_through
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import Residents
from planish.stages.reward.stage import reward
from planish.stages.rollout.stage import sample
from planish.stages.train.ranks.boundaries import Sigterm
from planish.stages.train.ranks.job import TrainJob
from planish.stages.train.ranks.worker import run_rank, train_iteration
from planish.stages.train.stage import train_once

SAMPLING_SECONDS = 12 * 3600.0
"""Longest wait of a rank for others that still sample, judge or export."""


def run_block(block: Block, ranks: Ranks = SINGLE, asked: Event | None = None) -> Pins:
    """Run the iterations of a block; every rank calls it.

    Raises:
        SystemExit: a stage has failed, with its code, which its log explains.
    """
    device = pick_device(block.train.device, ranks.rank)
    residents = Residents(ranks, device, block.config)
    pins = Pins(block.policy_pin, block.state_pin)
    try:
        for iteration in range(block.iteration, block.iteration + block.count):
            pins = _run_iteration(block, iteration, pins, ranks, residents, asked)
    finally:
        residents.close()
    return pins


def _run_iteration(
    block: Block,
    iteration: int,
    pins: Pins,
    ranks: Ranks,
    residents: Residents,
    asked: Event | None,
) -> Pins:
    """Run one iteration; returns the same pins on every rank."""
    policy_pin, state_pin = pins

    def task(stage: str, work: Callable[[Context], Outcome], shard: int = 0) -> Outcome:
        def without_artifacts(context: Context) -> Outcome:
            return replace(work(context), refs={})

        digest = block.config_sha256
        return execute(
            stage, without_artifacts, root=block.root, config_sha256=digest, outputs={},
            iteration=iteration, shard=shard,
        )  # fmt: skip

    residents.refresh(policy_pin)
    for shard in ranks.share(block.num_shards):
        task(
            "rollout",
            lambda context: sample(
                context, block.num_shards, policy_pin, state_pin, residents.serve
            ),
            shard,
        )
    if ranks.is_first:
        evaluate_iteration(block.root, block.config_sha256, iteration, policy_pin, residents.serve)
    residents.rest()
    ranks.barrier()
    if ranks.is_first:
        task("reward", lambda context: reward(context, block.num_shards, policy_pin))
    ranks.barrier()
    rewards = layout.rewards(block.root, iteration)
    job = TrainJob(
        root=block.root,
        config=block.config,
        config_sha256=block.config_sha256,
        iteration=iteration,
        num_shards=block.num_shards,
        policy_pin=policy_pin,
        state_pin=state_pin,
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )

    def train(_: Context | None = None) -> Outcome:
        return train_once(job, lambda: train_iteration(job, ranks, asked, residents.trainer))

    trained = task("train", train) if ranks.is_first else train()
    state_pin = str(trained.values["state_pin"])
    stopped = is_stopped(block.root, iteration)
    if ranks.is_first:
        task(
            "checkpoint",
            lambda context: (
                passed_through(policy_pin) if stopped else export(context, policy_pin, state_pin)
            ),
        )
    ranks.barrier()
    if not stopped:
        place = layout.policy(block.root, iteration)
        policy_pin = read_manifest(place).ref(place).pin()
        residents.exported(policy_pin, state_pin)
    return Pins(policy_pin, state_pin)


def block_rank(block: Block) -> tuple[Ranks, str]:
    """Run a block as one of several ranks; returns its pins as JSON."""
    config = block.train
    device = pick_device(config.device, local_rank())
    ranks = join(device, timeout_seconds=max(config.timeout_seconds, SAMPLING_SECONDS))
    try:
        return ranks, json.dumps(run_block(block, ranks, Sigterm()))
    except Terminated:
        raise
    except SystemExit as end:
        # The log of the stage holds the error; its kind gives the task the same exit code.
        code = int(end.code or 0)
        kind = {EXIT_CONFIG: ConfigError, EXIT_TRANSIENT: PeerLost}.get(code, PlanishError)
        raise kind(f"a stage of this task failed with exit code {end.code}") from None


def main(argv: list[str]) -> int:
    """Run one rank of a block."""
    return run_rank(argv[0], Block, block_rank)


if __name__ == "__main__":
    spare_collections()
    raise SystemExit(main(sys.argv[1:]))
