"""Rewards: the scores of a rollout set, row by row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from planish.records.schema import Record, column, record

MAX_ITERATIONS_WITHOUT_SIGNAL = 3
"""Default of `rollout.max_iterations_without_signal`."""


def nothing_learnt(metrics: Mapping[str, float]) -> str:
    """Return why a reward task's metrics show that nothing was learnt, with advice, or "".

    Example:
        >>> nothing_learnt({"iterations_without_signal": 1, "num_groups_wrong": 128})[:43]
        'Nothing was learnt: all 128 groups wrong; t'
    """
    if not metrics.get("iterations_without_signal"):
        return ""
    wrong, right = (int(metrics.get(f"num_groups_{name}", 0)) for name in ("wrong", "right"))
    if not right:
        cut = metrics.get("truncated_fraction", 0.0)
        seen = f"all {wrong} groups wrong"
        remedy = "easier problems, a stronger model, a cold start on worked traces, or more "
        remedy += "responses to each prompt (`rollout.group_size`)"
        if cut > 0.5:
            remedy += f"; {cut:.0%} were cut at `rollout.max_response_tokens`: raise it"
    elif not wrong:
        seen = f"all {right} groups right"
        remedy = "harder problems (`curate.pass_rate_max` leaves out the easy ones)"
    else:
        seen = f"{wrong} groups all wrong, {right} all right, none with both"
        remedy = "more responses to each prompt (`rollout.group_size`), or more prompts"
    return f"Nothing was learnt: {seen}; try {remedy}"


def judged_late(metrics: Mapping[str, float]) -> str:
    """Return a text with the responses that a reward task could not judge in time, or ""."""
    late, scored = (
        int(metrics.get(f"num_{name}", 0)) for name in ("verifier_timeouts", "scored_rollouts")
    )
    return f"{late} of {scored} responses took the verifier too long: wrong" if late else ""


@record
class RewardSet(Record):
    """Row `r` scores row `r` of the rollout set that the manifest names as a parent.

    Example:
        >>> one = np.ones(1, np.float32)
        >>> rewards = RewardSet(
        ...     accuracy=one, outcome=one, length_penalty=-0.25 * one, reward=0.75 * one,
        ...     has_reward=np.array([True]), keep=np.array([True]), extracted=["42"])
        >>> rewards.num_rows
        1
    """

    SCHEMA: ClassVar[str] = "rewards/1"

    accuracy: npt.NDArray[np.float32] = column("float32", "the verifier's verdict, 0 or 1")
    outcome: npt.NDArray[np.float32] = column("float32", "the reward of that verdict")
    length_penalty: npt.NDArray[np.float32] = column("float32", "0 or less")
    reward: npt.NDArray[np.float32] = column("float32", "outcome + length_penalty: what trains")
    has_reward: npt.NDArray[np.bool_] = column("bool", "false for responses that are not finished")
    keep: npt.NDArray[np.bool_] = column("bool", "false: takes no part in the update")
    extracted: list[str] = column("text", "the answer that the verifier saw")
    scores: list[str] | None = column(
        "text", "JSON: score of the verifier and of each reward function by name", default=None
    )
    """None without `reward.functions`."""
    rollout_id: list[str] | None = column(
        "text", "of the rollout, to join the two sets by", default=None
    )
    """None in sets of earlier versions."""
