"""Reinforcement-learning post-training of reasoning language models as a Kubeflow pipeline."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planish.submit.local.pipeline import Result, run_pipeline
else:

    def __getattr__(name: str) -> Any:
        """Import what a notebook calls when it is asked for; what starts `planish` stays light."""
        if name in __all__:
            return getattr(importlib.import_module("planish.submit.local.pipeline"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = ["Result", "run_pipeline"]
__version__ = "0.1.0"
