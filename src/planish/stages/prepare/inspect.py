"""Open data and model before anything expensive begins, and say what they are."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from planish.base.errors import ConfigError
from planish.base.inspection import Inspection
from planish.engines import APART
from planish.engines.architectures import VLLM
from planish.models.experts import FAMILIES, num_experts
from planish.models.inspect import inspect_model

DATA_INSPECTOR = "planish.stages.curate.inspect:inspect_data"
"""`module:function` that opens the data; named as sections are: stages do not import each other."""


def inspect_sources(
    config: Mapping[str, Mapping[str, Any]], *, with_model: bool = True
) -> Inspection:
    """Open the data sets and the model of a configuration.

    Args:
        config: resolved tables.
        with_model: false where the run goes on with a policy of its own.

    Returns:
        What was found.

    Raises:
        ConfigError: every fault of data and model in one message.
        StoreUnavailable: the store does not answer.
    """
    found = Inspection()
    module, _, function = DATA_INSPECTOR.partition(":")
    getattr(importlib.import_module(module), function)(config, found)
    if with_model:
        inspect_model(config, found)
    names = found.model_config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    engine = str(config.get("engine", {}).get("name", "transformers"))
    if name and engine.startswith("vllm") and name not in VLLM:
        found.faults.append(
            f"`engine.name` must serve {name}, got {engine!r}, whose version of vLLM does not; "
            "take the engine 'transformers', or another model"
        )
    family = found.model_config.get("model_type")
    if name and engine in APART and (family not in FAMILIES or not num_experts(found.model_config)):
        found.faults.append(
            f"`engine.name` must be 'transformers' or 'vllm' for a model of {family!r}, got "
            f"{engine!r}, which takes models with experts of {', '.join(sorted(FAMILIES))}"
        )
    if found.faults:
        raise ConfigError("; ".join(found.faults))
    return found
