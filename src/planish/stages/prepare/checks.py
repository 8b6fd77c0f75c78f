"""Checks across sections of a configuration: what no section can see alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planish.base.config import Section

Parsed = Mapping[str, Section]


def _value(parsed: Parsed, path: str) -> Any:
    """Return `section.key`, or None where the section or the key does not exist."""
    section, _, key = path.partition(".")
    return getattr(parsed.get(section), key, None)


def _values(parsed: Parsed, *paths: str) -> list[Any] | None:
    """Return all values, or None when one of them does not exist."""
    values = [_value(parsed, path) for path in paths]
    return None if any(value is None for value in values) else values


def _response_limits_agree(parsed: Parsed) -> list[str]:
    values = _values(parsed, "reward.max_response_tokens", "rollout.max_response_tokens")
    if values is None or values[0] == values[1]:
        return []
    return [
        f"`reward.max_response_tokens` must equal `rollout.max_response_tokens`, got {values[0]} "
        f"and {values[1]}; the penalty for overlong responses begins before that limit"
    ]


def _buffer_fits(parsed: Parsed) -> list[str]:
    values = _values(parsed, "reward.overlong_buffer_tokens", "rollout.max_response_tokens")
    if values is None or 0 <= values[0] <= values[1]:
        return []
    return [
        "`reward.overlong_buffer_tokens` must be 0 to `rollout.max_response_tokens` "
        f"({values[1]}), got {values[0]}"
    ]


def _relaxing_needs_uniform_groups(parsed: Parsed) -> list[str]:
    values = _values(parsed, "rollout.starvation_policy", "reward.keep_uniform_groups")
    if values is None or values[0] != "relax" or values[1]:
        return []
    return [
        "`reward.keep_uniform_groups` must be true with `rollout.starvation_policy = 'relax'`, got "
        "False; rollout would fill the batch with groups that reward throws away"
    ]


def _minibatch_fits(parsed: Parsed) -> list[str]:
    values = _values(
        parsed,
        "train.rollouts_per_minibatch",
        "rollout.prompts_per_iteration",
        "rollout.group_size",
    )
    if values is None:
        return []
    minibatch, rollouts = values[0], values[1] * values[2]
    if minibatch > rollouts:
        return [
            f"`train.rollouts_per_minibatch` must not exceed the {rollouts} rollouts of an "
            f"iteration (`rollout.prompts_per_iteration` x `rollout.group_size`), got {minibatch}"
        ]
    return []


def _selection_can_leave_out(parsed: Parsed) -> list[str]:
    values = _values(
        parsed, "train.max_groups", "rollout.prompts_per_iteration", "rollout.group_size"
    )
    if values is None:
        return []
    limit, prompts, group_size = values
    # with windows a group may be down to the one response that goes on
    most = prompts * group_size if _value(parsed, "rollout.window_tokens") else prompts
    if limit < most:
        return []
    return [
        f"`train.max_groups` must be below the {most} groups that an iteration may have, got "
        f"{limit}; `train.selection = 'all'` trains on every group"
    ]


def _windows_agree(parsed: Parsed) -> list[str]:
    values = _values(parsed, "algorithm.window_tokens", "rollout.window_tokens")
    if values is None:
        return []
    faults = []
    if values[0] != values[1]:
        faults.append(
            f"`rollout.window_tokens` must equal `algorithm.window_tokens`, got {values[1]} and "
            f"{values[0]}; the algorithm trains on the windows that rollout cuts"
        )
    unfinished = _value(parsed, "rollout.unfinished")
    if unfinished not in (None, "train"):
        faults.append(
            "`rollout.unfinished` must be 'train' for an algorithm that trains on windows, got "
            f"{unfinished!r}"
        )
    return faults


def _windows_keep_groups(parsed: Parsed) -> list[str]:
    values = _values(
        parsed, "rollout.window_tokens", "rollout.unfinished", "reward.keep_uniform_groups"
    )
    if values is None or not values[0] or values[1] == "hold_group" or values[2]:
        return []
    return [
        "`reward.keep_uniform_groups` must be true with `rollout.window_tokens`, got False; the "
        "responses of a group finish in different iterations, so that none of them shows whether "
        "the group carries a signal"
    ]


def _held_responses_fit_the_algorithm(parsed: Parsed) -> list[str]:
    """Whole responses of several policy versions need an algorithm that expects them."""
    values = _values(
        parsed,
        "rollout.window_tokens",
        "rollout.max_response_tokens",
        "rollout.unfinished",
        "algorithm.correction",
    )
    if values is None or _value(parsed, "algorithm.window_tokens") is not None:
        return []
    window, longest, unfinished, correction = values
    if not 0 < window < longest:
        return []
    faults = []
    compares_groups = _value(parsed, "algorithm.std") is not None
    wanted = ("hold_group",) if compares_groups else ("hold", "hold_group")
    if unfinished not in wanted:
        faults.append(
            f"`rollout.unfinished` must be {' or '.join(map(repr, wanted))} with "
            f"`rollout.window_tokens` below `rollout.max_response_tokens`, got {unfinished!r}; "
            "this algorithm trains on whole responses"
            + (" and compares those of a group" if compares_groups else "")
        )
    if correction == "off":
        faults.append(
            "`algorithm.correction` must not be 'off' with `rollout.window_tokens` below "
            "`rollout.max_response_tokens`, got 'off'; the tokens of a response come from several "
            "policies: take 'bypass' or 'token_truncate'"
        )
    return faults


def _training_samples_the_whole_distribution(parsed: Parsed) -> list[str]:
    """The trainer scores tokens under the whole distribution: no other may sample them."""
    return [
        f"`rollout.{name}` must be {off}, which samples from the whole distribution, got {seen}; "
        "the trainer does not score tokens under a truncated one. `[evaluate]` may truncate"
        for name, off in (("top_p", 1.0), ("top_k", 0))
        if (seen := _value(parsed, f"rollout.{name}")) not in (None, off)
    ]


def _reference_needs_a_penalty(parsed: Parsed) -> list[str]:
    pin = _value(parsed, "train.reference_policy")
    if not pin or _value(parsed, "algorithm.kl_coefficient"):
        return []
    return [
        "`algorithm.kl_coefficient` must be above 0 with `train.reference_policy`, got 0 and "
        f"{pin!r}; without a penalty no reference is used"
    ]


CHECKS: tuple[Callable[[Parsed], list[str]], ...] = (
    _response_limits_agree,
    _buffer_fits,
    _relaxing_needs_uniform_groups,
    _minibatch_fits,
    _selection_can_leave_out,
    _windows_agree,
    _windows_keep_groups,
    _held_responses_fit_the_algorithm,
    _training_samples_the_whole_distribution,
    _reference_needs_a_penalty,
)


def check_config(parsed: Parsed) -> list[str]:
    """Return every fault that only shows when sections are seen together.

    Args:
        parsed: validated sections by name; a missing section is not checked.
    """
    return [fault for check in CHECKS for fault in check(parsed)]


def check_run(config: Mapping[str, Mapping[str, Any]], num_shards: int) -> list[str]:
    """Return what stands in the way of running a resolved configuration.

    A configuration can be sound and yet lack a thing that only a run needs: the published values
    name no model, and the small one that is built from scratch is too short for them.

    Args:
        config: resolved tables.
        num_shards: rollout tasks of an iteration, from the compiled pipeline.
    """
    faults = _shard_faults(config, num_shards)
    model = config.get("model", {})
    limit = model.get("max_model_tokens")
    if limit is None or model.get("path"):
        return faults
    for section in ("rollout", "sft", "evaluate"):
        tokens = config.get(section, {}).get("max_response_tokens", 0)
        if tokens >= limit:
            faults.append(
                f"`{section}.max_response_tokens` must be below `model.max_model_tokens` "
                f"({limit}), which holds prompt and response, got {tokens}; give a trained model "
                "by `model`, or start from a preset for the small one"
            )
    return faults


def _shard_faults(config: Mapping[str, Mapping[str, Any]], num_shards: int) -> list[str]:
    prompts = config.get("rollout", {}).get("prompts_per_iteration")
    if num_shards >= 1 and (prompts is None or num_shards <= prompts):
        return []
    return [
        f"the pipeline must have 1 to `rollout.prompts_per_iteration` ({prompts}) rollout shards, "
        f"got {num_shards}; compile it with fewer shards, each fills a part of the batch"
    ]
