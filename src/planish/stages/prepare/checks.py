"""Checks across sections of a configuration: what no section can see alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from planish.base.config import Section
from planish.base.errors import ConfigError
from planish.engines import APART
from planish.models.experts import num_experts, spread_fault
from planish.verifiers import check_verifier

Look = Callable[[str], Any]
"""Returns `section.key`; None where the section or the key does not exist."""


def check_config(parsed: Mapping[str, Section]) -> list[str]:
    """Return every fault that only shows when sections are seen together.

    Args:
        parsed: validated sections by name; what a missing section or key would say is not checked.
    """

    def look(path: str) -> Any:
        section, _, key = path.partition(".")
        return getattr(parsed.get(section), key, None)

    return [
        *_limits(look),
        *_batches(look),
        *_windows(look),
        *_training(look),
        *_ranks(look),
    ]


def _limits(look: Look) -> Iterator[str]:
    """Yield faults of token limits."""
    longest = look("rollout.max_response_tokens")
    scored, buffer = look("reward.max_response_tokens"), look("reward.overlong_buffer_tokens")
    if longest is None:
        return
    if scored not in (None, longest):
        yield (
            f"`reward.max_response_tokens` must equal `rollout.max_response_tokens`, got {scored} "
            f"and {longest}; the penalty for overlong responses begins before that limit"
        )
    if buffer is not None and not 0 <= buffer <= longest:
        yield (
            "`reward.overlong_buffer_tokens` must be 0 to `rollout.max_response_tokens` "
            f"({longest}), got {buffer}"
        )


def _batches(look: Look) -> Iterator[str]:
    """Yield faults of groups and mini-batches."""
    if look("rollout.starvation_policy") == "relax" and look("reward.keep_uniform_groups") is False:
        yield (
            "`reward.keep_uniform_groups` must be true with `rollout.starvation_policy = 'relax'`, "
            "got False; rollout would fill the batch with groups that reward throws away"
        )
    prompts, group_size = look("rollout.prompts_per_iteration"), look("rollout.group_size")
    if prompts is None or group_size is None:
        return
    rollouts = prompts * group_size
    minibatch, max_groups = look("train.rollouts_per_minibatch"), look("train.max_groups")
    if minibatch is not None and minibatch > rollouts:
        yield (
            f"`train.rollouts_per_minibatch` must not exceed the {rollouts} rollouts of an "
            f"iteration (`rollout.prompts_per_iteration` x `rollout.group_size`), got {minibatch}"
        )
    # with windows a group may be down to the one response that goes on
    most = rollouts if look("rollout.window_tokens") else prompts
    if max_groups is not None and max_groups >= most:
        yield (
            f"`train.max_groups` must be below the {most} groups that an iteration may have, got "
            f"{max_groups}; `train.selection = 'all'` trains on every group"
        )


def _windows(look: Look) -> Iterator[str]:
    """Yield faults of windows, and of responses that several policy versions have sampled."""
    window, trained = look("rollout.window_tokens"), look("algorithm.window_tokens")
    unfinished = look("rollout.unfinished")
    if window is None:
        return
    if trained not in (None, window):
        yield (
            f"`rollout.window_tokens` must equal `algorithm.window_tokens`, got {window} and "
            f"{trained}; the algorithm trains on the windows that rollout cuts"
        )
    if trained is not None and unfinished not in (None, "train"):
        yield (
            "`rollout.unfinished` must be 'train' for an algorithm that trains on windows, got "
            f"{unfinished!r}"
        )
    keeps_all = look("reward.keep_uniform_groups")
    if window and unfinished not in (None, "hold_group") and keeps_all is False:
        yield (
            "`reward.keep_uniform_groups` must be true with `rollout.window_tokens`, got False; "
            "the responses of a group finish in different iterations, so that none of them shows "
            "whether the group carries a signal"
        )
    longest, correction = look("rollout.max_response_tokens"), look("algorithm.correction")
    if trained is not None or None in (longest, unfinished, correction):
        return
    if not 0 < window < longest:
        return
    compares_groups = look("algorithm.std") is not None
    wanted = ("hold_group",) if compares_groups else ("hold", "hold_group")
    if unfinished not in wanted:
        yield (
            f"`rollout.unfinished` must be {' or '.join(map(repr, wanted))} with "
            f"`rollout.window_tokens` below `rollout.max_response_tokens`, got {unfinished!r}; "
            "this algorithm trains on whole responses"
            + (" and compares those of a group" if compares_groups else "")
        )
    if correction == "off":
        yield (
            "`algorithm.correction` must not be 'off' with `rollout.window_tokens` below "
            "`rollout.max_response_tokens`, got 'off'; the tokens of a response come from several "
            "policies: take 'bypass' or 'token_truncate'"
        )


def _training(look: Look) -> Iterator[str]:
    """Yield faults of what the trainer scores, and of what is kept for it."""
    for name, off in (("top_p", 1.0), ("top_k", 0)):
        seen = look(f"rollout.{name}")
        if seen not in (None, off):
            yield (
                f"`rollout.{name}` must be {off}, which samples from the whole distribution, got "
                f"{seen}; the trainer does not score tokens under a truncated one. `[evaluate]` "
                "may truncate"
            )
    pin = look("train.reference_policy")
    if pin and not look("algorithm.kl_coefficient"):
        yield (
            "`algorithm.kl_coefficient` must be above 0 with `train.reference_policy`, got 0 and "
            f"{pin!r}; without a penalty no reference is used"
        )
    asking = [key for key in ("rollout.keep_routing", "train.replay_routing") if look(key)]
    if not asking:
        return
    experts, origin = _experts(look)
    if experts == 0:
        yield (
            f"`{asking[-1]}` must be false for a model without experts, got true with {origin} = 0"
        )
    if look("engine.name") == "vllm" and look("rollout.device") == "cpu":
        yield (
            f"`{asking[-1]}` must be false with the engine `vllm` on the CPU, which can not "
            "return the experts of a token, got true; `engine.name = 'transformers'` can"
        )


def _experts(look: Look) -> tuple[int | None, str]:
    """Return the routed experts of a layer, and what says so; None where only the hub knows."""
    path = look("model.path")
    if not path:
        return look("model.num_experts"), "`model.num_experts`"
    place = Path(path) / "config.json"
    try:
        config = json.loads(place.read_bytes())
    except (OSError, ValueError):  # of the hub, or a fault that the stage that loads it tells
        return None, ""
    return num_experts(config) if isinstance(config, dict) else None, f"experts in {str(place)!r}"


def _ranks(look: Look) -> Iterator[str]:
    """Yield faults of an engine whose attention and experts are apart."""
    name = look("engine.name")
    if name not in APART:
        return
    experts, origin = _experts(look)
    if experts is not None:
        fault = spread_fault(experts, look("engine.expert_ranks"), look("engine.redundant_experts"))
        if fault:
            yield f"{fault} ({origin} = {experts}, `engine.name = {name!r}`)"
    # vLLM has one batch for each rank.
    slots = look("engine.attention_ranks")
    slots *= look("engine.micro_batches") if name == "disagg" else 1
    for path in ("rollout.max_rows", "evaluate.max_rows", "sft.max_rows"):
        rows = look(path)
        if rows is not None and rows < slots:
            yield (
                f"`{path}` must be at least one row for each of the {slots} micro-batches "
                f"(`engine.attention_ranks` x `engine.micro_batches`), got {rows}"
            )


def check_run(config: Mapping[str, Mapping[str, Any]], num_shards: int) -> list[str]:
    """Return what stands in the way of running a resolved configuration.

    A configuration can be sound and yet lack a thing that only a run needs: the published values
    name no model, and the small one that is built from scratch is too short for them.

    Args:
        config: resolved tables.
        num_shards: rollout tasks of an iteration, from the compiled pipeline.
    """
    faults = []
    prompts = config.get("rollout", {}).get("prompts_per_iteration")
    if num_shards < 1 or (prompts is not None and num_shards > prompts):
        faults.append(
            f"the pipeline must have 1 to `rollout.prompts_per_iteration` ({prompts}) rollout "
            f"shards, got {num_shards}; compile it with fewer shards, each fills a part of the "
            "batch"
        )
    data = config.get("curate", {})
    named = {"curate.verifier": data.get("verifier", "auto")}
    for place, chosen in enumerate(data.get("evaluation_sets", ())):
        named[f"curate.evaluation_sets.{place}.verifier"] = chosen["verifier"]
    for place, function in enumerate(config.get("reward", {}).get("functions", ())):
        named[f"reward.functions.{place}.name"] = function["name"]
    for key, verifier in named.items():
        try:
            if verifier != "auto" or key.startswith("reward."):
                check_verifier(verifier)
        except ConfigError as error:
            faults.append(f"`{key}`: {error}")
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
