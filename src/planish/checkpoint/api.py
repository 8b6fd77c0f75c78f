"""Checkpoints: save, load, find, keep and convert them; the one module that users need.

A state is a dict with any of `model`, `optimizer`, `scheduler`, `dataloader`, `random` and `extra`,
or a dict of such states by role, which are committed together. Every call may also raise a
`StoreError` where the store refuses or does not answer; within a save it becomes `SaveFailed`.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.1 (the two calls `save` and `load`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planish.checkpoint.commit import catalog
from planish.checkpoint.convert.diff import diff as diff
from planish.checkpoint.loading.verify import verify as verify
from planish.store import open_store

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from planish.checkpoint.saving.finish import SaveHandle
    from planish.checkpoint.watch.monitor import CheckpointInfo
    from planish.records.refs import Ref
    from planish.store import Store

State = Mapping[str, Any]
Framework = str | Mapping[str, str]
"""plain, ddp, fsdp, fsdp2, flat or megatron; or one of them for each role."""


def save(
    path: str,
    state: State,
    framework: Framework = "plain",
    async_: bool = True,
    *,
    step: int = 0,
    role: str | None = None,
    process_group: ProcessGroup | None = None,
    storage: Store | None = None,
    **options: Any,
) -> SaveHandle:
    """Save the state of all ranks; it becomes visible as a whole or not at all.

    Args:
        path: `s3://bucket/prefix`, `file:///folder` or a path.
        framework: framework that spreads the tensors over ranks.
        async_: return when the state is staged; else when it is committed.
        role: name of the only role; `main` without it.
        process_group: ranks that save; the default group, or this process alone without one.
        storage: store to use instead of the one that the path names.
        **options: further fields of `SaveOptions`; equal on all ranks.

    Raises:
        TypeError: a value can not be stored; nothing has been written.
        LayoutMismatch: the shards of the ranks do not tile a tensor.
        PlanMismatch: the ranks' arguments differ, or a rank did not take part in time.
        SaveFailed: a rank failed (`async_=False`); `result()` raises it otherwise.
    """
    from planish.checkpoint.adapters.base import collect_roles
    from planish.checkpoint.saving.agree import SaveOptions
    from planish.checkpoint.saving.engine import default_engine

    chosen = SaveOptions(path, step=step, is_async=async_, **options)
    return default_engine(process_group).save(
        lambda: collect_roles(state, framework, role), chosen, storage=storage
    )


def load(
    path: str,
    state: State,
    framework: Framework = "plain",
    *,
    role: str | None = None,
    process_group: ProcessGroup | None = None,
    loader_policy: Literal["exact", "restart"] = "exact",
    storage: Store | None = None,
    **options: Any,
) -> CheckpointInfo:
    """Fill a state in place from a checkpoint that any ranks and framework have saved.

    Args:
        path: place of the checkpoint, or its pin `<uri>#sha256=<digest>`.
        state: tensors keep their storages, `extra` gets the restored values.
        loader_policy: `restart` for data loaders that can not be resharded.
        **options: fields of `LoadOptions`; equal on all ranks. The rest is as for `save`.

    Returns:
        Loaded checkpoint; its `facts` has rng, loader, missing, unexpected, bytes read and
        `sharing`.

    Raises:
        CheckpointNotFound: nothing is committed there.
        CheckpointIncomplete: an object is missing or short.
        CheckpointCorrupt: a block differs from its checksum.
        LayoutMismatch: names, shapes or types do not fit; every offender is listed, and no tensor
            has been touched.
    """
    from planish.checkpoint.adapters.base import apply, collect, split_roles
    from planish.checkpoint.loading.agree import LoadOptions
    from planish.checkpoint.loading.load import load_state, open_on_all
    from planish.checkpoint.ranks.control import control_of

    chosen = LoadOptions(**options)
    control = control_of(process_group)
    opened = open_on_all(path, control, storage=storage)
    with control.call(f"collect {opened.pin}", chosen.timeout_s).settled("collect"):
        roles = split_roles(state, framework, role)
        collected = {
            name: collect(
                name,
                inner,
                kind,
                for_load=True,
                metadata=opened.metadata,
                map_fqn=chosen.map_fqn,
                parts=chosen.parts,
            )
            for name, (inner, kind) in roles.items()
        }
    loaded, extras = load_state(opened, collected, control, chosen)
    for name, (inner, _) in roles.items():
        values, loader = extras.values.get(name, {}), extras.loader.get(name)
        found = apply(inner, collected[name], values, loader, loader_policy=loader_policy)
        loaded.facts.update(found)
    return loaded


def latest(root: str) -> catalog.Entry | None:
    """Return the newest committed checkpoint at and below `root`; None without one."""
    return catalog.latest(*open_store(root))


def list_checkpoints(root: str) -> list[catalog.Entry]:
    """Return the committed checkpoints at and below `root`, oldest step first."""
    return catalog.list_checkpoints(*open_store(root))


def info(path: str) -> catalog.Entry:
    """Return the checkpoint at `path`; raises `CheckpointNotFound` if there is none."""
    return catalog.info(*open_store(path))


def delete(path: str) -> None:
    """Remove the checkpoint at `path`; the first request makes it invisible."""
    catalog.delete(*open_store(path))


def retain(
    root: str,
    *,
    keep_last: int = 3,
    keep_every: int = 0,
    pins: Iterable[int | str] = (),
    dry_run: bool = False,
) -> list[catalog.CatalogVerdict]:
    """Remove the checkpoints at and below `root` that no rule keeps; see `catalog.retain`."""
    storage, key = open_store(root)
    return catalog.retain(
        storage, key, keep_last=keep_last, keep_every=keep_every, pins=pins, dry_run=dry_run
    )


def gc(
    root: str, *, grace_s: float = 86_400.0, dry_run: bool = False
) -> list[catalog.CatalogVerdict]:
    """Remove the leftovers of unfinished and replaced saves at and below `root`."""
    return catalog.gc(*open_store(root), grace_s=grace_s, dry_run=dry_run)


def export_hf(
    path: str,
    out: str,
    *,
    config_dir: str | Path | None = None,
    max_shard_bytes: int = 5 << 30,
    dtype: str | None = None,
    role: str = "",
) -> Ref:
    """Write the model of a checkpoint as a Hugging Face folder; see `export_hf.export`."""
    from planish.checkpoint.convert.export_hf import export

    folder = None if config_dir is None else Path(config_dir)
    return export(path, out, folder=folder, max_file_bytes=max_shard_bytes, dtype=dtype, role=role)


def import_dcp(folder: str | Path, path: str, *, step: int | None = None) -> CheckpointInfo:
    """Convert a folder of torch.distributed.checkpoint into a checkpoint; run no code from it."""
    from planish.checkpoint.convert import dcp_bridge

    return dcp_bridge.import_dcp(folder, path, step=step)


def export_dcp(path: str, folder: str | Path, *, role: str = "main") -> None:
    """Write a role of a checkpoint as a folder that `torch.distributed.checkpoint.load` reads."""
    from planish.checkpoint.convert import dcp_bridge

    dcp_bridge.export_dcp(path, folder, role=role)
