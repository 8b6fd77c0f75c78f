"""The sft stage: give the policy that the first iteration starts from.

It gives the pinned policy from which the run resumes, or a trained model as it is, or a policy that
has learnt from worked traces until it is good enough to begin.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from planish.models.adapters import configured
from planish.models.config import ModelConfig
from planish.records import layout
from planish.records.files import POLICY_SCHEMA
from planish.records.io import finished, read_manifest, read_set
from planish.records.prompts import PromptSet, TraceSet
from planish.records.refs import Ref, parse_pin
from planish.run.stage import Artifact, Context, Outcome, execute, read_ref
from planish.stages.sft.config import SftConfig
from planish.verifiers import VerifierOptions

if TYPE_CHECKING:
    from planish.models.policy import Policy

logger = logging.getLogger(__name__)

START_BAND = (0.15, 0.45)
"""Useful range of accuracy at the start: below it hardly a group has a right answer, above it
little is left to learn."""

FIRST_VERSION = 0


class FirstPolicy(NamedTuple):
    """Pinned URIs that the first iteration begins with."""

    policy_pin: str
    state_pin: str
    """Train state; empty unless the run resumes."""


def run(
    root: str, config_sha256: str, prompts: Artifact, policy: Artifact, metrics: Artifact
) -> FirstPolicy:
    """Give the policy that the first iteration starts from.

    `components/sft.py` describes the parameters.
    """
    outcome = execute(
        "sft",
        lambda context: first_policy(context, read_ref(prompts)),
        root=root,
        config_sha256=config_sha256,
        outputs={"policy": policy, "metrics": metrics},
    )
    return FirstPolicy(str(outcome.values["policy_pin"]), str(outcome.values["state_pin"]))


def _outcome(
    ref: Ref, metrics: dict[str, float], *, state_pin: str = "", already_done: bool = False
) -> Outcome:
    return Outcome(
        refs={"policy": ref},
        metrics=metrics,
        values={"policy_pin": ref.pin(), "state_pin": state_pin},
        already_done=already_done,
    )


def first_policy(context: Context, prompts: Ref) -> Outcome:
    """Resume, import or train the first policy unless an earlier attempt has."""
    policy_pin, state_pin = context.run["initial"]["policy"], context.run["initial"]["state"]
    if policy_pin:
        uri, digest = parse_pin(policy_pin)
        ref = read_manifest(uri, sha256=digest).ref(uri)
        logger.info("resumed policy=%s", policy_pin)
        return _outcome(ref, {"resumed": 1.0}, state_pin=state_pin, already_done=True)
    config = context.section(SftConfig, "sft")
    model_config = context.section(ModelConfig, "model")
    imports = bool(model_config.path) and not config.force
    parents: dict[str, str] = {}
    if not imports:
        traces = read_manifest(layout.traces(context.root)).sha256
        parents = {"prompts": prompts.manifest_sha256, "traces": traces}
    uri = layout.policy(context.root, FIRST_VERSION)
    done = finished(uri, POLICY_SCHEMA, parents=parents, config_sha256=context.config_sha256)
    if done is not None:
        known = read_manifest(uri, sha256=done.manifest_sha256).attributes["metrics"]
        if "accuracy" in known:
            check_start(known["accuracy"])
        return _outcome(done, dict(known), already_done=True)
    import torch

    from planish.models.policy import DTYPES, build_policy, name_head_dtype, save_policy
    from planish.models.pretrained import load_pretrained

    torch.set_num_threads(config.num_threads)
    if model_config.path:
        policy = load_pretrained(model_config)
    else:
        policy = build_policy(model_config, context.seed)
    name_head_dtype(policy.model.config, model_config)
    if imports:
        logger.info("cold start skipped: `model.path` gives a trained model")
        numbers = {"imported": 1.0}
    elif not config.force and not read_manifest(layout.traces(context.root)).num_rows:
        logger.warning(
            "cold start skipped: the data set has no worked traces, and the policy begins "
            "untrained; give a model, or a column `trace`"
        )
        numbers = {"cold_start_skipped": 1.0}
    else:
        numbers = _train(context, policy, config, prompts)
    policy.model.to("cpu", DTYPES[model_config.dtype])
    ref = save_policy(
        uri,
        policy,
        version=FIRST_VERSION,
        parents=parents,
        attributes={
            "config_sha256": context.config_sha256,
            "seed": context.seed,
            "metrics": numbers,
        },
    )
    if "accuracy" in numbers:
        check_start(numbers["accuracy"])
    return _outcome(ref, numbers)


def _train(
    context: Context, policy: Policy, config: SftConfig, prompts_ref: Ref
) -> dict[str, float]:
    from planish.base.parallel import pick_device
    from planish.engines.config import EngineConfig
    from planish.models.lora import add_adapters, merge_adapters
    from planish.models.policy import DTYPES
    from planish.stages.sft.probe import Probe
    from planish.stages.sft.traces import start_traces
    from planish.stages.sft.training import train_until

    prompts = read_set(PromptSet, prompts_ref.uri, sha256=prompts_ref.manifest_sha256)
    traces = read_set(TraceSet, layout.traces(context.root))
    probes, encoded = start_traces(prompts, traces, policy, config)
    policy.model.float().to(pick_device(config.device))
    model_config = context.section(ModelConfig, "model")
    dtype = DTYPES[model_config.dtype]
    engine = context.section(EngineConfig, "engine")
    # A new model has no weights worth keeping, so it trains all of them, without adapters.
    adapters = configured(model_config) if model_config.path else None
    judging = VerifierOptions.of(context.config.get("reward", {}))
    with Probe(
        policy, config, engine, run_seed=context.seed, dtype=dtype, judging=judging
    ) as probe:
        if adapters is not None:
            add_adapters(policy.model, adapters, seed=(context.seed,))
        sizes = [p.numel() for p in policy.model.parameters() if p.requires_grad]
        numbers = train_until(
            policy,
            encoded,
            config,
            seed=context.seed,
            measure=lambda: probe.accuracy(probes, num_samples=config.probe_samples),
        )
        if adapters is not None:
            merge_adapters(policy.model)
            numbers["num_trained_parameters"] = float(sum(sizes))
    return {
        **numbers,
        "num_traces": float(len(encoded.tokens)),
        "num_probes": float(probes.num_rows),
    }


def check_start(accuracy: float) -> None:
    """Warn when reinforcement learning would starve, or would have nothing left to improve."""
    low, high = START_BAND
    if low <= accuracy <= high:
        return
    remedy = (
        "train longer: raise `sft.max_steps` or `sft.target_accuracy`"
        if accuracy < low
        else "train less: lower `sft.target_accuracy` or `sft.max_traces`"
    )
    logger.warning(
        "the start accuracy must lie in %s..%s, got %.3f; %s", low, high, accuracy, remedy
    )
