"""Save, load, find and export train states.

Callers know this module only; what lies behind it may be replaced. A state is visible once its
manifest is, which is written last, and reading one never runs code that it brings.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from planish.checkpoint.folder import STATE_SCHEMA, StateFolder
from planish.errors import CheckpointError, LayoutMismatch, PlanishError
from planish.parallel import SINGLE, Ranks
from planish.records import layout
from planish.records.manifest import MANIFEST, read_manifest
from planish.records.refs import Ref
from planish.store import open_store

if TYPE_CHECKING:
    from torch import Tensor

    from planish.checkpoint.dcp import StoreReader

__all__ = ["STATE_SCHEMA", "export_hf", "latest", "load", "parts", "read_state_info", "save"]

PREFIXES: dict[str, str] = {
    "model": "model",
    "optimizer": "optim",
    "critic": "critic",
    "critic_optimizer": "critic_optim",
    "random": "random",
}
"""Part of a state to the first word of its tensors' names."""

State = Mapping[str, Any]
"""Parts of `PREFIXES` as name -> tensor (whole, or sharded `DTensor`), and `extra` as JSON."""

_STEP = re.compile(r"/step-(?P<step>\d{8})/")


def save(
    uri: str,
    state: State,
    *,
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
    ranks: Ranks = SINGLE,
) -> Ref:
    """Write a train state; it becomes visible as a whole or not at all.

    Every rank calls it with its own shards; tensors that all ranks hold are written once.

    Args:
        uri: folder of the state.
        state: `{"model": {name: tensor}, "optimizer": {...}, "random": {...}, "extra": {...}}`.
        parents: name of each input to the sha256 of its manifest.
        attributes: of the manifest: step, policy_version, config_sha256 ...
        ranks: this process among those that save.

    Returns:
        The Ref of the state, on every rank.

    Raises:
        CheckpointError: a value is not a tensor.
    """
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    from planish.checkpoint.dcp import StoreWriter

    writer = StoreWriter(uri, extra=state.get("extra", {}), parents=parents, attributes=attributes)
    tensors = _named(state)
    with _unwrapped():
        state_dict_saver.save(
            tensors,
            storage_writer=writer,
            planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
            no_dist=ranks.size == 1,
        )
    ranks.barrier()
    return writer.ref or read_manifest(uri).ref(uri)


def load(pin: str, state: State, *, ranks: Ranks = SINGLE, strict: bool = True) -> dict[str, Any]:
    """Fill the tensors of `state` in place from a saved one, whatever ranks saved it.

    Args:
        pin: `<uri>#sha256=<digest>`.
        state: as for `save`; `extra` is ignored.
        ranks: this process among those that load.
        strict: also refuse a saved tensor that `state` has no place for; per-rank random states
            never count.

    Returns:
        The JSON part of the saved state, as `read_state_info`.

    Raises:
        LayoutMismatch: names, shapes or types differ; every offender is named and no tensor has
            been touched.
        CheckpointIncomplete: the save never finished.
        CheckpointError: damaged.
    """
    from torch.distributed.checkpoint import state_dict_loader

    from planish.checkpoint.dcp import StoreReader

    folder = StateFolder.open(pin)
    reader = StoreReader(folder)
    tensors = _named(state)
    _check_fit(reader, tensors, strict=strict)
    with _unwrapped():
        state_dict_loader.load(tensors, storage_reader=reader, no_dist=ranks.size == 1)
    return folder.extra()


def latest(root: str) -> Ref | None:
    """Return the finished state with the highest step below a run's root; None without one."""
    prefix = layout.state(root.rstrip("/"), 0).rpartition("/")[0]
    steps: list[tuple[int, str]] = []
    for uri in open_store(prefix).list(prefix):
        match = _STEP.search(uri)
        if match and uri.endswith(f"/{MANIFEST}"):
            steps.append((int(match["step"]), uri[: -len(MANIFEST) - 1]))
    if not steps:
        return None
    found = max(steps)[1]
    return read_manifest(found).ref(found)


def read_state_info(pin: str) -> dict[str, Any]:
    """Return the JSON part of a state without touching its tensors, and without torch.

    Returns:
        `step`, `policy_version`, `data` (prompt cursor) and the trainer's counters.

    Raises:
        CheckpointIncomplete: the save never finished.
        CheckpointError: damaged.
    """
    return StateFolder.open(pin).extra()


def parts(pin: str) -> set[str]:
    """Return which parts of `PREFIXES` a state holds, without reading a tensor.

    Raises:
        CheckpointIncomplete: the save never finished.
        CheckpointError: damaged.
    """
    found = {name.partition(".")[0] for name in StateFolder.open(pin).index()}
    return {part for part, prefix in PREFIXES.items() if prefix in found}


def export_hf(
    pin: str,
    uri: str,
    *,
    source: str,
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
    max_file_bytes: int = 5 << 30,
) -> Ref:
    """Merge the policy of a train state into a Hugging Face folder that engines load.

    Needs neither torch nor transformers: configuration, tokenizer and types are those of `source`.

    Args:
        pin: pinned URI of the train state.
        uri: folder of the new policy.
        source: pinned URI of an earlier policy of the same model.
        parents: name of each input to the sha256 of its manifest.
        attributes: of the manifest: policy_version, iteration, config_sha256 ...
        max_file_bytes: weights beyond this go to further files.

    Returns:
        Ref of schema `policy/1`.

    Raises:
        LayoutMismatch: the state's tensors are not those of the source.
        CheckpointError: the state or the source is damaged.
    """
    from planish.checkpoint.export import export

    return export(
        pin,
        uri,
        source=source,
        parents=parents,
        attributes=attributes,
        max_file_bytes=max_file_bytes,
    )


def _named(state: State) -> dict[str, Any]:
    """Flatten the parts of a state to unique names."""
    unknown = sorted(set(state) - {*PREFIXES, "extra"})
    if unknown:
        raise CheckpointError(
            f"a train state must have only the parts {sorted({*PREFIXES, 'extra'})}, got "
            f"{unknown}; add the part to `PREFIXES`"
        )
    return {
        f"{prefix}.{name}": tensor
        for part, prefix in PREFIXES.items()
        for name, tensor in sorted(state.get(part, {}).items())
    }


def _check_fit(reader: StoreReader, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    from planish.checkpoint.dcp import NAMES

    faults = []
    for name, tensor in tensors.items():
        stored = reader.stored.get(name)
        if stored is None:
            faults.append(f"`{name}` is missing")
            continue
        wanted = (NAMES[tensor.dtype], tuple(tensor.shape))
        if wanted != (stored.dtype, stored.shape):
            faults.append(
                f"`{name}` must be {wanted[0]} {list(wanted[1])}, got {stored.dtype} "
                f"{list(stored.shape)}"
            )
    if strict:
        left = {n for n in reader.stored if not n.startswith("random.")} - set(tensors)
        faults += [f"`{name}` has no place to go" for name in sorted(left)]
    if faults:
        raise LayoutMismatch(
            f"`{reader.folder.uri}` must fit the model that loads it: {'; '.join(faults)}; "
            "resume with the model and optimizer that saved it"
        )


@contextlib.contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise the first error of ours that the library wrapped, in place of its wrapper."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            # One process is what was asked for; the library warns of it all the same.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as error:
        for _, (cause, _) in sorted(error.failures.items()):
            if isinstance(cause, PlanishError):
                raise cause from None
        raise CheckpointError(f"a train state could not be moved: {error}") from error
