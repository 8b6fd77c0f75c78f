"""Checks of settings that depend on several sections of a configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from planish.base.errors import ConfigError
from planish.engines import APART
from planish.engines.config import OLDER_TOKENS
from planish.models.config import ModelConfig
from planish.models.experts import num_experts, spread_fault
from planish.models.headers import parse_config
from planish.verifiers import check_verifier


def check_config(settings: Any) -> list[str]:
    """Return the faults across sections that no `Needs` beside a setting can state."""
    checks = (_batches, _windows, _whole_distribution, _routing, _ranks)
    return [fault for check in checks for fault in check(settings)]


def _batches(settings: Any) -> Iterator[str]:
    rollout, train = settings.rollout, settings.train
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


def _windows(settings: Any) -> Iterator[str]:
    """Refuse parts of responses for an algorithm that trains on whole ones."""
    rollout, algorithm = settings.rollout, settings.algorithm
    is_cut = 0 < rollout.window_tokens < rollout.max_response_tokens
    if not is_cut or hasattr(algorithm, "window_tokens"):
        return
    cut = "`rollout.window_tokens` below `rollout.max_response_tokens`"
    compares_groups = hasattr(algorithm, "std")
    wanted = ("hold_group",) if compares_groups else ("hold", "hold_group")
    if rollout.unfinished not in wanted:
        yield (
            f"`rollout.unfinished` must be {' or '.join(map(repr, wanted))} with {cut}, got "
            f"{rollout.unfinished!r}; this algorithm trains on whole responses"
            + (" and compares those of a group" if compares_groups else "")
        )
    if algorithm.correction == "off":
        yield f"`algorithm.correction` must not be 'off' with {cut}, got 'off'; {OLDER_TOKENS}"


def _whole_distribution(settings: Any) -> Iterator[str]:
    for name, off in (("top_p", 1.0), ("top_k", 0)):
        seen = getattr(settings.rollout, name)
        if seen != off:
            yield (
                f"`rollout.{name}` must be {off}, which samples from the whole distribution, got "
                f"{seen}; the trainer does not score tokens under a truncated one. `[evaluate]` "
                "may truncate"
            )


def _routing(settings: Any) -> Iterator[str]:
    asking = "train.replay_routing" if settings.train.replay_routing else "rollout.keep_routing"
    experts, origin = _experts(settings.model)
    if experts == 0 and (settings.train.replay_routing or settings.rollout.keep_routing):
        yield f"`{asking}` must be false for a model without experts, got true with {origin} = 0"


def _experts(model: ModelConfig) -> tuple[int | None, str]:
    """Return the number of routed experts of a layer and its source; None if not readable here."""
    if not model.path:
        return model.num_experts, "`model.num_experts`"
    place = Path(model.path) / "config.json"
    try:
        config = parse_config(place.read_bytes(), str(place))
    except (OSError, ConfigError):  # on the hub, or a fault that a later stage reports
        return None, ""
    return num_experts(config), f"experts in {str(place)!r}"


def _ranks(settings: Any) -> Iterator[str]:
    engine = settings.engine
    if engine.name not in APART:
        return
    experts, origin = _experts(settings.model)
    if experts is not None:
        fault = spread_fault(experts, engine.expert_ranks, engine.redundant_experts)
        if fault:
            yield f"{fault} ({origin} = {experts}, `engine.name = {engine.name!r}`)"
    # Each vLLM rank has a single batch.
    slots = engine.attention_ranks * (engine.micro_batches if engine.name == "disagg" else 1)
    for section in ("rollout", "evaluate", "sft"):
        rows = getattr(settings, section).max_rows
        if rows < slots:
            yield (
                f"`{section}.max_rows` must be at least one row for each of the {slots} "
                f"micro-batches (`engine.attention_ranks` x `engine.micro_batches`), got {rows}"
            )


def check_run(settings: Any, num_shards: int) -> list[str]:
    """Return faults that prevent a run with a resolved configuration.

    A valid configuration may still lack what a run needs: presets with published values name no
    model, and the context of the small built model is too short for them. `num_shards` counts
    the rollout shards of an iteration in the compiled pipeline.
    """
    checks = (_shards(settings, num_shards), _verifiers(settings), _lengths(settings))
    return [fault for faults in checks for fault in faults]


def _shards(settings: Any, num_shards: int) -> Iterator[str]:
    prompts = settings.rollout.prompts_per_iteration
    if not 1 <= num_shards <= prompts:
        yield (
            f"the pipeline must have 1 to `rollout.prompts_per_iteration` ({prompts}) rollout "
            f"shards, got {num_shards}; compile it with fewer shards, each fills a part of the "
            "batch"
        )


def _verifiers(settings: Any) -> Iterator[str]:
    curate = settings.curate
    named = {"curate.verifier": curate.verifier}
    for place, chosen in enumerate(curate.evaluation_sets):
        named[f"curate.evaluation_sets.{place}.verifier"] = chosen.verifier
    named = {key: verifier for key, verifier in named.items() if verifier != "auto"}
    for place, function in enumerate(settings.reward.functions):
        named[f"reward.functions.{place}.name"] = function.name
    for key, verifier in named.items():
        try:
            check_verifier(verifier)
        except ConfigError as error:
            yield f"`{key}`: {error}"


def _lengths(settings: Any) -> Iterator[str]:
    limit = settings.model.max_model_tokens
    for section in () if settings.model.path else ("rollout", "sft", "evaluate"):
        tokens = getattr(settings, section).max_response_tokens
        if tokens >= limit:
            yield (
                f"`{section}.max_response_tokens` must be below `model.max_model_tokens` "
                f"({limit}), which holds prompt and response, got {tokens}; give a trained model "
                "by `model`, or start from a preset for the small one"
            )
