"""Checkpoints that load under any layout; the public API for a training program of your own.

Each name is imported on first use, so that `import planish.checkpoint` is light.
`docs/checkpoint.md` has an example of every function; the pipeline uses `train_state`.

Source: ByteCheckpoint, arXiv 2407.20143.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from planish.base.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointExists,
    CheckpointIncomplete,
    CheckpointNotFound,
    LayoutMismatch,
    PlanMismatch,
    SaveFailed,
    StoreError,
)

if TYPE_CHECKING:
    from planish.checkpoint.adapters.base import RandomStreams
    from planish.checkpoint.adapters.loader_state import Consumed, Loader, LoaderShard
    from planish.checkpoint.adapters.placement import FlatShard
    from planish.checkpoint.api import (
        delete,
        diff,
        export_dcp,
        export_hf,
        gc,
        import_dcp,
        info,
        latest,
        list_checkpoints,
        load,
        retain,
        save,
        verify,
    )
    from planish.checkpoint.checkpoint_manager import CheckpointManager, Resumed, Schedule
    from planish.checkpoint.loading.agree import LoadOptions
    from planish.checkpoint.saving.agree import SaveOptions
    from planish.checkpoint.saving.finish import SaveHandle
    from planish.checkpoint.watch.monitor import CheckpointInfo

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointIncomplete",
    "CheckpointInfo",
    "CheckpointManager",
    "CheckpointNotFound",
    "Consumed",
    "FlatShard",
    "LayoutMismatch",
    "LoadOptions",
    "Loader",
    "LoaderShard",
    "PlanMismatch",
    "RandomStreams",
    "Resumed",
    "SaveFailed",
    "SaveHandle",
    "SaveOptions",
    "Schedule",
    "StoreError",
    "delete",
    "diff",
    "export_dcp",
    "export_hf",
    "gc",
    "import_dcp",
    "info",
    "latest",
    "list_checkpoints",
    "load",
    "retain",
    "save",
    "verify",
]

_MODULES = {
    "CheckpointInfo": "planish.checkpoint.watch.monitor",
    "CheckpointManager": "planish.checkpoint.checkpoint_manager",
    "Consumed": "planish.checkpoint.adapters.loader_state",
    "FlatShard": "planish.checkpoint.adapters.placement",
    "LoadOptions": "planish.checkpoint.loading.agree",
    "Loader": "planish.checkpoint.adapters.loader_state",
    "LoaderShard": "planish.checkpoint.adapters.loader_state",
    "RandomStreams": "planish.checkpoint.adapters.base",
    "Resumed": "planish.checkpoint.checkpoint_manager",
    "SaveHandle": "planish.checkpoint.saving.finish",
    "SaveOptions": "planish.checkpoint.saving.agree",
    "Schedule": "planish.checkpoint.checkpoint_manager",
}
"""Name -> its module; the functions are all in `api`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `planish.checkpoint` has no `{name}`")
    return getattr(importlib.import_module(_MODULES.get(name, "planish.checkpoint.api")), name)
