"""The sft stage: give the policy that the first iteration starts from.

Either the pinned policy that the run resumes from, or a trained model as it is, or a policy that
learns from worked traces until it is good enough to begin.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from planish.base.errors import ConfigError
from planish.models.config import ModelConfig
from planish.records import layout
from planish.records.io import finished, read_manifest, read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute, read_ref
from planish.stages.sft.config import SftConfig

if TYPE_CHECKING:
    from planish.models.policy import Policy

logger = logging.getLogger(__name__)

POLICY = "policy/1"
FIRST_VERSION = 0


class Start(NamedTuple):
    """What the first iteration begins with."""

    policy_pin: str
    """Pinned URI of the policy."""
    state_pin: str
    """Pinned URI of the train state; empty unless the run resumes."""


def run(
    root: str, config_sha256: str, prompts: Artifact, policy: Artifact, metrics: Artifact
) -> Start:
    """Give the policy that the first iteration starts from.

    Args:
        root: URI of the run.
        config_sha256: digest of the run's configuration.
        prompts: Ref of the training prompts.
        policy: gets the Ref of the policy.
        metrics: gets steps, loss and accuracy.

    Returns:
        Pins of the policy and of the train state.
    """
    outcome = execute(
        "sft",
        lambda context: _work(context, read_ref(prompts)),
        root=root,
        config_sha256=config_sha256,
        outputs={"policy": policy, "metrics": metrics},
    )
    return Start(str(outcome.values["policy_pin"]), str(outcome.values["state_pin"]))


def _outcome(
    ref: Ref, metrics: dict[str, float], *, state_pin: str = "", already_done: bool = False
) -> Outcome:
    return Outcome(
        refs={"policy": ref},
        metrics=metrics,
        values={"policy_pin": ref.pin(), "state_pin": state_pin},
        already_done=already_done,
    )


def _start(context: Context) -> tuple[str, str]:
    """Return the pins of the policy and the state that the run begins with; empty for none."""
    initial = context.run.get("initial")
    pins = initial if isinstance(initial, dict) else {}
    policy, state = pins.get("policy"), pins.get("state")
    if isinstance(policy, str) and isinstance(state, str):
        return policy, state
    raise ConfigError(
        f"`{layout.run_file(context.root)}` must hold initial with the pins policy and state, got "
        f"{initial!r:.200}; choose a new root"
    )


def _work(context: Context, prompts: Ref) -> Outcome:
    policy_pin, state_pin = _start(context)
    if policy_pin:
        uri, digest = parse_pin(policy_pin)
        ref = read_manifest(uri, sha256=digest).ref(uri)
        logger.info("resumed policy=%s", policy_pin)
        return _outcome(ref, {"resumed": 1.0}, state_pin=state_pin, already_done=True)
    config = context.section(SftConfig, "sft")
    model_config = context.section(ModelConfig, "model")
    imports = bool(model_config.path) and not config.force
    parents = {} if imports else _parents(context, prompts)
    uri = layout.policy(context.root, FIRST_VERSION)
    done = finished(uri, POLICY, parents=parents, config_sha256=context.config_sha256)
    if done is not None:
        known = read_manifest(uri, sha256=done.manifest_sha256).attributes["metrics"]
        if not imports:
            check_start(known["accuracy"], config)
        return _outcome(done, dict(known), already_done=True)
    policy = _first_policy(model_config, config, context.seed)
    numbers = {"imported": 1.0}
    if not imports:
        numbers = _train(context, policy, config, prompts)
    ref = _save(context, policy, model_config, parents, numbers)
    if not imports:
        # After saving: the policy can be looked at even where the run must end here.
        check_start(numbers["accuracy"], config)
    return _outcome(ref, numbers)


def _parents(context: Context, prompts: Ref) -> dict[str, str]:
    traces = read_manifest(layout.traces(context.root))
    return {"prompts": prompts.manifest_sha256, "traces": traces.sha256}


def _first_policy(model_config: ModelConfig, config: SftConfig, seed: int) -> Policy:
    import torch

    from planish.models.policy import build_policy
    from planish.models.pretrained import load_pretrained

    torch.set_num_threads(config.num_threads)
    if not model_config.path:
        return build_policy(model_config, seed)
    return load_pretrained(
        model_config.path,
        revision=model_config.revision,
        chat_template=model_config.chat_template,
        stop_strings=model_config.stop_strings,
    )


def _train(
    context: Context, policy: Policy, config: SftConfig, prompts_ref: Ref
) -> dict[str, float]:
    """Train until the target or the cap; return steps, loss and accuracy."""
    from planish.base.parallel import pick_device
    from planish.stages.sft.probe import Probe
    from planish.stages.sft.traces import encode_traces, probe_rows
    from planish.stages.sft.training import train_until

    prompts = read_set(PromptSet, prompts_ref.uri, sha256=prompts_ref.manifest_sha256)
    traces = read_set(TraceSet, layout.traces(context.root))
    if not prompts.num_rows:
        raise ConfigError(
            f"sft needs training prompts to measure accuracy on, got none at {prompts_ref.uri!r}; "
            "widen the filters of `curate`"
        )
    probes = prompts.take(probe_rows(prompts, config.probe_prompts))
    limit = int(getattr(policy.model.config, "max_position_embeddings", 0) or 0)
    encoded = encode_traces(
        traces,
        policy.tokenizer,
        without=frozenset(probes.prompt_id),
        max_traces=config.max_traces,
        max_tokens=limit,
    )
    policy.model.float().to(pick_device(config.device))
    with Probe(policy, config, context.seed) as probe:
        found = train_until(
            policy,
            encoded,
            config,
            seed=context.seed,
            measure=lambda: probe.accuracy(probes, num_samples=config.probe_samples),
        )
    return {**found, "num_traces": float(len(encoded.tokens)), "num_probes": float(probes.num_rows)}


def check_start(accuracy: float, config: SftConfig) -> None:
    """Say so when reinforcement learning would starve, or have nothing left to show.

    Raises:
        ConfigError: outside the band and `enforce_start_band` is set.
    """
    if config.min_start <= accuracy <= config.max_start:
        return
    remedy = (
        "train longer: raise `sft.max_steps` or `sft.target_accuracy`"
        if accuracy < config.min_start
        else "train less: lower `sft.target_accuracy` or `sft.max_traces`"
    )
    message = (
        f"the start accuracy must lie in {config.min_start}..{config.max_start}, got "
        f"{accuracy:.3f}; {remedy}"
    )
    if config.enforce_start_band:
        raise ConfigError(message)
    logger.warning("%s", message)


def _save(
    context: Context,
    policy: Policy,
    model_config: ModelConfig,
    parents: dict[str, str],
    numbers: dict[str, float],
) -> Ref:
    from planish.models.policy import DTYPES, save_policy

    policy.model.to("cpu", DTYPES[model_config.dtype])
    return save_policy(
        layout.policy(context.root, FIRST_VERSION),
        policy,
        version=FIRST_VERSION,
        parents=parents,
        attributes={
            "config_sha256": context.config_sha256,
            "seed": context.seed,
            "metrics": numbers,
        },
    )
