"""The stage of several iterations at once: rollout, reward, train and checkpoint in one task."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from planish import store
from planish.base.errors import (
    EXIT_CONFIG,
    EXIT_TRANSIENT,
    ConfigError,
    ObjectMissing,
    PlanishError,
    RootInUse,
    exit_code,
)
from planish.base.parallel import leave
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.run.pins import Pins
from planish.run.signals import stops_with
from planish.run.stage import Context, load_run, mark_failure, refuse_known_failure
from planish.stages.iterate.job import Block
from planish.stages.train.stage import in_ranks

logger = logging.getLogger(__name__)

RANK = "planish.stages.iterate.loop"
"""Program of a rank."""


def run(
    root: str,
    config_sha256: str,
    number: int,
    count: int,
    policy_pin: str,
    state_pin: str,
) -> Pins:
    """Run the iterations `number`, `number + 1`, ... of a run.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        number: first iteration within this run, from 1.
        count: iterations of the task.
        policy_pin: pinned URI of the policy that samples first.
        state_pin: pinned URI of the train state before; "" before the first iteration of all.

    Raises:
        SystemExit: as `run.stage.execute`; the log of the stage that failed explains it. Another
            attempt of the same run ends at once if a part of the task failed for good.
    """
    context = Context(root.rstrip("/"), "iterate", number, 0, {}, config_sha256, {})
    try:
        run = load_run(context.root, config_sha256)
        context = replace(context, iteration=number + run["offset"], run=run)
        refuse_known_failure(context, _markers(context, count))
        root, iteration = context.root, context.iteration
        block = Block(
            root, run["config"], config_sha256, iteration, run["num_shards"], policy_pin, state_pin,
            "", count=count,
        )  # fmt: skip
        if block.is_ahead:
            block = replace(block, earlier_pin=_earlier_pin(block, run["origin"]["policy"]))
        # Between the parts of an iteration a signal must not end a running commit.
        with stops_with(EXIT_TRANSIENT):
            told = in_ranks(block, RANK)
            if told is not None:
                return Pins(*json.loads(told))
            from planish.stages.iterate.loop import run_block

            try:
                return run_block(block)
            finally:
                leave()
    except PlanishError as error:
        logger.error("failed stage=iterate iteration=%d error=%s", context.iteration, error)
        raise SystemExit(_code(context, count, error)) from None


def _markers(context: Context, count: int) -> list[str]:
    """Return the markers of failure of a task of `count` iterations and of its parts."""
    first = context.iteration
    numbers = {f"{iteration:05d}" for iteration in range(first, first + count)}
    found = store.list_uris(layout.failed(context.root))
    return [uri for uri in found if uri.rpartition("/")[2].partition("-")[0] in numbers]


def _code(context: Context, count: int, error: PlanishError) -> int:
    """Return the exit code of a task; a part that failed for good outranks the first error."""
    code = exit_code(error)
    if code == EXIT_CONFIG and not isinstance(error, RootInUse):
        mark_failure(context, error)
    elif code != EXIT_CONFIG:
        # The rank that failed for good may have been killed before it could report its error.
        try:
            refuse_known_failure(context, _markers(context, count))
        except ConfigError as known:
            logger.error("not to be tried again: %s", known)
            return EXIT_CONFIG
        except PlanishError as unknown:
            logger.warning("markers of failure not read error=%s", unknown)
    return code


def _earlier_pin(block: Block, origin: str) -> str:
    """Return the policy before that of a block; the block's own if that one is missing.

    `origin` is the first policy of the root, if it belongs to another root.
    """
    version = max(block.iteration - 2, 0)
    if version == 0 and origin:
        return origin
    try:
        place = layout.policy(block.root, version)
        return read_manifest(place).ref(place).pin()
    except ObjectMissing:
        # The run was stopped before, or somebody has removed it.
        return block.policy_pin
