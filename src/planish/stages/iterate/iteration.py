"""The parts of one iteration of a resident task, each run as a task of its stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event

from planish.base.parallel import Ranks, patient, peers
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.run.pins import Pins
from planish.run.stage import Context, Outcome, execute, is_stopped
from planish.stages.evaluate.iteration import evaluate_iteration
from planish.stages.export.stage import passed_through
from planish.stages.iterate.commit import (
    LIMIT_SECONDS,
    Made,
    begin_commit,
    export_policy,
    stored,
)
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import Residents
from planish.stages.reward.stage import reward
from planish.stages.rollout.job import Start
from planish.stages.rollout.stage import sample
from planish.stages.train.ranks.job import JobResult, TrainJob
from planish.stages.train.ranks.worker import HeldTrainer, Trained, begin_iteration
from planish.stages.train.stage import train_once


def _task(
    block: Block, iteration: int, stage: str, work: Callable[[Context], Outcome], shard: int = 0
) -> Outcome:
    """Run a part of an iteration as a task of its stage."""

    def without_artifacts(context: Context) -> Outcome:
        return replace(work(context), refs={})

    digest = block.config_sha256
    return execute(
        stage, without_artifacts, root=block.root, config_sha256=digest, outputs={},
        iteration=iteration, shard=shard,
    )  # fmt: skip


def sample_shards(block: Block, iteration: int, start: Start, residents: Residents) -> None:
    """Sample and judge the shards of this rank's engine; every rank that samples calls it."""

    def work() -> None:
        for shard in residents.engines.share(block.num_shards):
            _task(
                block, iteration, "rollout",
                lambda context: sample(context, block.num_shards, start, residents.serve), shard,
            )  # fmt: skip

    residents.lead(work)


def evaluate(block: Block, iteration: int, policy_pin: str, residents: Residents) -> None:
    """Measure a policy by the first engine, before an iteration; every sampling rank calls this."""
    if residents.engines.is_first:
        place = block.root, block.config_sha256, iteration, policy_pin
        residents.lead(lambda: evaluate_iteration(*place, residents.serve))


def update(
    block: Block,
    iteration: int,
    sampled_pin: str,
    before: Made,
    ranks: Ranks,
    held: HeldTrainer,
    *,
    asked: Event | None,
) -> Made:
    """Judge the rollouts of an iteration, train on them, and begin to commit; every rank calls it.

    Args:
        block: task of the iteration.
        iteration: number of the iteration; its rollouts exist.
        sampled_pin: policy that has sampled them.
        before: newest policy and train state.
        ranks: ranks that train.
        held: trainer of this rank.
        asked: set once this process must end.

    Returns:
        Policy and train state after the iteration.
    """
    if ranks.is_first:
        _task(
            block, iteration, "reward",
            lambda context: reward(context, block.num_shards, sampled_pin),
        )  # fmt: skip
    patient(ranks, LIMIT_SECONDS).barrier()
    rewards = layout.rewards(block.root, iteration)
    job = TrainJob(
        root=block.root,
        config=block.config,
        config_sha256=block.config_sha256,
        iteration=iteration,
        num_shards=block.num_shards,
        policy_pin=sampled_pin,
        state_pin=before.state_pin.result(),
        rewards_pin=read_manifest(rewards).ref(rewards).pin(),
    )
    results: list[Trained] = []

    def work() -> JobResult:
        with peers("the ranks that train"):
            results.append(begin_iteration(job, ranks, asked, held))
        return JobResult(None, results[0].metrics)

    def train(_: Context | None = None) -> Outcome:
        return train_once(job, work)

    outcome = _task(block, iteration, "train", train) if ranks.is_first else train()
    if results:
        return begin_commit(job, results[0])
    # An earlier attempt has trained, or the run was stopped before.
    state_pin = str(outcome.values["state_pin"])
    return stored(Pins(_export_or_pass(block, job, state_pin, before, ranks), state_pin))


def _export_or_pass(block: Block, job: TrainJob, state_pin: str, before: Made, ranks: Ranks) -> str:
    """Return the policy of a state that this attempt has not trained; every rank calls it.

    A stopped run keeps the policy before.
    """
    iteration = job.iteration
    if is_stopped(block.root, iteration):
        policy_pin = before.pins.result().policy_pin
        if ranks.is_first:
            _task(block, iteration, "checkpoint", lambda context: passed_through(policy_pin))
        patient(ranks, LIMIT_SECONDS).barrier()
        return policy_pin
    if ranks.is_first:
        export_policy(job, state_pin)
    patient(ranks, LIMIT_SECONDS).barrier()
    place = layout.policy(block.root, iteration)
    return read_manifest(place).ref(place).pin()
