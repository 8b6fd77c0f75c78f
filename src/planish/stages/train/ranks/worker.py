"""The work of one training process, alone or as a rank under torchrun.

The launcher starts `python -m planish.stages.train.ranks.worker PIN` on every rank; the pin names
the job under the root of the run. Result and error are written beside it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from planish import store
from planish.algorithms import build_algorithm
from planish.algorithms.base import TrainBatch
from planish.algorithms.mismatch import mismatch_limit
from planish.base.errors import EXIT_CONFIG, EXIT_FAILED, PlanishError, exit_code
from planish.base.parallel import SINGLE, Grid, Ranks, join, leave, local_rank, pick_device
from planish.base.startup import spare_collections
from planish.checkpoint import train_state as checkpoint
from planish.models.adapters import KEY
from planish.records import layout
from planish.records.io import write_set
from planish.records.reference import KEY as REFERENCE
from planish.records.reference import named_reference
from planish.records.refs import Ref, parse_pin
from planish.records.reports import UpdateReport, write_report
from planish.records.rollouts import FinishReason, RolloutSet
from planish.records.schema import Record
from planish.records.stream import StreamState
from planish.run.rank_watch import WatchedTask, watched_ranks
from planish.run.stage_metrics import StageMetrics, show_phase
from planish.stages.train.batching import share_rows, split_minibatches, train_batch
from planish.stages.train.progress import Progress
from planish.stages.train.ranks.boundaries import Sigterm, leave_together
from planish.stages.train.ranks.job import (
    Inputs,
    JobResult,
    JobT,
    TrainJob,
    read_inputs,
    read_job,
    relative_pin,
)
from planish.stages.train.trainer import Trainer, set_up_torch
from planish.stages.train.update import UpdateResult, run_update
from planish.stages.train.window_values import earlier_values, row_keys, values_to_store

if TYPE_CHECKING:
    import torch
    from torch import Tensor

logger = logging.getLogger(__name__)


class HeldTrainer:
    """The trainer of this process, which stays open from one iteration to the next."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.state_pin = ""
        """Pin of the train state that `trainer` has in memory."""
        self.pace_seconds = 0.0
        """Time over which the upload of a state is spread, beside the next rollouts."""
        self._random: Mapping[str, Tensor] = {}

    def take(self, state_pin: str) -> Trainer | None:
        """Hand over the trainer if it is at this state; else close it and return None."""
        if self.state_pin != state_pin:
            self.close()
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            set_up_torch(trainer.config, trainer.device)
            trainer.set_random(self._random)
        return trainer

    def close(self) -> None:
        """Close the trainer and free its memory."""
        trainer, self.trainer = self.trainer, None
        if trainer is not None:
            trainer.close()
            # Sharded modules refer to each other in circles.
            gc.collect()

    def keep(self, trainer: Trainer, random: Mapping[str, Tensor]) -> None:
        """Keep a trainer whose state is saved with these random streams; its pin follows later."""
        self.trainer, self.state_pin, self._random = trainer, "", random


@dataclass(frozen=True)
class Trained:
    """An iteration of training whose state is staged."""

    commit: Callable[[], Ref]
    """Function from `checkpoint.begin_save` that waits for the state; every rank calls it once."""
    stream: StreamState
    """Data part of the state; only the first rank has the pins of `values` and `waiting`."""
    metrics: dict[str, float]


def train_iteration(job: TrainJob, ranks: Ranks = SINGLE, asked: Event | None = None) -> JobResult:
    """Train on one rollout batch and write the update report, then the train state.

    Every rank calls it, and the first one writes all unsharded data. All ranks leave before a
    step once `asked` is set on one of them.
    """
    trained = begin_iteration(job, ranks, asked)
    state = trained.commit()
    ranks.barrier()
    return JobResult(state, trained.metrics)


def begin_iteration(
    job: TrainJob,
    ranks: Ranks = SINGLE,
    asked: Event | None = None,
    held: HeldTrainer | None = None,
) -> Trained:
    """Train as `train_iteration` does; with `held` return once the state is staged.

    It takes the trainer from `held` if that is at the state of the job, and leaves its own there.
    """
    show_phase("training")
    config, info, inputs = job.train, job.info, read_inputs(job)
    algorithm = build_algorithm(job.config.get("algorithm", {}))
    grid, device = config.grid(ranks), pick_device(config.device, ranks.rank)
    trainer = held.take(job.state_pin) if held else None
    if trainer is None:
        trainer = _open_trainer(job, grid, device, has_critic=algorithm.needs_values)
    started = time.perf_counter()
    batch, rewards = _own_batch(job, inputs, grid, device), inputs.rewards
    ordinals = inputs.ordinals if algorithm.needs_values else None
    keys = row_keys(inputs.rollouts, ordinals) if ordinals is not None else None
    goes_on = inputs.rollouts.finish == FinishReason.WINDOW
    # From here on no rank needs the tokens of others.
    inputs = replace(inputs, rollouts=RolloutSet.empty())
    stored = earlier_values(batch, keys, rewards, inputs.values) if keys is not None else None
    result = run_update(
        trainer,
        algorithm,
        batch,
        config=config,
        progress=Progress.from_json(info) if info else Progress(),
        seed=(job.seed, job.iteration),
        group_places=inputs.places,
        critic=job.critic,
        earlier_values=stored,
        waiting=inputs.waiting if algorithm.needs_values else None,
        reference_pin=job.reference_pin,
        before_step=partial(leave_together, ranks, asked),
        mismatch_limit=mismatch_limit(job.config),
    )
    seconds = time.perf_counter() - started
    scalars = result.scalars | trainer.sizes()
    attributes: dict[str, str | int] = {
        "config_sha256": job.config_sha256,
        "iteration": job.iteration,
        "policy_version": job.iteration,
        "seed": job.seed,
        "step": result.progress.step,
        "framework": config.trainer,
        **grid.to_json(),
    }
    stream, values = inputs.stream, None
    if keys is not None:
        values = values_to_store(batch, result.values, keys, goes_on, rewards, inputs.values)
    if ranks.is_first:
        if values is not None:
            stream = replace(stream, values=_write(job, layout.values, values))
        if result.waiting is not None and result.waiting.num_rows:
            stream = replace(stream, waiting=_write(job, layout.waiting, result.waiting))
        report = UpdateReport(scalars, result.minibatches, attributes)
        write_report(layout.update(job.root, job.iteration), report)
    extra = _extra(job, trainer, result, stream)
    show_phase("saving")
    parts, framework = trainer.state()
    saved = checkpoint.begin_save(
        layout.state(job.root, result.progress.step),
        {**parts, "extra": extra},
        parents=job.parents(),
        attributes=attributes,
        framework=framework,
        ranks=ranks,
        pace_seconds=held.pace_seconds if held else None,
    )
    if held is None:
        trainer.close()
    else:
        held.keep(trainer, parts["random"])
    speed = scalars.get("num_tokens", 0.0) * config.num_passes / max(seconds, 1e-9)
    return Trained(saved, stream, scalars | _spent(seconds, speed, device))


def _open_trainer(job: TrainJob, grid: Grid, device: torch.device, *, has_critic: bool) -> Trainer:
    """Return a new trainer that stands at the state before the iteration."""
    trainer = Trainer(
        job.train,
        job.policy_pin,
        temperature=job.temperature,
        seed=job.seed,
        grid=grid,
        device=device,
        critic=job.critic if has_critic else None,
        critic_shape=job.info.get("critic") if has_critic else None,
        adapters=job.adapters,
        sets_weights=not job.state_pin,
    )
    if job.state_pin:
        trainer.load(job.state_pin)
    return trainer


def _own_batch(job: TrainJob, inputs: Inputs, grid: Grid, device: torch.device) -> TrainBatch:
    """Return the rows of this rank's data-parallel group."""
    rollouts, rewards, config = inputs.rollouts, inputs.rewards, job.train
    count, seed = int(rewards.keep.sum()), (job.seed, job.iteration)
    parts = split_minibatches(count, config.rollouts_per_minibatch, 1, seed=seed)
    share = share_rows(rollouts, rewards, parts, grid, device)
    return train_batch(rollouts, rewards, job.info.get("policy_version"), share)


def _spent(seconds: float, speed: float, device: torch.device) -> dict[str, float]:
    """Return time (s) and speed of the updates, and this rank's peak memory so far (bytes)."""
    import torch

    spent = {"update_seconds": seconds, "tokens_per_second": speed}
    spent["peak_host_bytes"] = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        spent["peak_device_bytes"] = float(torch.cuda.max_memory_allocated(device))
    return spent


def _extra(
    job: TrainJob, trainer: Trainer, result: UpdateResult, stream: StreamState
) -> dict[str, Any]:
    """Return the JSON part of the train state; that of the first rank is written."""
    # A run without a KL penalty keeps the pin of the reference for a later run that has one.
    pin = job.reference_pin or named_reference(job.state_pin, job.info)
    shape = trainer.critic_shape()
    return {
        **({REFERENCE: relative_pin(job, *parse_pin(pin))} if pin else {}),
        **({"critic": shape} if shape else {}),
        **({KEY: job.adapters.to_json()} if job.adapters else {}),
        **result.progress.to_json(),
        "data": stream.to_data(),
        "policy_version": job.iteration,
        "grid": trainer.grid.to_json(),
        "device": trainer.device.type,
        "config_sha256": job.config_sha256,
    }


def _write(job: TrainJob, at: Callable[[str, int], str], record: Record) -> str:
    """Write a set for the next iteration; returns its pin, relative to the root."""
    place = at(job.root, job.iteration)
    facts = {"config_sha256": job.config_sha256, "iteration": job.iteration}
    ref = write_set(place, record, parents=job.parents(), attributes=facts)
    return relative_pin(job, place, ref.manifest_sha256)


def run_rank(pin: str, kind: type[JobT], work: Callable[[JobT], tuple[Ranks, str]]) -> int:
    """Do the work of one rank on a job; the first rank writes the result that `work` returns.

    Returns:
        The exit code of the process.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO)
    folder = parse_pin(pin)[0].rpartition("/")[0]
    try:
        job = read_job(pin, kind)
        with watched_ranks(
            WatchedTask(
                job.root,
                job.iteration,
                f"{folder}/behind.json",
                job.train.timeout_seconds,
                job.num_trainers,
                job.train.pipeline_parallel,
            )
        ):
            ranks, result = work(job)
    except PlanishError as error:
        # The launcher sees only an exit code; the error itself travels through the store.
        fault = {"error": type(error).__name__, "message": str(error)}
        # An error that no retry mends replaces that of a rank that has merely lost this one.
        tell = store.write if exit_code(error) == EXIT_CONFIG else store.create
        with contextlib.suppress(PlanishError):
            tell(f"{folder}/error.json", json.dumps(fault).encode())
        logger.error("training process failed error=%s", error)
        return exit_code(error) or EXIT_FAILED
    finally:
        leave()
    if ranks.is_first:
        store.write(f"{folder}/result.json", result.encode())
    return 0


def train_rank(job: TrainJob) -> tuple[Ranks, str]:
    """Train one iteration as one of several ranks; returns the result as JSON."""
    device = pick_device(job.train.device, local_rank())
    ranks = join(device, timeout_seconds=job.train.timeout_seconds)
    with StageMetrics("train", job.iteration, ranks.rank) as shown:
        shown.open()
        result = train_iteration(job, ranks, Sigterm())
        shown.publish(result.metrics)
    return ranks, result.to_json()


def main(argv: list[str]) -> int:
    """Run one rank of a train stage."""
    return run_rank(argv[0], TrainJob, train_rank)


if __name__ == "__main__":
    spare_collections()
    raise SystemExit(main(sys.argv[1:]))
