"""Rollout engines: token ids in, sampled token ids with log-probabilities out.

It does not decide about groups, windows or filters: that is the driver's work. Engines are named
in one table and imported on use, since their packages can not share one environment.
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
"""Engines whose attention and experts are in different processes."""


def open_engine(config: EngineConfig, model: ModelRef, **options: Any) -> BaseEngine:
    """Return a started engine of the policy `model`; `options` are of the engine's class."""
    module, _, cls = ENGINES[config.name].partition(":")
    engine: BaseEngine = getattr(importlib.import_module(module), cls)(config=config, **options)
    engine.start(model)
    return engine


class OpenEngine(Protocol):
    """What gives a stage its engine for the length of a `with` block, as `open_engine` does."""

    def __call__(
        self, config: EngineConfig, model: ModelRef, **options: Any
    ) -> AbstractContextManager[BaseEngine]:
        """Return a context with a started engine that holds the policy `model`."""
