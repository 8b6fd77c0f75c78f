"""Open data and model before anything expensive starts, and describe them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.engines import APART
from planish.engines.architectures import VLLM, window_fault
from planish.models.config import ModelConfig
from planish.models.experts import FAMILIES, num_experts
from planish.models.inspect import inspect_model, open_tokenizer
from planish.store.sources import open_folder, parse_source

DATA_INSPECTOR = "planish.stages.curate.inspect"
"""Module that opens the data; it is loaded by name because stages do not import each other."""


def vocabulary_faults(found: Inspection, policy: str) -> list[str]:
    """Return a fault if a changed model has another vocabulary than the policy of the run."""
    source = parse_source(policy.partition("#")[0], key="resume_from")
    tokenizer = open_tokenizer(open_folder(source, key="resume_from"), ModelConfig())
    ours = tokenizer.backend.get_vocab()
    others = len(found.vocabulary.items() - ours.items())
    if found.vocabulary == ours:
        return []
    return [
        f"`model.path` must have the {len(ours)} tokens of the policy that the run goes on with, "
        f"got {len(found.vocabulary)}, {others} of them others, than `{policy}` has; undo the "
        "change, or begin a new root with the new model"
    ]


def inspect_sources(
    config: Mapping[str, Mapping[str, Any]], *, policy: str = "", changed: Sequence[str] = ()
) -> Inspection:
    """Open the data sets and the model of a resolved configuration.

    `policy` is the URI or pin of the policy from which the run continues, if any; then the model is
    opened only if its setting is among `changed` (the result of `differences`), because the run
    does not use it.

    Raises:
        ConfigError: every fault of data and model in one message.
        StoreUnavailable: the store does not answer.
    """
    found = Inspection()
    importlib.import_module(DATA_INSPECTOR).inspect_data(config, found)
    is_other = any(line.startswith("`model.path`:") for line in changed)
    if not policy or (is_other and config.get("model", {}).get("path")):
        inspect_model(config, found)
    if policy and found.vocabulary:
        found.faults += vocabulary_faults(found, policy)
        found.warnings.append(
            "`model.path` has changed, but the run goes on with its own policy; choose a new root "
            "to train the new model"
        )
    names = found.model_config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    engine = str(config.get("engine", {}).get("name", "transformers"))
    if name and engine.startswith("vllm") and name not in VLLM:
        found.faults.append(
            f"`engine.name` must serve {name}, got {engine!r}, whose version of vLLM does not; "
            "take the engine 'transformers', or another model"
        )
    elif engine.startswith("vllm") and (fault := window_fault(found.model_config)):
        found.faults.append(f"`engine.name` must serve the model, got {engine!r} and {fault}")
    family = found.model_config.get("model_type")
    if name and engine in APART and (family not in FAMILIES or not num_experts(found.model_config)):
        found.faults.append(
            f"`engine.name` must be 'transformers' or 'vllm' for a model of {family!r}, got "
            f"{engine!r}, which takes models with experts of {', '.join(sorted(FAMILIES))}"
        )
    if found.faults:
        raise ConfigError("; ".join(found.faults))
    return found
