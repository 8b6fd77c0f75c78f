"""Rollout engines: token ids in, sampled token ids with log-probabilities out.

It does not decide about groups, windows or filters: that is the driver's work. Engines are named
in one table and imported on use, since their packages can not share one environment.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from planish.base.errors import ConfigError

if TYPE_CHECKING:
    from planish.engines.base import BaseEngine

ENGINES: dict[str, str] = {
    "transformers": "planish.engines.transformers.engine:TransformersEngine",
}
"""Engine name to `module:class`; each class is a `BaseEngine`."""


def open_engine(name: str, policy_pin: str, **options: Any) -> BaseEngine:
    """Return a started engine that holds the policy at `policy_pin`.

    Args:
        name: key in `ENGINES`.
        policy_pin: pinned URI of a `policy/1` export.
        **options: keyword arguments of the engine's class.

    Raises:
        ConfigError: no such engine.
        EngineError: the engine could not start.
    """
    from planish.engines.requests import ModelRef

    if name not in ENGINES:
        raise ConfigError(f"an engine must be one of {sorted(ENGINES)}, got {name!r}")
    module, _, cls = ENGINES[name].partition(":")
    engine: BaseEngine = getattr(importlib.import_module(module), cls)(**options)
    engine.start(ModelRef(pin=policy_pin))
    return engine
