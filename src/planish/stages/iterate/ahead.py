"""Rollouts one iteration ahead: some ranks sample the next one while the others train this one.

The policy before iteration i samples iteration i + 1, for any split of ranks and tasks. The policy
that trains on a token is one version newer than the one that sampled it; in the very first
iteration both are the same. Weights pass when both sides have finished their part. No request is
open then, so no sampled token is lost and every response has one version.

Source: AReaL, arXiv 2505.24298, section 5, bounds staleness in the same way, with requests that
go on over a change of weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Event

from planish.engines.weights import WeightSource, fetch_weights
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.records.stream import StreamState, advance
from planish.run.pins import Pins
from planish.run.stage_metrics import StageMetrics
from planish.stages.iterate.broadcast import SentWeights, names_from_json, names_to_json, send
from planish.stages.iterate.commit import LEAVE_SECONDS
from planish.stages.iterate.iteration import evaluate, sample_shards, update
from planish.stages.iterate.job import Block
from planish.stages.iterate.residents import Residents, held_weights
from planish.stages.iterate.roles import Roles
from planish.stages.rollout.job import Start
from planish.stages.train.ranks.worker import HeldTrainer


def run_ahead(block: Block, roles: Roles, asked: Event) -> Pins:
    """Run the iterations of a block; every rank calls it.

    Returns:
        The pins after the block, on ranks that train; empty ones on the others.
    """
    with StageMetrics("iterate", block.iteration, roles.everyone.rank or None) as shown:
        shown.serve()
        try:
            return _train(block, roles, asked) if roles.trains else _sample(block, roles)
        finally:
            shown.publish({})


class Ahead(Start):
    """Start of rollouts while a newer policy is in training."""

    def __init__(self, block: Block, iteration: int, pin: Callable[[], str], data: StreamState):
        """Take the data; `pin` returns the pin of the policy, and may wait for it."""
        super().__init__(Pins(block.policy_pin, ""))
        self.lag = int(iteration > 1)
        self._pin, self._data = pin, data

    def data(self) -> StreamState:
        """Return the prompt cursor after the rollouts of the iteration before."""
        return self._data

    def _wait(self) -> Pins:
        return Pins(self._pin(), "")


def _sample(block: Block, roles: Roles) -> Pins:
    """Sample every iteration of a block, and evaluate its policies in between."""
    residents = Residents(roles.mine, roles.device, block.config, trains=False)
    data = Start(Pins(block.policy_pin, block.state_pin)).data()
    first, last = block.iteration, block.iteration + block.count - 1

    try:
        for iteration in range(first, last + 1):
            start = _start(block, roles, residents, iteration, data)
            opened = partial(residents.serve, start=start)
            sampling = partial(sample_shards, block, iteration, start, residents.engines, opened)
            residents.lead(sampling, start)
            roles.tell(f"sampled/{iteration}/{roles.mine.rank}", "open" * residents.is_open)
            roles.hear(*_sampled(roles, iteration))
            data = _after(block, iteration, data)
            if iteration > first:
                evaluate(block, iteration - 1, start.pins().policy_pin, residents)
        newest = roles.hear(f"policy/{last - 1}")[0] if last > first else block.policy_pin
        evaluate(block, last, newest, residents)
        # Machines of a gang end together.
        roles.hear("ended")
        return Pins("", "")
    finally:
        residents.close()


def _start(
    block: Block, roles: Roles, residents: Residents, iteration: int, data: StreamState
) -> Start:
    """Return the start of an iteration; if the trainer sends weights, the open engine gets them."""
    version = iteration - 2
    if version < block.iteration:
        is_first = iteration == block.iteration
        pin = block.earlier_pin if is_first else block.policy_pin
        start = Ahead(block, iteration, lambda: pin, data)
        if is_first:
            residents.refresh(start)
        return start
    start = Ahead(block, iteration, lambda: roles.hear(f"policy/{version}")[0], data)
    start.held_version = version
    (names,) = roles.hear(f"trained/{version}")
    if names:
        residents.take(SentWeights(names_from_json(names), residents.files, roles), start)
    return start


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
    held = HeldTrainer()
    last = block.iteration + block.count - 1
    sampled_by = Start(Pins(block.earlier_pin, ""))
    newest = Start(Pins(block.policy_pin, block.state_pin))
    # Any policy has the names and dtypes to pass on; this one is fetched while others sample.
    files = fetch_weights(block.policy_pin)
    try:
        for iteration in range(block.iteration, last + 1):
            # Until the first step SIGTERM ends a rank at once.
            heard = asked if iteration > block.iteration else None
            roles.hear(*_sampled(roles, iteration), asked=heard)
            if newest.held_version is not None:
                held.state_pin = newest.state_pin()
            pin, sampled_by = sampled_by.pins().policy_pin, newest
            newest = update(block, iteration, pin, newest, roles.mine, held, asked=asked)
            newest.when_exported(partial(roles.tell, f"policy/{iteration}"))
            if iteration + 2 <= last:
                _pass_on(roles, iteration, newest, held, files, asked)
        # Exports may end in any order, so this waits for the last two.
        sampled_by.pins()
        pins = newest.pins()
        roles.tell("ended", "")
        return pins
    except BaseException:
        newest.leave(LEAVE_SECONDS)
        raise
    finally:
        held.close()


def _pass_on(
    roles: Roles, iteration: int, made: Start, held: HeldTrainer, files: WeightSource, asked: Event
) -> None:
    """Send the weights of an iteration to the samplers of the next, if all have an open engine."""
    source = None
    if all(roles.hear(*_sampled(roles, iteration + 1), asked=asked)):
        source = held_weights(held, made, files, roles.mine)
    names = names_to_json(source.names()) if source is not None else ""
    roles.tell(f"trained/{iteration}", names)
    if source is not None:
        send(source, roles.group, roles.device)
