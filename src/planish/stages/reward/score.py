"""Compute rewards and their metrics from rollouts: the rule of the reward stage.

It does not affect the loss mask: training masks truncated responses.

Source: DAPO, arXiv 2503.14476, equations 7, 11 and 13.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from planish.base.errors import VerifierFailure
from planish.records.rewards import RewardSet
from planish.records.rollouts import ENDED, FinishReason, RolloutSet
from planish.stages.reward.config import RewardConfig
from planish.verifiers import Verdict
from planish.verifiers.judging import Judging, Verdicts, score_of
from planish.verifiers.shaping import equal_rows, overlong_penalty, rows_of_groups_with


@dataclass(frozen=True)
class Scores:
    """Rewards, one row per rollout, with counts and means; a mean over no rows is left out."""

    rewards: RewardSet
    metrics: dict[str, float]


def score(rollouts: RolloutSet, config: RewardConfig) -> Scores:
    """Score every rollout by its verdicts; judge rollouts here if the set has no verdicts.

    A right response gets `reward_correct`, any other `reward_wrong`; a score between 0 and 1 is
    interpolated linearly. Each of `functions` adds its score times its weight. Unfinished responses
    (WINDOW) and failed ones (ABORT) get no reward. A group with a failed response is dropped;
    so is a finished group with equal outcomes, unless `keep_uniform_groups` is set.

    Raises:
        ConfigError: a row names a verifier that is not installed.
        VerifierFailure: a verifier failed or timed out on too many rows.
    """
    has_reward = np.isin(rollouts.finish, ENDED)
    rows = np.flatnonzero(has_reward).tolist()
    judged = Judging.of(config.model_dump()).complete(rollouts, rows)
    verdicts = _of(judged, rollouts.verifier)
    _check_errors(rollouts, rollouts.verifier, verdicts, config)
    accuracy = np.array([v.accuracy for v in verdicts], dtype=np.float32)
    penalty = overlong_penalty(
        rollouts.response_tokens.lengths,
        max_tokens=config.max_response_tokens,
        buffer_tokens=config.overlong_buffer_tokens,
        factor=config.overlong_penalty_factor,
    )
    parts = _scores(verdicts)
    between = config.reward_wrong + parts * (config.reward_correct - config.reward_wrong)
    outcome = np.where(accuracy > 0, config.reward_correct, between)
    named: dict[str, npt.NDArray[np.float64]] = {}
    for function in config.functions:
        names = [function.name] * rollouts.num_rows
        by_function = _of(judged, names)
        _check_errors(rollouts, names, by_function, config)
        named[function.name] = _scores(by_function)
        outcome = outcome + function.weight * named[function.name]
    outcome = np.where(has_reward, outcome, 0.0).astype(np.float32)
    penalty = np.where(has_reward, penalty, np.float32(0.0)).astype(np.float32)
    scores = None
    if named:
        scores = [
            json.dumps({name: float(part)} | {key: float(s[row]) for key, s in named.items()})
            for row, (name, part) in enumerate(zip(rollouts.verifier, parts, strict=True))
        ]
    group = rollouts.group_index
    keep = ~rows_of_groups_with(rollouts.finish == FinishReason.ABORT, group)
    if not config.keep_uniform_groups:
        undecided = rows_of_groups_with(~has_reward, group)
        keep &= undecided | ~equal_rows(outcome, group)
    rewards = RewardSet(
        accuracy=accuracy,
        outcome=outcome,
        length_penalty=penalty,
        reward=outcome + penalty,
        has_reward=has_reward,
        keep=keep,
        extracted=[v.extracted for v in verdicts],
        scores=scores,
        rollout_id=rollouts.rollout_id,
    )
    metrics = _metrics(rollouts, rewards, verdicts)
    if named and rows:
        every = {"verifier": parts, **named}
        metrics |= {f"score_mean/{name}": float(s[rows].mean()) for name, s in every.items()}
    return Scores(rewards, metrics)


def _of(verdicts: Sequence[Verdicts], names: Sequence[str]) -> list[Verdict]:
    """Return the verdict of verifier `names` [R] on each of R rollouts; wrong if missing."""
    none = Verdict(accuracy=0.0)
    return [each.get(name, none) for each, name in zip(verdicts, names, strict=True)]


def _check_errors(
    rollouts: RolloutSet, names: Sequence[str], verdicts: Sequence[Verdict], config: RewardConfig
) -> None:
    """Raise VerifierFailure if too many verdicts of the verifiers `names` [R] are errors."""
    num_rows = int(np.isin(rollouts.finish, ENDED).sum())
    limit = config.max_verifier_error_rate * num_rows
    errors = [row for row, verdict in enumerate(verdicts) if verdict.error]
    if len(errors) <= limit:
        return
    timeouts, row = sum(verdicts[row].timeout for row in errors), errors[0]
    raise VerifierFailure(
        f"verifier errors must not exceed `reward.max_verifier_error_rate` = "
        f"{config.max_verifier_error_rate!r}, got {len(errors)} of {num_rows} rows "
        f"({timeouts} timeouts); first in {rollouts.rollout_id[row]} with verifier "
        f"{names[row]!r} and answer {rollouts.answer[row]!r:.80}: "
        + (
            verdicts[row].reason
            or "check the answers of that prompt source, or that the extra `planish[reward]` is "
            "installed"
        ),
        # A verifier that timed out may answer in time on a machine with less load.
        is_final=len(errors) - timeouts > limit,
    )


def _scores(verdicts: Sequence[Verdict]) -> npt.NDArray[np.float64]:
    return np.array([score_of(verdict) for verdict in verdicts], np.float64)


def _metrics(rollouts: RolloutSet, rewards: RewardSet, verdicts: list[Verdict]) -> dict[str, float]:
    scored = rewards.has_reward
    finish = rollouts.finish
    first = rollouts.group_starts()
    counts = {
        "rollouts": rollouts.num_rows,
        "groups": rollouts.num_groups,
        "kept_rollouts": rewards.keep.sum(),
        "kept_groups": (rewards.keep & first).sum(),
        "incomplete_groups": (
            rows_of_groups_with(finish == FinishReason.ABORT, rollouts.group_index) & first
        ).sum(),
        "scored_rollouts": scored.sum(),
        "right_rollouts": (rewards.accuracy > 0).sum(),
        "wrong_rollouts": (scored & (rewards.accuracy == 0)).sum(),
        "invalid_rollouts": sum(v.invalid for v in verdicts),
        "verifier_errors": sum(v.error for v in verdicts),
        "verifier_timeouts": sum(v.timeout for v in verdicts),
        "finished_rollouts": (finish == FinishReason.STOP).sum(),
        "truncated_rollouts": (finish == FinishReason.LENGTH).sum(),
        "window_rollouts": (finish == FinishReason.WINDOW).sum(),
        "aborted_rollouts": (finish == FinishReason.ABORT).sum(),
        "penalised_rollouts": (rewards.length_penalty < 0).sum(),
    }
    metrics = {f"num_{name}": float(value) for name, value in counts.items()}
    if not scored.any():
        return metrics
    lengths = rollouts.response_tokens.lengths[scored]
    right = rewards.accuracy[scored] > 0
    means: dict[str, npt.NDArray[Any]] = {
        "accuracy_mean": rewards.accuracy[scored],
        "reward_mean": rewards.reward[scored],
        "length_penalty_mean": rewards.length_penalty[scored],
        "response_tokens_mean": lengths,
        "response_tokens_right_mean": lengths[right],
        "response_tokens_wrong_mean": lengths[~right],
    }
    metrics.update(
        {name: float(np.mean(v, dtype=np.float64)) for name, v in means.items() if len(v)}
    )
    metrics["reward_std"] = float(np.std(rewards.reward[scored], dtype=np.float64))
    metrics["response_tokens_max"] = float(lengths.max())
    for name in ("invalid", "truncated"):
        metrics[f"{name}_fraction"] = counts[f"{name}_rollouts"] / float(scored.sum())
    return metrics
