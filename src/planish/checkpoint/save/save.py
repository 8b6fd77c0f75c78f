"""Saving with the engine that a process group keeps between saves.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from planish.checkpoint.ranks.coordination import Control
from planish.checkpoint.save.agree import Roles
from planish.checkpoint.save.engine import SaveEngine
from planish.checkpoint.save.finish import AfterCommit
from planish.checkpoint.save.handle import SaveHandle
from planish.checkpoint.save.options import SaveOptions
from planish.checkpoint.save.staging import BufferLayout
from planish.checkpoint.storage.base import Storage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = [
    "SaveEngine",
    "SaveHandle",
    "SaveOptions",
    "close_engines",
    "default_engine",
    "save_state",
    "warmup",
]

_engines: dict[int, tuple[Any, SaveEngine]] = {}


def default_engine(group: ProcessGroup | None = None) -> SaveEngine:
    """Return the engine of a process group, made at the first call: then a collective."""
    import torch.distributed as dist

    member: Any = None
    if dist.is_available() and dist.is_initialized():
        member = group if group is not None else dist.group.WORLD
    found = _engines.get(id(member))
    if found is None or found[0] is not member or found[1].is_closed:
        found = member, SaveEngine(Control.join(group))
        _engines[id(member)] = found
    return found[1]


def close_engines() -> None:
    """Close every engine of this process, waiting for the saves under way."""
    while _engines:
        _engines.popitem()[1][1].close()


def save_state(
    roles: Callable[[], Roles] | Roles,
    options: SaveOptions,
    *,
    group: ProcessGroup | None = None,
    engine: SaveEngine | None = None,
    storage: Storage | None = None,
    after_commit: AfterCommit | None = None,
) -> SaveHandle:
    """Save with the engine of a process group; see `SaveEngine.save`."""
    engine = engine or default_engine(group)
    return engine.save(roles, options, storage=storage, after_commit=after_commit)


def warmup(sizes: Sequence[int], group: ProcessGroup | None = None) -> None:
    """Prepare for saves of files of these sizes on this rank; a collective the first time."""
    default_engine(group).warmup(BufferLayout.of(sizes).size)
