"""The iterations of one task, one after the other, as each of its ranks runs them.

Every iteration calls the functions of the stages rollout, reward, train and checkpoint. Each stage
writes the same records, metrics and log as in a separate task. Engine e has one rank or several
neighbouring ranks, and samples the shards e, e + engines, ... The first rank does the work of a
single process: it judges, exports and evaluates. While the next rollouts are sampled, the state
of an update is committed and its policy exported. The retry of a task that was cut off finds the
finished parts done.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from threading import Event

import torch

from planish.base.parallel import SINGLE, Ranks, join, local_rank, pick_device
from planish.base.startup import spare_collections
from planish.run.pins import Pins
from planish.run.signals import Terminated
from planish.run.stage_metrics import StageMetrics
from planish.stages.iterate.ahead import run_ahead
from planish.stages.iterate.commit import LEAVE_SECONDS, LIMIT_SECONDS, stage_error
from planish.stages.iterate.iteration import evaluate, sample_shards, update
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import Residents
from planish.stages.iterate.roles import Roles
from planish.stages.rollout.job import Start
from planish.stages.train.ranks.boundaries import Sigterm
from planish.stages.train.ranks.worker import run_rank

PACE = 0.5
"""Share of the last sampling time over which the upload of a state is spread; the export after it
has the rest."""


def run_block(block: Block, ranks: Ranks = SINGLE, asked: Event | None = None) -> Pins:
    """Run the iterations of a block; every rank calls it.

    Raises:
        SystemExit: a stage has failed; the exit code is its own, and its log names the cause.
    """
    device = pick_device(block.train.device, ranks.rank)
    residents = Residents(ranks, device, block.config)
    start = Start(Pins(block.policy_pin, block.state_pin))
    with StageMetrics("iterate", block.iteration, ranks.rank or None) as shown:
        # One server for the whole task: a server for each stage would wait each time until
        # Prometheus has scraped the stage's last numbers.
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
    """Run one iteration; return the start of the next one."""
    residents.refresh(start)
    opened = partial(residents.serve, start=start)
    spent = 0.0

    def sampling() -> None:
        nonlocal spent
        # With its waits for the last upload, this time would make the next upload even longer.
        began = time.monotonic() - start.waited_seconds
        sample_shards(block, iteration, start, residents.engines, opened)
        spent = time.monotonic() - start.waited_seconds - began

    residents.lead(sampling, start)
    is_last = iteration == block.iteration + block.count - 1
    longest = float(ranks.max(torch.tensor([spent])))
    residents.trainer.pace_seconds = 0.0 if is_last else PACE * max(0.0, longest)
    policy_pin, _ = residents.settle(start)
    evaluate(block, iteration, policy_pin, residents)
    residents.rest()
    ranks.barrier()
    return update(block, iteration, policy_pin, start, ranks, residents.trainer, asked=asked)


def block_rank(block: Block) -> tuple[Ranks, str]:
    """Run a block as one of several ranks; returns its pins as JSON."""
    config = block.train
    device = pick_device(config.device, local_rank())
    limit = max(config.timeout_seconds, LIMIT_SECONDS)
    try:
        if block.is_ahead:
            roles = Roles(block, device, limit)
            return roles.everyone, json.dumps(run_ahead(block, roles, Sigterm()))
        ranks = join(device, timeout_seconds=limit)
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
