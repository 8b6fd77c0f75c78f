"""Rollout engines: token ids in, sampled token ids with log-probabilities out.

It does not decide about groups, windows or filters: that is the driver's work. Engines are named
in one table and imported on use, since their packages can not share one environment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planish.engines.base import BaseEngine
    from planish.engines.config import EngineConfig

ENGINES: dict[str, str] = {
    "transformers": "planish.engines.transformers.engine:TransformersEngine",
    "vllm": "planish.engines.vllm.engine:VllmEngine",
}
"""Engine name to `module:class`; each class is a `BaseEngine`."""


def open_engine(config: EngineConfig, policy_pin: str, **options: Any) -> BaseEngine:
    """Return a started engine that holds the policy at `policy_pin`.

    Args:
        config: which engine, and its settings.
        policy_pin: pinned URI of a `policy/1` export.
        **options: further keyword arguments of the engine's class.

    Raises:
        ConfigError: what the engine needs is not there, or a setting does not fit this machine.
        EngineError: the engine could not start.
    """
    from planish.engines.requests import ModelRef

    module, _, cls = ENGINES[config.name].partition(":")
    engine: BaseEngine = getattr(importlib.import_module(module), cls)(config=config, **options)
    engine.start(ModelRef(pin=policy_pin))
    return engine
