"""The loop of a resident task, as each of its ranks runs it, in turn or ahead.

Every iteration calls the functions of the stages rollout, reward, train and checkpoint. Each stage
writes the same records, metrics and log as in a separate task. Engine e has one rank or several
neighbouring ranks, and samples the shards e, e + engines, ... Policy i is made by the update of
iteration i. The retry of a task that was cut off finds the finished parts done.

In turn (`run_in_turn`), every rank samples iteration i from policy i - 1 and then trains on it:

| part | consumes | waits for | unblocked by | produces |
| --- | --- | --- | --- | --- |
| refresh | the trainer's weights; else the files of policy i - 1 | the other ranks, which gather \
weights too; for files the pin | the commit thread | an engine with policy i - 1 |
| sample_shards | prompts, engine, data of the state | nothing | | rollouts i |
| pins.result | | the slowest engine; state and policy i - 1 in the store | the last shard; the \
commit thread | their pins |
| evaluate | policy i - 1, engine | nothing | | accuracy of policy i - 1 |
| update | rollouts i, state i - 1 | all ranks; rewards | the end of the evaluation; the first \
rank | weights, a staged state |
| commit thread | the staged state | the uploads of all ranks | the store | state i, policy i |

Ahead (`rollout.ahead = 1`), some ranks sample iteration i from policy i - 2 while the others train
iteration i - 1. The policy that trains on a token is one version newer than the one that sampled
it; in the very first iteration both are the same. Weights pass when both sides have finished their
part. No request is open then, so no sampled token is lost and every response has one version. The
sides exchange messages through the launcher's store:

| part | consumes | waits for | unblocked by | produces |
| --- | --- | --- | --- | --- |
| samplers: start | broadcast weights of policy i - 2; else its files | `trained/i-2` | \
the trainers, before they broadcast | an engine with policy i - 2 |
| samplers: sample_shards | prompts, engine, cursor after rollouts i - 1 | nothing | | \
rollouts i, `sampled/i/r` |
| samplers: evaluate | policy i - 2, engine | `sampled/i/*`, `policy/i-2` | the slowest sampler; \
the commit thread | accuracy of policy i - 2 |
| trainers: update | rollouts i, state i - 1 | `sampled/i/*`, state i - 1, policy i - 2 | \
the samplers; the commit threads | weights, a staged state |
| samplers: the end | the last policy | `policy/last-1`, `ended` | the commit threads | \
accuracy of the last policy but one |
| trainers: commit thread | the staged state | the uploads of all ranks | the store | \
state i, policy i, `policy/i` |
| trainers: send | weights of policy i | `sampled/i+1/*` | the slowest sampler | \
`trained/i`, the broadcast |

Source: AReaL, arXiv 2505.24298, section 5, bounds staleness in the same way, with requests that
go on over a change of weights.
"""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import Future, wait
from threading import Event

import torch

from planish.base.parallel import SINGLE, Ranks, join, local_rank, patient, pick_device
from planish.base.startup import spare_collections
from planish.engines.weights import WeightSource, fetch_weights
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.records.stream import StreamState, advance
from planish.run.pins import Pins
from planish.run.signals import Terminated
from planish.run.stage_metrics import StageMetrics
from planish.stages.iterate.broadcast import SentWeights, names_from_json, names_to_json, send
from planish.stages.iterate.commit import (
    LEAVE_SECONDS,
    LIMIT_SECONDS,
    Made,
    stage_error,
    stored,
)
from planish.stages.iterate.iteration import evaluate, sample_shards, update
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import (
    Residents,
    TrainerWeights,
    check_weights,
    gives_weights,
)
from planish.stages.iterate.roles import Roles
from planish.stages.rollout.job import Start, read_data
from planish.stages.train.ranks.boundaries import Sigterm
from planish.stages.train.ranks.worker import HeldTrainer, run_rank

PACE = 0.5
"""Share of the last sampling time over which the upload of a state is spread. The export has the
rest of that time."""


def run_block(block: Block, ranks: Ranks = SINGLE, asked: Event | None = None) -> Pins:
    """Run the iterations of a block in turn; every rank calls it.

    Raises:
        SystemExit: a stage has failed; the exit code is its own, and its log names the cause.
        PeerLost: another rank has ended or does not answer in time.
        EngineError: an engine took other weights from memory than those of the export.
    """
    device = pick_device(block.train.device, ranks.rank)
    residents = Residents(ranks, device, block.config)
    with StageMetrics("iterate", block.iteration, ranks.rank or None) as shown:
        # One server for the whole task: a server for each stage would wait each time until
        # Prometheus has scraped the stage's last numbers.
        shown.serve()
        try:
            return run_in_turn(block, ranks, residents, asked)
        finally:
            shown.publish({})
            residents.close()


def run_in_turn(block: Block, ranks: Ranks, residents: Residents, asked: Event | None) -> Pins:
    """Sample every iteration of a block and then train on it."""
    waits, last = patient(ranks, LIMIT_SECONDS), block.last
    made = stored(Pins(block.policy_pin, block.state_pin))
    try:
        for iteration in range(block.iteration, last + 1):
            start = residents.refresh(made)
            before = time.monotonic()
            sample_shards(block, iteration, start, residents)
            spent = torch.tensor([time.monotonic() - before])
            longest = float(waits.max(spent))
            residents.trainer.pace_seconds = PACE * longest if iteration < last else 0.0
            policy_pin, state_pin = made.pins.result()
            check_weights(start, policy_pin)
            if made.version is not None:
                residents.trainer.state_pin = state_pin
            evaluate(block, iteration, policy_pin, residents)
            residents.rest()
            waits.barrier()
            trainer = residents.trainer
            made = update(block, iteration, policy_pin, made, ranks, trainer, asked=asked)
        return made.pins.result()
    except BaseException:
        wait([made.pins], LEAVE_SECONDS)
        raise


def run_ahead(block: Block, roles: Roles, asked: Event) -> Pins:
    """Run the iterations of a block with rollouts one iteration ahead; every rank calls it.

    Returns:
        The pins after the block, on ranks that train; empty ones on the others.
    """
    with StageMetrics("iterate", block.iteration, roles.everyone.rank or None) as shown:
        shown.serve()
        try:
            return _train(block, roles, asked) if roles.trains else _sample(block, roles)
        finally:
            shown.publish({})


def _sample(block: Block, roles: Roles) -> Pins:
    """Sample every iteration of a block, and evaluate its policies in between."""
    residents = Residents(roles.mine, roles.device, block.config, trains=False)
    data = read_data(block.state_pin)
    first, last = block.iteration, block.last
    try:
        for iteration in range(first, last + 1):
            start = _start(block, roles, residents, iteration, data)
            sample_shards(block, iteration, start, residents)
            roles.tell(f"sampled/{iteration}/{roles.mine.rank}", "")
            roles.hear(*_sampled(roles, iteration))
            data = _after(block, iteration, data)
            if iteration > first:
                policy_pin = _policy_pin(block, roles, iteration - 2)
                check_weights(start, policy_pin)
                evaluate(block, iteration - 1, policy_pin, residents)
        evaluate(block, last, _policy_pin(block, roles, last - 1), residents)
        # Machines of a gang end together.
        roles.hear("ended")
        return Pins("", "")
    finally:
        residents.close()


def _policy_pin(block: Block, roles: Roles, version: int) -> str:
    """Return the pin of a policy; wait for it if this task exports it."""
    if version < block.iteration - 1:
        return block.earlier_pin
    if version < block.iteration:
        return block.policy_pin
    return roles.hear(f"policy/{version}")[0]


def _start(
    block: Block, roles: Roles, residents: Residents, iteration: int, data: StreamState
) -> Start:
    """Return the start of an iteration; the engine gets weights if the trainers send them."""
    version, lag = iteration - 2, int(iteration > 1)
    names = roles.hear(f"trained/{version}")[0] if version >= block.iteration else ""
    if not names:
        return residents.read(_policy_pin(block, roles, version), data, lag)
    files = residents.open(block.policy_pin)
    sent = SentWeights(names_from_json(names), files, roles)
    return residents.take(sent, Made(data, block.policy_pin, version), lag)


def _after(block: Block, iteration: int, data: StreamState) -> StreamState:
    """Return the prompt cursor after the rollouts of an iteration, as its state will have it."""
    consumed: list[int] = []
    for shard in range(block.num_shards):
        place = layout.rollouts(block.root, iteration, shard)
        consumed += read_manifest(place).attributes["consumed"]
    return StreamState(advance(data.cursor, consumed))


def _sampled(roles: Roles, iteration: int) -> list[str]:
    """Return the keys that the sampling ranks set once their shards of an iteration are written."""
    return [f"sampled/{iteration}/{rank}" for rank in range(roles.num_samplers)]


def _train(block: Block, roles: Roles, asked: Event) -> Pins:
    """Train every iteration of a block once it is sampled; all ranks send the same messages."""
    held, last = HeldTrainer(), block.last
    # Its process group is made while all ranks are here.
    patient(roles.mine, LIMIT_SECONDS)
    sampled_by = stored(Pins(block.earlier_pin, ""))
    newest = stored(Pins(block.policy_pin, block.state_pin))
    # Any policy has the names and dtypes to pass on; this one is fetched while others sample.
    files = fetch_weights(block.policy_pin)
    try:
        for iteration in range(block.iteration, last + 1):
            # Until the first step SIGTERM ends a rank at once.
            heard = asked if iteration > block.iteration else None
            roles.hear(*_sampled(roles, iteration), asked=heard)
            if newest.version is not None:
                held.state_pin = newest.state_pin.result()
            policy_pin, sampled_by = sampled_by.pins.result().policy_pin, newest
            newest = update(block, iteration, policy_pin, newest, roles.mine, held, asked=asked)
            _announce(newest, roles, iteration)
            if iteration + 2 <= last:
                _send(roles, iteration, newest, held, files, asked)
        # Exports may end in any order, so this waits for the last two.
        sampled_by.pins.result()
        pins = newest.pins.result()
        roles.tell("ended", "")
        return pins
    except BaseException:
        wait([newest.pins], LEAVE_SECONDS)
        raise
    finally:
        held.close()


def _announce(made: Made, roles: Roles, iteration: int) -> None:
    """Send the pin of a policy to the samplers once it is exported."""

    def tell(pins: Future[Pins]) -> None:
        if pins.exception() is None:
            roles.tell(f"policy/{iteration}", pins.result().policy_pin)

    made.pins.add_done_callback(tell)


def _send(
    roles: Roles, iteration: int, made: Made, held: HeldTrainer, files: WeightSource, asked: Event
) -> None:
    """Send the weights of an iteration to the samplers when they have sampled the next one."""
    roles.hear(*_sampled(roles, iteration + 1), asked=asked)
    if not gives_weights(held, made):
        roles.tell(f"trained/{iteration}", "")
        return
    assert held.trainer is not None
    source = TrainerWeights(held.trainer, files, roles.mine)
    roles.tell(f"trained/{iteration}", names_to_json(source.names()))
    send(source, roles.group, roles.device)


def block_rank(block: Block) -> tuple[Ranks, str]:
    """Run a block as one of several ranks; returns its pins as JSON."""
    config = block.train
    device = pick_device(config.device, local_rank())
    try:
        if block.is_ahead:
            roles = Roles(block, device, max(config.timeout_seconds, LIMIT_SECONDS))
            return roles.everyone, json.dumps(run_ahead(block, roles, Sigterm()))
        ranks = join(device, timeout_seconds=config.timeout_seconds)
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
