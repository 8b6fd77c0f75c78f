"""torch.distributed.checkpoint on our stores: its planners, our files.

The planners split, deduplicate and reshard tensors; here the planned regions become safetensors
files with a JSON index, in place of the pickled metadata that the library itself would write.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from planish.checkpoint.folder import STATE_SCHEMA, StateFolder
from planish.checkpoint.regions import (
    EXTRA_FILE,
    INDEX_FILE,
    Region,
    StoredTensor,
    encode_index,
    entry_name,
)
from planish.errors import CheckpointError
from planish.records.files import hash_file
from planish.records.manifest import Shard, manifest_uri, seal
from planish.records.refs import Ref
from planish.store import open_store

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""Type names of safetensors."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Written:
    """Where one region went, and the facts of its file."""

    region: Region
    shard: Shard


class StoreWriter(StorageWriter):
    """Writes the regions that the planner gives to this rank; the first rank then commits."""

    def __init__(
        self,
        uri: str,
        *,
        extra: Mapping[str, Any],
        parents: Mapping[str, str],
        attributes: Mapping[str, Any],
    ) -> None:
        """Prepare a save to the folder `uri`; nothing is written before the plan is made."""
        self.uri = uri.rstrip("/")
        self.extra = dict(extra)
        self.parents = dict(parents)
        self.attributes = dict(attributes)
        self.ref: Ref | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Forget an earlier save."""
        self.ref = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to set up: stores need no folders."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor, before any byte is written."""
        bad = [item.index.fqn for item in plan.items if item.type == WriteItemType.BYTE_IO]
        if bad:
            raise CheckpointError(
                f"every value of a train state must be a tensor, got others under {bad[:8]}; "
                "put plain values into `extra`"
            )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks and make an older state in this place invisible."""
        store, place = open_store(self.uri), manifest_uri(self.uri)
        if store.exists(place):
            store.delete(place)
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one file for each part (`model`, `optim`, ...) of this rank."""
        parts: dict[str, list[WriteItem]] = defaultdict(list)
        for item in plan.items:
            parts[item.index.fqn.partition(".")[0]].append(item)
        results: list[WriteResult] = []
        for part, items in sorted(parts.items()):
            results += self._write_part(
                f"{part}-{plan.storage_data:05d}.safetensors", items, planner
            )
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write_part(
        self, file: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        tensors: dict[str, Tensor] = {}
        regions: list[tuple[WriteItem, Region]] = []
        for item in items:
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            region = Region(tuple(chunk.offsets), tuple(chunk.sizes), file)
            # A clone, since safetensors refuses views that share their storage.
            value = planner.resolve_data(item)
            assert isinstance(value, Tensor)
            tensors[region.entry(item.index.fqn)] = value.detach().cpu().contiguous().clone()
            regions.append((item, region))
        with tempfile.TemporaryDirectory(prefix="planish-state-") as scratch:
            path = Path(scratch) / file
            safetensors.torch.save_file(tensors, path)
            shard = Shard(file, 0, *hash_file(path))
            open_store(self.uri).write_file(f"{self.uri}/{file}", path)
        return [WriteResult(i.index, shard.bytes, _Written(r, shard)) for i, r in regions]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write index and extra, remove what no longer belongs here, then the manifest."""
        regions: dict[str, list[Region]] = defaultdict(list)
        shards: dict[str, Shard] = {}
        for result in (result for rank in results for result in rank):
            regions[result.index.fqn].append(result.storage_data.region)
            shards[result.storage_data.shard.name] = result.storage_data.shard
        tensors = {}
        for name, found in regions.items():
            facts = metadata.state_dict_metadata[name]
            assert isinstance(facts, TensorStorageMetadata)
            tensors[name] = StoredTensor(
                NAMES[facts.properties.dtype], tuple(facts.size), tuple(found)
            )
        for file, data in (
            (INDEX_FILE, encode_index(tensors)),
            (EXTRA_FILE, json.dumps(self.extra, sort_keys=True, allow_nan=False).encode("ascii")),
        ):
            shards[file] = self._write_small(file, data)
        self._commit(shards)

    def _write_small(self, file: str, data: bytes) -> Shard:
        with tempfile.TemporaryDirectory(prefix="planish-state-") as scratch:
            path = Path(scratch) / file
            path.write_bytes(data)
            shard = Shard(file, 0, *hash_file(path))
        open_store(self.uri).write(f"{self.uri}/{file}", data)
        return shard

    def _commit(self, shards: Mapping[str, Shard]) -> None:
        store = open_store(self.uri)
        kept = {f"{self.uri}/{name}" for name in shards}
        for stale in store.list(self.uri):
            if stale not in kept:
                store.delete(stale)
        ordered = [shards[name] for name in sorted(shards)]
        manifest, data = seal(STATE_SCHEMA, 0, ordered, self.parents, self.attributes)
        store.write(manifest_uri(self.uri), data)
        self.ref = manifest.ref(self.uri)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any URI; the store itself checks it."""
        return True


class StoreReader(StorageReader):
    """Reads regions from the files of a state; each file is verified before it is parsed."""

    def __init__(self, folder: StateFolder) -> None:
        """Read from a state whose manifest has been checked."""
        self.folder = folder
        self.stored = folder.index()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the index in the library's terms."""
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Region] = {}
        for name, tensor in self.stored.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(r.offsets), torch.Size(r.lengths))
                for r in tensor.regions
            ]
            properties = TensorProperties(dtype=DTYPES[tensor.dtype])
            tensors[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
            places |= {MetadataIndex(name, r.offsets): r for r in tensor.regions}
        return Metadata(state_dict_metadata=tensors, planner_data={}, storage_data=places)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keep where each region lies."""
        self.places: dict[MetadataIndex, Region] = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Every rank reads what it needs itself."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Every rank reads what it needs itself."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy the planned regions into the tensors that are being loaded."""
        by_file = defaultdict(list)
        for item in plan.items:
            by_file[self.places[item.storage_index].file].append(item)
        for file, items in sorted(by_file.items()):
            entries = read_entries(self.folder, file)
            for item in items:
                region = self.places[item.storage_index]
                name = entry_name(item.storage_index.fqn, region.offsets, region.lengths)
                stored = self.stored[item.storage_index.fqn]
                source = entries.get(name)
                if source is None or (source.dtype, tuple(source.shape)) != (
                    DTYPES[stored.dtype],
                    region.lengths,
                ):
                    raise CheckpointError(
                        f"`{self.folder.uri}/{file}` must hold `{name}` as its index says, got "
                        f"{None if source is None else (source.dtype, tuple(source.shape))}; "
                        "resume from an earlier state"
                    )
                for dim, start in enumerate(item.storage_offsets):
                    source = source.narrow(dim, start, item.lengths[dim])
                target = planner.resolve_tensor(item).detach()
                target.copy_(source)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any URI; the store itself checks it."""
        return True


def read_entries(folder: StateFolder, file: str) -> dict[str, Tensor]:
    """Return the tensors of one verified safetensors file."""
    data = folder.read(file)
    try:
        return safetensors.torch.load(data)
    except (safetensors.SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"`{folder.uri}/{file}` must be a safetensors file, got {data[:40]!r} ({error}); "
            "resume from an earlier state"
        ) from None
