"""The pickled `.metadata` of a torch DCP folder, read without running anything that it names.

Every class that such a file may name becomes an inert `TorchRecord`, every torch type its name:
a file that names anything else is refused before a single object is built. Neither torch nor any
other code that the file could name is imported.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from collections import OrderedDict
from typing import Any

from planish.base.errors import CheckpointCorrupt

MAX_METADATA_BYTES = 1 << 30
"""A larger file is refused; torch itself writes about 150 bytes for each shard."""

_OPCODE_NAMES = """
PROTO FRAME STOP MARK POP POP_MARK DUP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG
LONG1 LONG4 FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE
BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST
APPEND APPENDS LIST EMPTY_DICT DICT SETITEM SETITEMS EMPTY_SET ADDITEMS FROZENSET GET BINGET
LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL REDUCE NEWOBJ BUILD
"""
_OPCODES = frozenset(_OPCODE_NAMES.split())
_DTYPE_NAMES = """
float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64 bool
complex64 complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu
"""
_DTYPES = frozenset(_DTYPE_NAMES.split())
_MAX_TUPLES = 10_000
"""Between two containers; beyond it lie only tuples nested so deep that to hash one overflows."""
_FORMATS = ("contiguous", "channels_last", "preserve")


class TorchRecord:
    """What a class of torch left in the file: its name and its fields, and no behaviour.

    Example:
        >>> TorchRecord("ChunkStorageMetadata", {"offsets": (0, 0)}).offsets
        (0, 0)
    """

    kind = ""
    fields: dict[str, Any]

    def __init__(self, kind: str = "", fields: dict[str, Any] | None = None) -> None:
        """Keep the name of the class and its fields."""
        self.kind, self.fields = kind or self.kind, fields or {}

    def __getattr__(self, name: str) -> Any:
        """Return a field; AttributeError when the file did not bring it."""
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"`{type(self).__name__}` has no `{name}`") from None

    def __repr__(self) -> str:
        """Show kind and fields."""
        return f"{self.kind}({self.fields})"

    def _key(self) -> tuple[Any, ...]:
        return self.kind, self.fields.get("fqn"), self.fields.get("offset")

    def __eq__(self, other: object) -> bool:
        """Compare as `MetadataIndex` does: the index hint does not count."""
        return isinstance(other, TorchRecord) and self._key() == other._key()

    def __hash__(self) -> int:
        """Agree with `__eq__`."""
        return hash(self._key())


def _record_class(name: str) -> type[TorchRecord]:
    class Named(TorchRecord):
        kind = name

        def __new__(cls) -> Named:
            made = super().__new__(cls)
            made.fields = {}
            return made

        def __setstate__(self, state: Any) -> None:
            if isinstance(state, tuple) and name == "TensorProperties" and len(state) == 5:
                state = {"dtype": state[0], "layout": state[1]}
            if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
                raise pickle.UnpicklingError(f"`{name}` with fields {type(state).__name__}")
            self.fields = state

    return Named


def _size(items: Any = ()) -> tuple[int, ...]:
    values = tuple(items)
    if not all(type(value) is int for value in values):
        raise pickle.UnpicklingError(f"a size of {values!r}")
    return values


def _text(*parts: Any) -> str:
    """Stand for paths and layouts: only their words are kept."""
    return "/".join(str(part) for part in parts if isinstance(part, str))


def _memory_format(number: Any = 0) -> str:
    return _FORMATS[number] if number in (0, 1, 2) else "unknown"


_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[tuple[str, str], Any] = {
    **{
        (_METADATA, name): _record_class(name)
        for name in (
            *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "StorageMeta"),
            *("ChunkStorageMetadata", "TensorProperties", "MetadataIndex"),
        )
    },
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _record_class("_StorageInfo"),
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): _text,
    ("collections", "OrderedDict"): OrderedDict,
    **{
        (module, name): _text
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
    },
    **{("torch", name): name for name in _DTYPES},
}
"""(module, name) in the file -> what stands for it here."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return our stand-in for a name; nothing is ever imported."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"the name `{module}.{name}`")
        return _ALLOWED[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Refuse: metadata of torch has no persistent ids."""
        raise pickle.UnpicklingError(f"the persistent id {pid!r}")


def read_dcp_metadata(data: bytes, *, name: str = ".metadata") -> TorchRecord:
    """Decode the metadata of a DCP checkpoint into inert records.

    Args:
        data: content of the file `.metadata`.
        name: what to call it in errors.

    Returns:
        A record with `state_dict_metadata`, `planner_data` and `storage_data`.

    Raises:
        CheckpointCorrupt: not such a file, or it names something that metadata never needs;
            nothing that it names has run.
    """
    try:
        _check_opcodes(data)
        record = _Unpickler(io.BytesIO(data)).load()
    except Exception as error:
        # A hostile stream can raise anything from the unpickler; all of it means the same here.
        raise CheckpointCorrupt(
            f"`{name}` must be the metadata of a torch DCP checkpoint, got {error!s:.200}; "
            "nothing in it has been run",
            file=name,
        ) from None
    fields = record.fields if isinstance(record, TorchRecord) else {}
    if not all(
        isinstance(fields.get(key), dict) for key in ("state_dict_metadata", "storage_data")
    ):
        raise CheckpointCorrupt(
            f"`{name}` must hold `state_dict_metadata` and `storage_data`, got {type(record)}; it "
            "is not from torch.distributed.checkpoint's file system writer",
            file=name,
        )
    assert isinstance(record, TorchRecord)
    return record


def _check_opcodes(data: bytes) -> None:
    """Refuse opcodes that metadata never has, and memo numbers that would allocate much."""
    if len(data) > MAX_METADATA_BYTES:
        raise pickle.UnpicklingError(f"{len(data)} bytes, more than {MAX_METADATA_BYTES}")
    tuples = 0
    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name not in _OPCODES:
            raise pickle.UnpicklingError(f"the opcode {name}")
        if name in {"PUT", "BINPUT", "LONG_BINPUT"} and int(str(argument)) > len(data):
            raise pickle.UnpicklingError(f"the memo number {argument}")
        tuples = tuples + 1 if name.startswith("TUPLE") else tuples
        tuples = 0 if name in {"SETITEMS", "APPENDS", "SETITEM", "APPEND", "BUILD"} else tuples
        if tuples > _MAX_TUPLES:
            raise pickle.UnpicklingError(f"more than {_MAX_TUPLES} nested tuples")
