"""Checkpoints: save, load, find, keep and convert them; the one module that users need.

A state is a dict with any of `model`, `optimizer`, `scheduler`, `dataloader`, `random` and `extra`,
or a dict of such states by role, which are committed together. Saved under one layout it loads
under every other.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.1 (the two calls `save` and `load`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from planish.checkpoint import catalog
from planish.checkpoint.storage import open_storage

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from planish.checkpoint.load_records import Loaded
    from planish.checkpoint.model import Collected
    from planish.checkpoint.save_handle import SaveHandle
    from planish.checkpoint.storage import Storage
    from planish.checkpoint.timings import CheckpointInfo
    from planish.records.refs import Ref

__all__ = [
    "delete",
    "export_hf",
    "gc",
    "info",
    "latest",
    "list_checkpoints",
    "load",
    "retain",
    "save",
]

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
    overwrite: bool = False,
    plan_cache: bool = True,
    snapshot: Literal["copy", "lazy"] = "copy",
    inflight: Literal["wait", "skip", "raise"] = "wait",
    timeout_s: float = 1800.0,
    storage: Storage | None = None,
    tags: Mapping[str, str] | None = None,
    run_id: str = "",
    header: Mapping[str, Any] | None = None,
    allow_pickle: bool = False,
) -> SaveHandle:
    """Save the state of all ranks; it becomes visible as a whole or not at all.

    Args:
        path: `s3://bucket/prefix`, `file:///folder`, an absolute path or `mem://name`.
        state: parts of one role, or role -> parts.
        framework: how tensors are spread over ranks.
        async_: return when the state is staged; else when it is committed.
        step: training step, at least 0.
        role: name of the only role; `main` without it.
        process_group: ranks that save; the default group, or this process alone without one.
        overwrite: replace a committed checkpoint at this place.
        plan_cache: use the plan of an earlier save of the same tensors.
        snapshot: `copy` copies before it returns; `lazy` behind forward and backward, held up by
            the next `optimizer.step()`.
        inflight: what to do while earlier saves use all staging memory.
        timeout_s: limit on the whole save.
        storage: in place of the one that the path names.
        tags: texts for COMMIT.
        run_id: for COMMIT.
        header: JSON for the metadata, e.g. layout, parents.
        allow_pickle: store arbitrary objects among the small values.

    Returns:
        A handle: `staged()`, `done()`, `result()`, `cancel()`.

    Raises:
        TypeError: a value can not be stored; nothing has been written.
        LayoutMismatch: the shares of the ranks make no whole, or replicas disagree.
        PlanMismatch: the ranks do not save the same, or one did not come in time.
        SaveFailed: a rank failed (`async_=False`); `result()` raises it otherwise.
    """
    from planish.checkpoint.adapters.base import collect, split_roles
    from planish.checkpoint.save import save_state
    from planish.checkpoint.save_options import SaveOptions

    def gathered() -> dict[str, Collected]:
        found = split_roles(state, framework, role)
        return {
            name: collect(name, inner, kind, for_load=False)
            for name, (inner, kind) in found.items()
        }

    options = SaveOptions(
        path,
        step=step,
        overwrite=overwrite,
        plan_cache=plan_cache,
        snapshot=snapshot,
        inflight=inflight,
        timeout_s=timeout_s,
        is_async=async_,
        tags=dict(tags or {}),
        run_id=run_id,
        header=dict(header or {}),
        context=str(framework),
        allow_pickle=allow_pickle,
    )
    return save_state(gathered, options, group=process_group, storage=storage)


def load(
    path: str,
    state: State,
    framework: Framework = "plain",
    *,
    strict: bool = True,
    parts: tuple[str, ...] | None = None,
    role: str | None = None,
    process_group: ProcessGroup | None = None,
    verify: Literal["crc", "none"] = "crc",
    map_fqn: Callable[[str], str] | None = None,
    dtype_policy: Literal["exact", "cast"] = "exact",
    redundancy: Literal["auto", "off"] = "auto",
    max_host_bytes: int = 256 << 20,
    timeout_s: float = 1800.0,
    loader_policy: Literal["exact", "restart"] = "exact",
    storage: Storage | None = None,
    allow_pickle: bool = False,
) -> CheckpointInfo:
    """Fill a state in place from a checkpoint, whatever ranks and framework saved it.

    Args:
        path: place of the checkpoint, or its pin `<uri>#sha256=<digest>`.
        state: as for `save`; tensors keep their storages, `extra` gets the restored values.
        framework: how the tensors of `state` are spread over ranks.
        strict: refuse tensors that only one side has; otherwise they are reported in `facts`.
        parts: of model, optim, extra and loader; the bytes of others are never read.
        role: name of the only role; `main` without it.
        process_group: ranks that load.
        verify: whether each block is checked against its checksum.
        map_fqn: name in the target to name in the checkpoint.
        dtype_policy: `cast` converts where types differ; the default refuses.
        redundancy: `auto` reads bytes that several ranks need once and exchanges them.
        max_host_bytes: limit on buffers of one rank, beside the tensors.
        timeout_s: limit on the whole load.
        loader_policy: `restart` for data loaders that can not be resharded.
        storage: in place of the one that the path names.
        allow_pickle: read small values that were saved with it.

    Returns:
        Which checkpoint it was; `facts` has rng, loader, missing, unexpected and bytes read.

    Raises:
        CheckpointNotFound: nothing is committed there.
        CheckpointIncomplete: an object is missing or short.
        CheckpointCorrupt: a block differs from its checksum.
        LayoutMismatch: names, shapes or types do not fit; every offender is listed, and no tensor
            has been touched.
    """
    from planish.checkpoint.adapters.base import collect, split_roles
    from planish.checkpoint.load import load_state, open_on_all
    from planish.checkpoint.load_records import PARTS, LoadOptions
    from planish.checkpoint.save import default_engine

    control = default_engine(process_group).control
    opened = open_on_all(path, control, storage=storage)
    options = LoadOptions(
        strict=strict,
        parts=PARTS if parts is None else tuple(parts),
        verify=verify,
        map_fqn=map_fqn,
        dtype_policy=dtype_policy,
        redundancy=redundancy,
        max_host_bytes=max_host_bytes,
        timeout_s=timeout_s,
        allow_pickle=allow_pickle,
    )
    roles: dict[str, tuple[State, str]] = {}
    collected: dict[str, Collected] = {}
    error: Exception | None = None
    try:
        roles = split_roles(state, framework, role)
        for name, (inner, kind) in roles.items():
            collected[name] = collect(name, inner, kind, for_load=True, metadata=opened.metadata)
    except Exception as caught:
        error = caught
    control.call(f"collect {opened.pin}", timeout_s).settle(error, "collect")
    loaded = load_state(opened, collected, control, options)
    return _applied(roles, collected, loaded, loader_policy)


def _applied(
    roles: Mapping[str, tuple[State, str]],
    collected: Mapping[str, Collected],
    loaded: Loaded,
    loader_policy: str,
) -> CheckpointInfo:
    """Restore what is no tensor, and note what became of it."""
    from planish.checkpoint.adapters.base import apply

    facts = loaded.info.facts
    for name, (inner, kind) in roles.items():
        facts.update(
            apply(
                name,
                inner,
                kind,
                collected[name],
                loaded.shared.get(name, {}),
                loaded.own.get(name, {}),
                loaded.loader.get(name),
                loader_policy=loader_policy,
            )
        )
    facts["missing"], facts["unexpected"] = loaded.missing, loaded.unexpected
    facts["bytes_from_store"] = loaded.bytes_from_store
    facts["unique_bytes_needed"] = loaded.unique_bytes_needed
    return loaded.info


def latest(root: str) -> catalog.Entry | None:
    """Return the newest committed checkpoint at and below `root`; None without one."""
    return catalog.latest(*open_storage(root))


def list_checkpoints(root: str) -> list[catalog.Entry]:
    """Return the committed checkpoints at and below `root`, oldest step first."""
    return catalog.list_checkpoints(*open_storage(root))


def info(path: str) -> catalog.Entry:
    """Return what is committed at `path`.

    Raises:
        CheckpointNotFound: nothing is.
    """
    return catalog.info(*open_storage(path))


def delete(path: str) -> None:
    """Remove the checkpoint at `path`: from the first request on nothing is visible.

    Raises:
        CheckpointNotFound: nothing is committed there.
    """
    catalog.delete(*open_storage(path))


def retain(
    root: str,
    *,
    keep_last: int = 3,
    keep_every: int = 0,
    pins: Iterable[int | str] = (),
    dry_run: bool = False,
) -> list[catalog.Verdict]:
    """Remove the checkpoints at and below `root` that no rule keeps; see `catalog.retain`."""
    storage, key = open_storage(root)
    return catalog.retain(
        storage, key, keep_last=keep_last, keep_every=keep_every, pins=pins, dry_run=dry_run
    )


def gc(root: str, *, grace_s: float = 86_400.0, dry_run: bool = False) -> list[catalog.Verdict]:
    """Clear away what unfinished and replaced saves have left at and below `root`."""
    storage, key = open_storage(root)
    return catalog.gc(storage, key, grace_s=grace_s, dry_run=dry_run)


def export_hf(
    path: str,
    out: str,
    *,
    config_dir: str | Path | None = None,
    max_shard_bytes: int = 5 << 30,
    dtype: str | None = None,
    role: str = "main",
) -> Ref:
    """Write the model of a checkpoint as a Hugging Face folder; see `export_hf.export_folder`."""
    from planish.checkpoint.export_hf import export_folder

    return export_folder(
        path,
        out,
        config_dir=None if config_dir is None else Path(config_dir),
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        role=role,
    )
