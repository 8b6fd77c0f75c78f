"""The iterations of one task, one after the other, as each of its ranks runs them.

Every iteration goes through the functions of the stages rollout, reward, train and checkpoint, and
each writes the records, the metrics and the log that it writes as a task of its own. Rank r samples
every shard whose number leaves r, and the first rank does what one process does: it judges, exports
and evaluates. While the next rollouts are sampled, the state of an update is committed and its
policy exported. Whoever comes after a task that was cut off finds the finished parts done.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import Event

from planish.base.parallel import SINGLE, Ranks, join, local_rank, pick_device
from planish.base.startup import spare_collections
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.run.signals import Terminated
from planish.run.stage import Context, Outcome, execute, is_stopped
from planish.run.stage_metrics import StageMetrics
from planish.run.update import Pins
from planish.stages.evaluate.iteration import evaluate_iteration
from planish.stages.export.stage import passed_through
from planish.stages.iterate.commit import LIMIT_SECONDS, Commit, export_policy, stage_error
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import Residents
from planish.stages.reward.stage import reward
from planish.stages.rollout.job import Start
from planish.stages.rollout.stage import sample
from planish.stages.train.ranks.boundaries import Sigterm
from planish.stages.train.ranks.job import JobResult, TrainJob
from planish.stages.train.ranks.worker import Trained, begin_iteration, run_rank
from planish.stages.train.stage import train_once

PACE = 0.5
"""The upload of a state is spread over this share of the time that rollouts have last taken; the
rest is for the export behind it."""
LEAVE_SECONDS = 10.0
"""What is still being committed has so long to end when the task ends too early."""


def run_block(block: Block, ranks: Ranks = SINGLE, asked: Event | None = None) -> Pins:
    """Run the iterations of a block; every rank calls it.

    Raises:
        SystemExit: a stage has failed, with its code, which its log explains.
    """
    device = pick_device(block.train.device, ranks.rank)
    residents = Residents(ranks, device, block.config)
    start = Start(Pins(block.policy_pin, block.state_pin))
    with StageMetrics("iterate", block.iteration, ranks.rank or None) as shown:
        # Were it for each stage, every one would wait for its last numbers to be scraped.
        shown.serve()
        try:
            for iteration in range(block.iteration, block.iteration + block.count):
                start = _run_iteration(block, iteration, start, ranks, residents, asked)
            return start.pins()
        except BaseException:
            start.leave(LEAVE_SECONDS)
            raise
        finally:
            shown.publish({})
            residents.close()


def _run_iteration(
    block: Block,
    iteration: int,
    start: Start,
    ranks: Ranks,
    residents: Residents,
    asked: Event | None,
) -> Start:
    """Run one iteration; returns what the next one starts from."""

    def task(stage: str, work: Callable[[Context], Outcome], shard: int = 0) -> Outcome:
        def without_artifacts(context: Context) -> Outcome:
            return replace(work(context), refs={})

        digest = block.config_sha256
        return execute(
            stage, without_artifacts, root=block.root, config_sha256=digest, outputs={},
            iteration=iteration, shard=shard,
        )  # fmt: skip

    residents.refresh(start)
    began = time.monotonic()
    opened = partial(residents.serve, start=start)
    for shard in ranks.share(block.num_shards):
        task("rollout", lambda context: sample(context, block.num_shards, start, opened), shard)
    is_last = iteration == block.iteration + block.count - 1
    residents.trainer.pace_seconds = 0.0 if is_last else PACE * (time.monotonic() - began)
    policy_pin, state_pin = residents.settle(start)
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
    begun: list[Trained] = []

    def work() -> JobResult:
        begun.append(begin_iteration(job, ranks, asked, residents.trainer))
        return JobResult(None, begun[0].metrics)

    def train(_: Context | None = None) -> Outcome:
        return train_once(job, work)

    outcome = task("train", train) if ranks.is_first else train()
    if begun:
        return Commit(job, begun[0])
    # An earlier attempt has trained, or the run was stopped before.
    is_open = not is_stopped(block.root, iteration)
    state_pin = str(outcome.values["state_pin"])
    if ranks.is_first and is_open:
        export_policy(job, state_pin)
    elif ranks.is_first:
        task("checkpoint", lambda context: passed_through(policy_pin))
    ranks.barrier()
    if is_open:
        place = layout.policy(block.root, iteration)
        policy_pin = read_manifest(place).ref(place).pin()
    return Start(Pins(policy_pin, state_pin))


def block_rank(block: Block) -> tuple[Ranks, str]:
    """Run a block as one of several ranks; returns its pins as JSON."""
    config = block.train
    device = pick_device(config.device, local_rank())
    ranks = join(device, timeout_seconds=max(config.timeout_seconds, LIMIT_SECONDS))
    try:
        return ranks, json.dumps(run_block(block, ranks, Sigterm()))
    except Terminated:
        raise
    except SystemExit as end:
        raise stage_error(end) from None


def main(argv: list[str]) -> int:
    """Run one rank of a block."""
    return run_rank(argv[0], Block, block_rank)


if __name__ == "__main__":
    spare_collections()
    raise SystemExit(main(sys.argv[1:]))
