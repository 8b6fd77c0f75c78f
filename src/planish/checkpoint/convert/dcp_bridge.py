"""Checkpoints of torch.distributed.checkpoint turned into ours, and ours into such folders.

Tensors are mapped from the files, or written chunk by chunk, so no tensor need fit into memory.
Folders are untrusted: metadata comes through `dcp_pickle`, values through torch's loader of plain
weights. Deliberately for DCP's own files only: neither its safetensors nor compressed variants.
"""

from __future__ import annotations

import io
import logging
import mmap
import os
import pickle
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from planish.base.errors import CheckpointCorrupt, CheckpointIncomplete, LayoutMismatch
from planish.checkpoint.adapters.gathering import OPTIMIZER
from planish.checkpoint.adapters.placement import NAMES, TYPES
from planish.checkpoint.convert.dcp_pickle import MAX_METADATA_BYTES, TorchRecord, read_dcp_metadata
from planish.checkpoint.format.geometry import Box, box_of, whole
from planish.checkpoint.format.items import Collected, LocalItem, TensorSpec
from planish.checkpoint.format.small_objects import decode_extra
from planish.checkpoint.load.extras import names_of
from planish.checkpoint.load.reader import BlockReader, Opened, open_state
from planish.checkpoint.load.slices import SliceReader
from planish.checkpoint.ranks.control import Control
from planish.checkpoint.save.agree import SaveOptions
from planish.checkpoint.save.engine import SaveEngine
from planish.checkpoint.watch.monitor import CheckpointInfo
from planish.store import Store

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata as DcpMetadata

logger = logging.getLogger(__name__)

METADATA = ".metadata"
CHUNK_BYTES = 256 << 20
"""Larger stored boxes are written to a DCP folder in parts."""
FILE_BYTES = 4 << 30
"""A further file of a DCP folder begins beyond this."""

Split = Callable[[str], tuple[str, str]]
"""Name in a DCP folder to (kind, fqn)."""


def split_name(name: str) -> tuple[str, str]:
    """Return kind and fqn of a DCP name as torch's state-dict functions make them.

    Example:
        >>> split_name("model.norm.weight"), split_name("optim.state.w.exp_avg")
        (('model', 'norm.weight'), ('optim', 'w.exp_avg'))
    """
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
    names: Split = split_name,
    overwrite: bool = False,
    storage: Store | None = None,
) -> CheckpointInfo:
    """Turn a DCP folder into a checkpoint of ours; in one process.

    Options of parameter groups, and states of parameters that are no tensors, become those of the
    checkpoint's optimizer. Other values become the shared value `dcp`, by their names.

    Args:
        folder: local folder with `.metadata` and `*.distcp`.
        place: URI of the new checkpoint.
        step: training step that it is of; None: the folder's own value `step`, else 0.
        role: whose state it is.
        names: DCP name to (kind, fqn).
        overwrite: replace what is committed at `place`.
        storage: in place of the one that `place` names.

    Raises:
        CheckpointIncomplete: the folder lacks its metadata or a file.
        CheckpointCorrupt: a file is not what DCP writes; nothing in it has been run.
        TypeError: a tensor or a value is of a kind that checkpoints do not hold.
    """
    source = _Folder(Path(folder))
    items, values = list(source.items(role, names)), source.values()
    own = values.get("step")
    if step is None:
        step = own if isinstance(own, int) and not isinstance(own, bool) and own >= 0 else 0
    shared = _shared(values, {item.tensor.fqn for item in items if item.tensor.kind == "model"})
    collected = Collected(items, shared=shared)
    engine = SaveEngine(Control.single())
    try:
        options = SaveOptions(place, step=step, overwrite=overwrite, is_async=False)
        return engine.save({role: collected}, options, storage=storage).result()
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
        metadata = read_dcp_metadata(path.read_bytes(), name=str(path))
        self.described: Mapping[str, Any] = metadata.state_dict_metadata
        self.stored: Mapping[Any, Any] = metadata.storage_data
        self._maps: dict[str, memoryview] = {}

    def items(self, role: str, names: Split) -> Iterator[LocalItem]:
        """Yield every stored chunk as an item whose data lie in a mapped file."""
        for name, entry in self.described.items():
            if getattr(entry, "kind", "") != "TensorStorageMetadata":
                continue
            kind, fqn = names(name)
            dtype = TYPES_OF_TORCH.get(entry.properties.dtype, "")
            if not dtype:
                raise TypeError(f"`{name}` must be of a type that checkpoints hold, got {entry}")
            spec = TensorSpec(role, kind, fqn, dtype, tuple(entry.size))
            for chunk in entry.chunks:
                box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                data = self._tensor(
                    TorchRecord("MetadataIndex", {"fqn": name, "offset": box.offsets})
                )
                if (data.dtype, tuple(data.shape)) != (TYPES[dtype], box.lengths):
                    raise self._corrupt(
                        f"`{name}` at {box.offsets} must be {dtype} {list(box.lengths)}, got "
                        f"{data.dtype} {list(data.shape)}"
                    )
                yield LocalItem(spec, (box,), data)

    def values(self) -> dict[str, Any]:
        """Return what is no tensor, by name."""
        values: dict[str, Any] = {}
        for name, entry in self.described.items():
            if getattr(entry, "kind", "") == "BytesStorageMetadata":
                view = self._view(TorchRecord("MetadataIndex", {"fqn": name}))
                try:
                    values[name] = torch.load(io.BytesIO(view), "cpu", weights_only=True)
                except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
                    raise self._corrupt(
                        f"`{name}` must hold plain values ({error!s:.160})"
                    ) from None
        return values

    def _tensor(self, index: TorchRecord) -> Tensor:
        """Return a tensor whose storage is the mapped file: nothing is read yet."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        view = self._view(index)
        try:
            with FakeTensorMode():
                fake = torch.load(cast(IO[bytes], _Window(view)), weights_only=True)
            storage = fake.untyped_storage()
            start, size = storage._checkpoint_offset, storage.nbytes()
            if not 0 <= start <= start + size <= len(view):
                raise ValueError(f"bytes {start} to {start + size} of {len(view)}")
            if size == 0:
                return torch.empty(fake.shape, dtype=fake.dtype)
            data = torch.frombuffer(view[start : start + size], dtype=torch.uint8)
            place = fake.storage_offset(), fake.shape, fake.stride()
            return torch.empty(0, dtype=fake.dtype).set_(data.untyped_storage(), *place)
        except _UNREADABLE as error:
            text = f"`{index.fqn}` must be a saved tensor ({error!s:.160})"
            raise self._corrupt(text) from None

    def _view(self, index: TorchRecord) -> memoryview:
        info = self.stored.get(index)
        if info is None or getattr(info, "kind", "") != "_StorageInfo":
            raise self._corrupt(f"`{METADATA}` must say where `{index.fqn}` lies")
        name, offset, length = info.relative_path, info.offset, info.length
        if info.fields.get("transform_descriptors"):
            raise self._corrupt(f"`{index.fqn}` must not be compressed; save without extensions")
        is_name = isinstance(name, str) and Path(name).name == name
        if not is_name or type(offset) is not int or type(length) is not int:
            raise self._corrupt(f"`{index.fqn}` must lie in a file of the folder, got {name!r}")
        if name not in self._maps:
            path = self.folder / name
            if not path.is_file():
                raise CheckpointIncomplete(f"`{path}` must be there, as `{METADATA}` names it")
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                # Private, hence writable as torch wants it; nobody writes.
                pages = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) if size else b""
            self._maps[name] = memoryview(pages)
        mapped = self._maps[name]
        if not 0 <= offset <= offset + length <= len(mapped):
            raise CheckpointIncomplete(
                f"`{self.folder / name}` must have {offset + length} bytes, got {len(mapped)}"
            )
        return mapped[offset : offset + length]

    def _corrupt(self, text: str) -> CheckpointCorrupt:
        return CheckpointCorrupt(f"`{self.folder}`: {text}", file=METADATA)


def _shared(values: Mapping[str, Any], parameters: Collection[str]) -> dict[str, Any]:
    """Return values of a DCP folder as a checkpoint shares them.

    An optimizer that knows its parameters by number says nothing of whose state is whose: its
    options stay among the other values, with a warning.
    """
    rest: dict[str, Any] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        place = _OF_OPTIMIZER.fullmatch(name)
        if place is None:
            rest[name] = value
            continue
        owner, _, key = place["path"].rpartition(".")
        if place["part"] == "state":
            numbers.setdefault(owner, {})[key] = value
        else:
            # Where torch flattens groups, each parameter has options of its own.
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
    shared: dict[str, Any] = {"dcp": rest} if rest else {}
    if found or numbers:
        shared[OPTIMIZER] = {"groups": found, "numbers": numbers}
    return shared


_OF_OPTIMIZER = re.compile(r"optim(izer)?\.(?P<part>state|param_groups)\.(?P<path>.+)")
"""Name of a value of an optimizer."""
_UNREADABLE = (pickle.UnpicklingError, RuntimeError, ValueError, AttributeError, EOFError)
"""What torch's loader raises on bytes that are not what they should be."""
TYPES_OF_TORCH = {str(dtype).removeprefix("torch."): name for dtype, name in NAMES.items()}
"""Name of a type in torch to ours."""


class _Window(io.RawIOBase):
    """A part of a mapped file as a file of its own."""

    def __init__(self, view: memoryview) -> None:
        self._data, self._place = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        base = (0, self._place, len(self._data))[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, target: Any) -> int:
        part = self._data[self._place : self._place + len(target)]
        target[: len(part)] = part
        self._place += len(part)
        return len(part)


def export_dcp(
    place: str, folder: str | Path, *, role: str = "main", storage: Store | None = None
) -> None:
    """Write a role of a checkpoint as a folder that `torch.distributed.checkpoint.load` reads.

    Names are `model.<fqn>` and `optim.state.<parameter>.<state>`, chunks are the stored boxes;
    shared values are `shared.<name>`. The metadata comes last.

    Args:
        place: URI or pin of the checkpoint.
        folder: local folder; must be empty or absent.
        role: whose state.
        storage: in place of the one that `place` names.

    Raises:
        FileExistsError: the folder holds something.
        LayoutMismatch: the checkpoint has no such role.
        CheckpointError: the checkpoint is damaged.
    """
    opened, target = open_state(place, storage), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise FileExistsError(f"`{target}` must be empty; name another folder")
    writer = _Writer(target)
    try:
        for fqn, kind, row in sorted(
            (fqn, kind, row)
            for (owner, kind, fqn), row in opened.metadata.tensor_ids.items()
            if owner == role
        ):
            path: tuple[str, ...] = kind, fqn
            if kind == "optim" and "." in fqn:
                parameter, _, state = fqn.rpartition(".")
                path = "optim", "state", parameter, state
            writer.add_tensor(path, opened, row)
        key = names_of(opened.metadata.objects, role).shared
        shared = decode_extra(BlockReader(opened).read_file(key), file=key) if key else {}
        for name, value in shared.items() if isinstance(shared, dict) else ():
            writer.add_value(("shared", name), value)
        if not writer.described:
            raise LayoutMismatch(f"`{opened.uri}` must hold the role `{role}`; see `info`")
        writer.finish()
    finally:
        writer.close()


class _Writer:
    """A DCP folder that is being written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.described: dict[str, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._stored: dict[Any, Any] = {}
        self._number = 0
        self._file = (folder / "__0_0.distcp").open("wb")

    def add_tensor(self, path: tuple[str, ...], opened: Opened, row: int) -> None:
        """Write the stored boxes of a tensor."""
        from torch.distributed.checkpoint import metadata as dcp

        spec, meta = opened.metadata.tensors.spec(row), opened.metadata
        name, reader = ".".join(path), SliceReader(opened)
        chunks: list[dcp.ChunkStorageMetadata] = []
        for box in _boxes(meta, row, len(spec.shape), spec):
            raw = reader.read(spec, box)
            tensor = torch.from_numpy(raw.reshape(-1).view(np.uint8)).view(TYPES[spec.dtype])
            index = dcp.MetadataIndex(name, box.offsets, len(chunks))
            self._stored[index] = self._write(tensor.view(box.lengths))
            sides = torch.Size(box.offsets), torch.Size(box.lengths)
            chunks.append(dcp.ChunkStorageMetadata(*sides))
        properties = dcp.TensorProperties(dtype=TYPES[spec.dtype])
        self.described[name] = dcp.TensorStorageMetadata(properties, torch.Size(spec.shape), chunks)
        self._paths[name] = path

    def add_value(self, path: tuple[str, ...], value: Any) -> None:
        """Write a value that is no tensor."""
        from torch.distributed.checkpoint import metadata as dcp

        name = ".".join(path)
        self._stored[dcp.MetadataIndex(name)] = self._write(value)
        self.described[name] = dcp.BytesStorageMetadata()
        self._paths[name] = path

    def finish(self) -> None:
        """Write the metadata: from here on the folder is a checkpoint."""
        from torch.distributed.checkpoint import metadata as dcp

        self.close()
        made: DcpMetadata = dcp.Metadata(
            self.described, self._paths, self._stored, dcp.StorageMeta(save_id=str(uuid.uuid4()))
        )
        partial = self.folder / f"{METADATA}.tmp"
        with partial.open("wb") as file:
            pickle.dump(made, file)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(self.folder / METADATA)

    def close(self) -> None:
        """Put the last file on the disk."""
        if not self._file.closed:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()

    def _write(self, value: Any) -> Any:
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        start = self._file.tell()
        if start > FILE_BYTES:
            self.close()
            self._number, start = self._number + 1, 0
            self._file = (self.folder / f"__0_{self._number}.distcp").open("wb")
        torch.save(value, self._file)
        name = f"__0_{self._number}.distcp"
        return _StorageInfo(name, start, self._file.tell() - start)


def _boxes(meta: Any, row: int, dims: int, spec: TensorSpec) -> Iterator[Box]:
    """Yield the stored boxes of a tensor, large ones cut along their first dimension."""
    rows = meta.shards_of(row)
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
