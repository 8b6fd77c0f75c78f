"""Reader of the pickled `.metadata` of a torch DCP folder that runs no code named in the file.

torch reads it by plain `pickle`, because its unpickler of weights knows older pickles only. Here
each allowed class becomes a record of fields without methods, and each torch type becomes its name.
A file that names anything else is refused.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any, NamedTuple

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.geometry import Box, Sides
from planish.checkpoint.format.items import TORCH_TYPES
from planish.checkpoint.format.strict_json import are_counts

MAX_METADATA_BYTES = 1 << 30
"""Largest file that is read; torch writes about 150 bytes for each shard."""
_MAX_TUPLES = 10_000
"""Most tuples without a list or dict between; more may be nested so deep that a hash overflows."""


class DcpTensor(NamedTuple):
    """One tensor of a DCP folder."""

    dtype: str
    shape: Sides
    boxes: list[Box]


class DcpPlace(NamedTuple):
    """Byte range of a value or of a box in a file."""

    file: str
    start: int
    length: int


class DcpMetadata(NamedTuple):
    """Content of a DCP folder."""

    tensors: dict[str, DcpTensor]
    values: list[str]
    """Names of values that are not tensors."""
    places: dict[tuple[str, Sides], DcpPlace]
    """(name, offsets of the box) -> place; offsets are () for values."""


class _Record:
    """The pickled fields of a torch object, without its methods."""

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, tuple):
            # `TensorProperties` pickles as a tuple that begins with the type.
            state = {"dtype": state[0]}
        vars(self).update(state)


class _Tensor(_Record):
    pass


class _Bytes(_Record):
    pass


def _size(items: Any = ()) -> Sides:
    values = tuple(items)
    if not are_counts(values):
        raise pickle.UnpicklingError(f"a size of {values!r}")
    return values


def _nothing(*parts: Any) -> None:
    """Replace a callable whose result is not needed: paths, layouts, memory formats."""


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    (_METADATA, "TensorStorageMetadata"): _Tensor,
    (_METADATA, "BytesStorageMetadata"): _Bytes,
    **{
        (_METADATA, name): _Record
        for name in (
            "Metadata",
            "StorageMeta",
            "ChunkStorageMetadata",
            "TensorProperties",
            "MetadataIndex",
        )
    },
    (_METADATA, "_MEM_FORMAT_ENCODING"): _nothing,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Record,
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _nothing,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): _nothing
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
    },
    **{("torch", name): name for name in TORCH_TYPES.values()},
}
"""(module, name) in the file -> its replacement."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a name, without an import."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the name `{module}.{name}`")
        return _ALLOWED[module, name]


def read_dcp_metadata(data: bytes, *, name: str = ".metadata") -> DcpMetadata:
    """Decode the file `.metadata` of a DCP checkpoint; errors call it `name`.

    Raises `CheckpointCorrupt` if it is no such file, or names a class that is not allowed.
    """
    try:
        _check_size(data)
        return _plain(_Unpickler(io.BytesIO(data)).load())
    except Exception as error:
        # The unpickler can raise any error on a hostile stream; all become one error here.
        raise CheckpointCorrupt(
            f"`{name}` must be the metadata of a torch DCP checkpoint, got {error!s:.200}; "
            "nothing in it has been run",
            file=name,
        ) from None


def _check_size(data: bytes) -> None:
    """Refuse memo numbers beyond the size of `data`, and tuples too deep to be hashed."""
    tuples = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name in {"PUT", "BINPUT", "LONG_BINPUT"} and int(str(argument)) > len(data):
            raise pickle.UnpicklingError(f"the memo number {argument}")
        tuples = tuples + 1 if name.startswith("TUPLE") else tuples
        tuples = 0 if name in {"SETITEMS", "APPENDS", "SETITEM", "APPEND", "BUILD"} else tuples
        if tuples > _MAX_TUPLES:
            raise pickle.UnpicklingError(f"more than {_MAX_TUPLES} nested tuples")


def _plain(record: Any) -> DcpMetadata:
    """Return the needed fields of the records; records of another form raise any error."""
    found = DcpMetadata({}, [], {})
    for name, entry in record.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, (_Tensor, _Bytes)):
            raise pickle.UnpicklingError(f"the entry {name!r}")
        if isinstance(entry, _Bytes):
            found.values.append(name)
            continue
        fields: Any = entry
        boxes = [Box(_size(chunk.offsets), _size(chunk.sizes)) for chunk in fields.chunks]
        found.tensors[name] = DcpTensor(str(fields.properties.dtype), _size(fields.size), boxes)
    for index, info in record.storage_data.items():
        if getattr(info, "transform_descriptors", None):
            raise pickle.UnpicklingError(f"`{index.fqn}` compressed; save without extensions")
        if not isinstance(info.relative_path, str):
            raise pickle.UnpicklingError(f"a file {info.relative_path!r}")
        start, length = _size((info.offset, info.length))
        offsets = _size(getattr(index, "offset", None) or ())
        found.places[str(index.fqn), offsets] = DcpPlace(info.relative_path, start, length)
    return found
