"""Checks of settings that depend on several sections of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError
from planish.engines import APART
from planish.models.experts import num_experts, spread_fault
from planish.models.headers import parse_config
from planish.verifiers import check_verifier

Sections = Mapping[str, Any]
"""Name to validated section; the settings of `algorithm` depend on the algorithm."""


def check_config(parsed: Sections) -> list[str]:
    """Return every fault in the combination of several sections."""
    checks = (_limits, _batches, _windows, _older_policies, _training, _ranks)
    return [fault for check in checks for fault in check(parsed)]


def _limits(parsed: Sections) -> Iterator[str]:
    longest, scored = (parsed[name].max_response_tokens for name in ("rollout", "reward"))
    if scored != longest:
        yield (
            f"`reward.max_response_tokens` must equal `rollout.max_response_tokens`, got {scored} "
            f"and {longest}; the penalty for overlong responses begins before that limit"
        )


def _batches(parsed: Sections) -> Iterator[str]:
    rollout, train = parsed["rollout"], parsed["train"]
    if rollout.starvation_policy == "relax" and not parsed["reward"].keep_uniform_groups:
        yield (
            "`reward.keep_uniform_groups` must be true with `rollout.starvation_policy = 'relax'`, "
            "got False; rollout would fill the batch with groups that reward throws away"
        )
    rollouts = rollout.prompts_per_iteration * rollout.group_size
    if train.rollouts_per_minibatch > rollouts:
        yield (
            f"`train.rollouts_per_minibatch` must not exceed the {rollouts} rollouts of an "
            "iteration (`rollout.prompts_per_iteration` x `rollout.group_size`), got "
            f"{train.rollouts_per_minibatch}"
        )
    # With windows, an iteration may continue only one response of a group.
    most = rollouts if rollout.window_tokens else rollout.prompts_per_iteration
    if train.max_groups is not None and train.max_groups >= most:
        yield (
            f"`train.max_groups` must be below the {most} groups that an iteration may have, got "
            f"{train.max_groups}; `train.selection = 'all'` trains on every group"
        )


def _windows(parsed: Sections) -> Iterator[str]:
    rollout, algorithm = parsed["rollout"], parsed["algorithm"]
    window, unfinished = rollout.window_tokens, rollout.unfinished
    trained = getattr(algorithm, "window_tokens", None)
    if trained not in (None, window):
        yield (
            f"`rollout.window_tokens` must equal `algorithm.window_tokens`, got {window} and "
            f"{trained}; the algorithm trains on the windows that rollout cuts"
        )
    if trained is not None and unfinished != "train":
        yield (
            "`rollout.unfinished` must be 'train' for an algorithm that trains on windows, got "
            f"{unfinished!r}"
        )
    if window and unfinished != "hold_group" and not parsed["reward"].keep_uniform_groups:
        yield (
            "`reward.keep_uniform_groups` must be true with `rollout.window_tokens`, got False; "
            "the responses of a group finish in different iterations, so that none of them shows "
            "whether the group carries a signal"
        )
    if trained is not None or not 0 < window < rollout.max_response_tokens:
        return
    compares_groups = hasattr(algorithm, "std")
    wanted = ("hold_group",) if compares_groups else ("hold", "hold_group")
    if unfinished not in wanted:
        yield (
            f"`rollout.unfinished` must be {' or '.join(map(repr, wanted))} with "
            f"`rollout.window_tokens` below `rollout.max_response_tokens`, got {unfinished!r}; "
            "this algorithm trains on whole responses"
            + (" and compares those of a group" if compares_groups else "")
        )


def _older_policies(parsed: Sections) -> Iterator[str]:
    """Require a correction where the policy may train on tokens that an older policy sampled."""
    rollout, algorithm = parsed["rollout"], parsed["algorithm"]
    if getattr(algorithm, "correction", "off") != "off":
        return
    trains_windows = getattr(algorithm, "window_tokens", None) is not None
    is_cut = 0 < rollout.window_tokens < rollout.max_response_tokens and not trains_windows
    ways = {
        "`rollout.window_tokens` below `rollout.max_response_tokens`": is_cut,
        "`rollout.max_staleness` above 0": rollout.max_staleness,
        "`rollout.ahead`": rollout.ahead,
    }
    for way, is_taken in ways.items():
        if is_taken:
            yield (
                f"`algorithm.correction` must not be 'off' with {way}, got 'off'; responses have "
                "tokens of policies before the one that trains: take 'token_truncate' or 'bypass'"
            )


def _training(parsed: Sections) -> Iterator[str]:
    rollout, train = parsed["rollout"], parsed["train"]
    for name, off in (("top_p", 1.0), ("top_k", 0)):
        seen = getattr(rollout, name)
        if seen != off:
            yield (
                f"`rollout.{name}` must be {off}, which samples from the whole distribution, got "
                f"{seen}; the trainer does not score tokens under a truncated one. `[evaluate]` "
                "may truncate"
            )
    if train.reference_policy and not parsed["algorithm"].kl_coefficient:
        yield (
            "`algorithm.kl_coefficient` must be above 0 with `train.reference_policy`, got 0 and "
            f"{train.reference_policy!r}; without a penalty no reference is used"
        )
    if not (rollout.keep_routing or train.replay_routing):
        return
    asking = "train.replay_routing" if train.replay_routing else "rollout.keep_routing"
    experts, origin = _experts(parsed)
    if experts == 0:
        yield f"`{asking}` must be false for a model without experts, got true with {origin} = 0"
    if parsed["engine"].name == "vllm" and rollout.device == "cpu":
        yield (
            f"`{asking}` must be false with the engine `vllm` on the CPU, which can not "
            "return the experts of a token, got true; `engine.name = 'transformers'` can"
        )


def _experts(parsed: Sections) -> tuple[int | None, str]:
    """Return the number of routed experts of a layer and its source; None if not readable here."""
    model = parsed["model"]
    if not model.path:
        return model.num_experts, "`model.num_experts`"
    place = Path(model.path) / "config.json"
    try:
        config = parse_config(place.read_bytes(), str(place))
    except (OSError, ConfigError):  # on the hub, or a fault that a later stage reports
        return None, ""
    return num_experts(config), f"experts in {str(place)!r}"


def _ranks(parsed: Sections) -> Iterator[str]:
    engine = parsed["engine"]
    if engine.name not in APART:
        return
    experts, origin = _experts(parsed)
    if experts is not None:
        fault = spread_fault(experts, engine.expert_ranks, engine.redundant_experts)
        if fault:
            yield f"{fault} ({origin} = {experts}, `engine.name = {engine.name!r}`)"
    # Each vLLM rank has a single batch.
    slots = engine.attention_ranks * (engine.micro_batches if engine.name == "disagg" else 1)
    for section in ("rollout", "evaluate", "sft"):
        rows = parsed[section].max_rows
        if rows < slots:
            yield (
                f"`{section}.max_rows` must be at least one row for each of the {slots} "
                f"micro-batches (`engine.attention_ranks` x `engine.micro_batches`), got {rows}"
            )


def check_run(config: Mapping[str, Mapping[str, Any]], num_shards: int) -> list[str]:
    """Return faults that prevent a run with a resolved configuration.

    A valid configuration may still lack what a run needs: presets with published values name no
    model, and the context of the small built model is too short for them. `num_shards` counts
    the rollout shards of an iteration in the compiled pipeline.
    """
    faults = []
    prompts = config["rollout"]["prompts_per_iteration"]
    if not 1 <= num_shards <= prompts:
        faults.append(
            f"the pipeline must have 1 to `rollout.prompts_per_iteration` ({prompts}) rollout "
            f"shards, got {num_shards}; compile it with fewer shards, each fills a part of the "
            "batch"
        )
    named = {"curate.verifier": config["curate"]["verifier"]}
    for place, chosen in enumerate(config["curate"].get("evaluation_sets", ())):
        named[f"curate.evaluation_sets.{place}.verifier"] = chosen["verifier"]
    for place, function in enumerate(config["reward"].get("functions", ())):
        named[f"reward.functions.{place}.name"] = function["name"]
    for key, verifier in named.items():
        try:
            if verifier != "auto" or key.startswith("reward."):
                check_verifier(verifier)
        except ConfigError as error:
            faults.append(f"`{key}`: {error}")
    if config["model"]["path"]:
        return faults
    limit = config["model"]["max_model_tokens"]
    for section in ("rollout", "sft", "evaluate"):
        tokens = config[section]["max_response_tokens"]
        if tokens >= limit:
            faults.append(
                f"`{section}.max_response_tokens` must be below `model.max_model_tokens` "
                f"({limit}), which holds prompt and response, got {tokens}; give a trained model "
                "by `model`, or start from a preset for the small one"
            )
    return faults
