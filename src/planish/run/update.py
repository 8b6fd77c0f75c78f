"""Reward, train and checkpoint as one task, which saves three pods and drivers per iteration."""

from __future__ import annotations

import tempfile
from typing import Any, NamedTuple

from planish.run.__main__ import stage_run
from planish.run.stage import Artifact, PathArtifact


class Pins(NamedTuple):
    """Output parameters of a task that trains; the next task starts from them."""

    policy_pin: str
    """Pinned URI of the exported policy."""
    state_pin: str
    """Pinned URI of the new train state; the input state if nothing was trained."""


def run(
    root: str,
    config_sha256: str,
    number: int,
    offset: int,
    num_shards: int,
    policy_pin: str,
    state_pin: str,
    state: Artifact,
    metrics: Artifact,
) -> Pins:
    """Run three stages in turn; each writes its own records and its own log.

    A retry after an interrupted attempt skips finished stages.
    The arguments are those of the stages.
    """
    of_iteration: dict[str, Any] = {
        "root": root,
        "config_sha256": config_sha256,
        "number": number,
        "offset": offset,
        "policy_pin": policy_pin,
    }
    of_batch = {**of_iteration, "num_shards": num_shards}
    with tempfile.TemporaryDirectory() as folder:

        def inside(name: str) -> PathArtifact:
            return PathArtifact(f"{folder}/{name}")

        rewards = inside("rewards")
        stage_run("reward")(**of_batch, rewards=rewards, metrics=inside("reward metrics"))
        trained = stage_run("train")(
            **of_batch, state_pin=state_pin, rewards=rewards, state=state, metrics=metrics
        )
        exported = stage_run("checkpoint")(
            **of_iteration,
            state=state,
            policy=inside("policy"),
        )
    return Pins(exported.policy_pin, trained.state_pin)
