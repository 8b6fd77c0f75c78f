"""The stage of several iterations at once: rollout, reward, train and checkpoint in one task."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

from planish.base.errors import ObjectMissing, PlanishError, exit_code
from planish.base.parallel import leave
from planish.records import layout
from planish.records.manifest import read_manifest
from planish.run.stage import load_run
from planish.run.update import Pins
from planish.stages.iterate.job import Block
from planish.stages.train.stage import in_ranks

logger = logging.getLogger(__name__)

RANK = "planish.stages.iterate.block"
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
        SystemExit: as `run.stage.execute`; the log of the stage that failed explains it.
    """
    root, iteration = root.rstrip("/"), number
    try:
        run = load_run(root, config_sha256)
        iteration += run["offset"]
        block = Block(
            root, run["config"], config_sha256, iteration, run["num_shards"], policy_pin, state_pin,
            "", count=count,
        )  # fmt: skip
        if block.is_ahead:
            block = replace(block, earlier_pin=_earlier_pin(block, run["origin"]["policy"]))
        told = in_ranks(block, RANK)
        if told is not None:
            return Pins(*json.loads(told))
        from planish.stages.iterate.block import run_block

        try:
            return run_block(block)
        finally:
            leave()
    except PlanishError as error:
        logger.error("failed stage=iterate iteration=%d error=%s", iteration, error)
        raise SystemExit(exit_code(error)) from None


def _earlier_pin(block: Block, origin: str) -> str:
    """Return the policy before that of a block; its own where there is none, or none any more.

    `origin` is the policy that the root began with, if it was one of another root.
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
