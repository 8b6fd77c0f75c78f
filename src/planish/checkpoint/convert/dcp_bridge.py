"""Import from and export to folders of torch.distributed.checkpoint (DCP).

An import maps tensors from the files, and an export writes box by box with torch's own writer, so
a tensor need not fit into memory. An import trusts no file: `dcp_pickle` reads the metadata, and
`torch.load(weights_only=True)` the rest. It reads neither DCP's safetensors nor compressed files.
"""

from __future__ import annotations

import contextlib
import io
import logging
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.utils import _create_file_view

from planish.base.errors import CheckpointCorrupt, CheckpointIncomplete, LayoutMismatch
from planish.checkpoint.adapters.gathering import OPTIMIZER
from planish.checkpoint.adapters.placement import NAMES, TYPES
from planish.checkpoint.convert.dcp_pickle import MAX_METADATA_BYTES, read_dcp_metadata
from planish.checkpoint.format.geometry import Box, Sides, box_of, whole
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.format.metafile import Metadata
from planish.checkpoint.format.strict_json import Fields
from planish.checkpoint.loading.extras import read_shared
from planish.checkpoint.loading.reader import Opened, open_state
from planish.checkpoint.loading.slices import SliceReader
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.saving.agree import SaveOptions
from planish.checkpoint.saving.engine import SaveEngine
from planish.checkpoint.watch.monitor import CheckpointInfo

logger = logging.getLogger(__name__)

METADATA = ".metadata"
CHUNK_BYTES = 256 << 20
"""Bytes of a stored box above which an export cuts it."""


def split_name(name: str) -> tuple[str, str]:
    """Return (kind, fqn) of a DCP name from torch's state-dict functions."""
    first, _, rest = name.partition(".")
    if first == "model" and rest:
        return "model", rest
    if first in ("optim", "optimizer") and rest:
        return "optim", rest.removeprefix("state.")
    return "model", name


def import_dcp(
    folder: str | Path,
    place: str,
    *,
    step: int | None = None,
    role: str = "main",
    overwrite: bool = False,
) -> CheckpointInfo:
    """Convert a DCP folder into a checkpoint, in one process.

    Options of parameter groups, and parameter states that are not tensors, become those of the
    checkpoint's optimizer. Other values become the shared value `dcp`, by their names.

    Without `step`, the step is the folder's value `step`, else 0.

    Raises:
        CheckpointIncomplete: the folder lacks its metadata or a file.
        CheckpointCorrupt: a file is not of DCP; none of its code has run.
        TypeError: a tensor or a value is of a kind that checkpoints do not hold.
    """
    source = _Folder(Path(folder))
    with contextlib.closing(source):
        items, values = list(source.items(role)), source.values()
    own = values.get("step")
    if step is None:
        step = own if isinstance(own, int) and not isinstance(own, bool) and own >= 0 else 0
    shared = _shared(values, {item.tensor.fqn for item in items if item.tensor.kind == "model"})
    collected = Collected(items, shared=shared)
    engine = SaveEngine(Control.single())
    try:
        options = SaveOptions(place, step=step, overwrite=overwrite, is_async=False)
        return engine.save({role: collected}, options).result()
    finally:
        engine.close()


class _Folder:
    """A DCP folder that is being read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / METADATA
        if not path.is_file():
            raise CheckpointIncomplete(
                f"`{folder}` must hold `{METADATA}`, got none; it is no DCP checkpoint, or its "
                "save never finished"
            )
        if path.stat().st_size > MAX_METADATA_BYTES:
            raise CheckpointCorrupt(f"`{path}` must be at most {MAX_METADATA_BYTES} bytes")
        self.metadata = read_dcp_metadata(path.read_bytes(), name=str(path))
        self._files: dict[str, tuple[io.BufferedReader, memoryview]] = {}

    def items(self, role: str) -> Iterator[LocalItem]:
        """Yield every stored box as an item whose data lie in a mapped file."""
        for name, stored in self.metadata.tensors.items():
            kind, fqn = split_name(name)
            dtype = TYPES_OF_TORCH.get(stored.dtype, "")
            if not dtype:
                raise TypeError(f"`{name}` must be of a type that checkpoints hold, got {stored}")
            spec = TensorSpec(role, kind, fqn, dtype, stored.shape)
            for box in stored.boxes:
                data = self._tensor(name, box.offsets)
                if (data.dtype, tuple(data.shape)) != (TYPES[dtype], box.lengths):
                    raise self._corrupt(
                        f"`{name}` at {box.offsets} must be {dtype} {list(box.lengths)}, got "
                        f"{data.dtype} {list(data.shape)}"
                    )
                yield LocalItem(spec, (box,), data)

    def values(self) -> Fields:
        """Return name -> value, for values that are not tensors."""
        values: Fields = {}
        for name in self.metadata.values:
            _, view = self._part(name, ())
            try:
                values[name] = torch.load(io.BytesIO(view), "cpu", weights_only=True)
            except Exception as error:  # torch's loader raises anything on strange bytes
                text = f"`{name}` must hold plain values ({error!s:.160})"
                raise self._corrupt(text) from None
        return values

    def _tensor(self, name: str, offsets: Sides) -> Tensor:
        """Return a tensor whose storage is the mapped file, without reading its bytes."""
        stream, view = self._part(name, offsets)
        try:
            with FakeTensorMode():
                fake = torch.load(stream, weights_only=True)
            storage = fake.untyped_storage()
            start, size = storage._checkpoint_offset, storage.nbytes()
            if not 0 <= start <= start + size <= len(view):
                raise ValueError(f"bytes {start} to {start + size} of {len(view)}")
            if size == 0:
                return torch.empty(fake.shape, dtype=fake.dtype)
            data = torch.frombuffer(view[start : start + size], dtype=torch.uint8)
            place = fake.storage_offset(), fake.shape, fake.stride()
            return torch.empty(0, dtype=fake.dtype).set_(data.untyped_storage(), *place)
        except Exception as error:  # torch's loader raises anything on strange bytes
            text = f"`{name}` must be a saved tensor ({error!s:.160})"
            raise self._corrupt(text) from None

    def _part(self, name: str, offsets: Sides) -> tuple[Any, memoryview]:
        """Return the bytes of a value or box, as a stream and as a part of a mapped file."""
        place = self.metadata.places.get((name, offsets))
        if place is None:
            raise self._corrupt(f"`{METADATA}` must say where `{name}` lies")
        if Path(place.file).name != place.file:
            raise self._corrupt(f"`{name}` must lie in a file of the folder, got {place.file!r}")
        path = self.folder / place.file
        if place.file not in self._files:
            if not path.is_file():
                raise CheckpointIncomplete(f"`{path}` must be there, as `{METADATA}` names it")
            file = path.open("rb")
            size = os.fstat(file.fileno()).st_size
            # A private map is writable, as torch requires; nothing is written to it.
            pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
            self._files[place.file] = file, memoryview(pages)
        stored, mapped = self._files[place.file]
        stop = place.start + place.length
        if stop > len(mapped):
            raise CheckpointIncomplete(f"`{path}` must have {stop} bytes, got {len(mapped)}")
        stream = _create_file_view(stored, place.start, place.length)
        return stream, mapped[place.start : stop]

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()

    def _corrupt(self, text: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"`{self.folder}`: {text}", file=METADATA)


def _shared(values: Mapping[str, Any], parameters: Collection[str]) -> Fields:
    """Return the values of a DCP folder as the shared values of a checkpoint.

    If groups name their parameters by number, all values, optimizer options included, go to `dcp`.
    """
    rest: Fields = {}
    numbers: dict[str, Fields] = {}
    groups: dict[str, Fields] = {}
    for name, value in values.items():
        place = _OF_OPTIMIZER.fullmatch(name)
        if place is None:
            rest[name] = value
            continue
        owner, _, key = place["path"].rpartition(".")
        if place["part"] == "state":
            numbers.setdefault(owner, {})[key] = value
        else:
            # torch may flatten groups: each parameter then has its own options.
            own = {"params": [owner]} if owner in parameters else {}
            groups.setdefault(owner, own)[key] = value
    members = [group.get("params") for group in groups.values()]
    if any(not isinstance(m, list) or not all(isinstance(n, str) for n in m) for m in members):
        logger.warning(
            "optimizer_not_named groups=%.80s remedy='its state can not be loaded into an "
            "optimizer: save what get_state_dict of torch returns'",
            members,
        )
        return {"dcp": dict(values)}
    found = [{"params": group.pop("params"), "options": group} for group in groups.values()]
    shared: Fields = {"dcp": rest} if rest else {}
    if found or numbers:
        shared[OPTIMIZER] = {"groups": found, "numbers": numbers}
    return shared


_OF_OPTIMIZER = re.compile(r"optim(izer)?\.(?P<part>state|param_groups)\.(?P<path>.+)")
"""Pattern of the name of an optimizer's value."""
TYPES_OF_TORCH = {str(dtype).removeprefix("torch."): name for dtype, name in NAMES.items()}
"""Name of a type in torch -> name in checkpoints."""


def export_dcp(place: str, folder: str | Path, *, role: str = "main") -> None:
    """Write a role of a checkpoint as a folder that `torch.distributed.checkpoint.load` reads.

    Names are `model.<fqn>` and `optim.state.<parameter>.<state>`; shared values are
    `shared.<name>`. Chunks are the stored boxes. The metadata file is written last.

    Raises:
        FileExistsError: the folder is not empty.
        LayoutMismatch: the checkpoint has no such role.
        CheckpointError: the checkpoint is damaged.
    """
    opened, target = open_state(place), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"`{target}` must be empty; name another folder")
    source = _Source(opened)
    for fqn, kind, row in sorted(
        (fqn, kind, row)
        for (owner, kind, fqn), row in opened.metadata.tensor_ids.items()
        if owner == role
    ):
        parameter, _, state = fqn.rpartition(".")
        is_state = kind == "optim" and parameter
        source.add_tensor(("optim", "state", parameter, state) if is_state else (kind, fqn), row)
    for name, value in read_shared(source.reader.reader, role).items():
        source.add_value(("shared", name), value)
    if not source.items:
        raise LayoutMismatch(f"`{opened.uri}` must hold the role `{role}`; see `info`")
    # Each item gets a file, because torch keeps all tensors of one file in memory.
    writer = FileSystemWriter(target, single_file_per_rank=False)
    writer.set_up_storage_writer(True)
    plans, metadata = create_default_global_save_plan([SavePlan(source.items)])
    metadata.planner_data = source.paths
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(plans[0])])
    results: Any = writer.write_data(plan, source).wait()  # type: ignore[arg-type]
    writer.finish(metadata, [results])


class _Source:
    """Items of a DCP export, read when torch's writer calls `resolve_data`, as on a planner."""

    def __init__(self, opened: Opened) -> None:
        self.opened, self.reader = opened, SliceReader(opened)
        self.items: list[WriteItem] = []
        self.paths: dict[str, tuple[str, ...]] = {}
        self._data: dict[MetadataIndex, Callable[[], Tensor | io.BytesIO]] = {}

    def add_tensor(self, path: tuple[str, ...], row: int) -> None:
        spec, name = self.opened.metadata.tensors.spec(row), ".".join(path)
        self.paths[name] = path
        properties, size = TensorProperties(dtype=TYPES[spec.dtype]), torch.Size(spec.shape)
        for number, box in enumerate(_boxes(self.opened.metadata, row, spec)):
            index = MetadataIndex(name, box.offsets, number)
            chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
            data = TensorWriteData(chunk, properties, size)
            self.items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
            self._data[index] = partial(self._tensor, spec, box)

    def add_value(self, path: tuple[str, ...], value: Any) -> None:
        name = ".".join(path)
        self.paths[name] = path
        self.items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
        self._data[MetadataIndex(name)] = partial(_saved, value)

    def resolve_data(self, item: WriteItem) -> Tensor | io.BytesIO:
        return self._data[item.index]()

    def _tensor(self, spec: TensorSpec, box: Box) -> Tensor:
        raw = self.reader.read(spec, box).reshape(-1).view(np.uint8)
        return torch.from_numpy(raw).view(TYPES[spec.dtype]).view(box.lengths)


def _saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def _boxes(meta: Metadata, row: int, spec: TensorSpec) -> Iterator[Box]:
    """Yield the stored boxes of a tensor; large ones are cut along their first dimension."""
    rows, dims = meta.shards_of(row), len(spec.shape)
    for shard in rows.tolist():
        offsets, lengths = box_of(meta.shards.offsets[shard], meta.shards.lengths[shard], dims)
        count = lengths[0] if lengths else 1
        step = max(1, count * CHUNK_BYTES // max(1, int(meta.shards.nbytes[shard])))
        if step >= count:
            yield Box(offsets, lengths)
            continue
        for start in range(0, count, step):
            part = min(step, count - start)
            yield Box((offsets[0] + start, *offsets[1:]), (part, *lengths[1:]))
    if not len(rows):
        yield whole(spec.shape)
