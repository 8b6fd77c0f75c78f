"""Rollout engines: they take token ids and return sampled token ids with log-probabilities.

Engines do not know groups, windows or filters; the rollout stage does. The table `ENGINES` names
the engines. An engine is imported only when it is used, since the packages of two engines may not
fit into one environment.
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from planish.engines.base import BaseEngine
    from planish.engines.config import EngineConfig
    from planish.engines.requests import ModelRef

ENGINES: dict[str, str] = {
    "disagg": "planish.engines.disagg.engine:DisaggEngine",
    "transformers": "planish.engines.transformers.engine:TransformersEngine",
    "vllm": "planish.engines.vllm.engine:VllmEngine",
    "vllm_disagg": "planish.engines.disagg.engine:DisaggEngine",
}
"""Engine name to `module:class`; each class is a `BaseEngine`."""

APART = ("disagg", "vllm_disagg")
"""Engines with attention and experts in different processes."""


def open_engine(config: EngineConfig, model: ModelRef, **options: Any) -> BaseEngine:
    """Return a started engine for the policy `model`; `options` go to the engine's class."""
    module, _, cls = ENGINES[config.name].partition(":")
    engine: BaseEngine = getattr(importlib.import_module(module), cls)(config=config, **options)
    engine.start(model)
    return engine


class OpenEngine(Protocol):
    """Function that opens a stage's engine for a `with` block, like `open_engine`."""

    def __call__(
        self, config: EngineConfig, model: ModelRef, **options: Any
    ) -> AbstractContextManager[BaseEngine]:
        """Return a context with a started engine for the policy `model`."""
