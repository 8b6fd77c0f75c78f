"""Tensors of one rank: as items, and as columns, which are the items without their data.

Items are the source of a save and the destination of a load. Ranks send columns to rank 0, which
plans; their tensors are one table of names, types and shapes, as in the global metadata.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (tensor, basic and byte metadata).
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.geometry import I64, Box, Sides
from planish.checkpoint.format.strict_json import JSON_GROWTH, Fields, FormatFault, Values

if TYPE_CHECKING:
    import torch

KINDS = ("model", "optim", "extra")
PARTS = (*KINDS, "loader")
"""Parts of a role's state: tensors of the model, tensors of the optimizer, small values, and the
position of the data loader. `LoadOptions.parts` selects some of them."""
_TYPES = {
    "F64": (8, "float64"),
    "F32": (4, "float32"),
    "F16": (2, "float16"),
    "BF16": (2, "bfloat16"),
    "F8_E4M3": (1, "float8_e4m3fn"),
    "F8_E5M2": (1, "float8_e5m2"),
    "F8_E8M0": (1, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (1, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (1, "float8_e5m2fnuz"),
    "I64": (8, "int64"),
    "I32": (4, "int32"),
    "I16": (2, "int16"),
    "I8": (1, "int8"),
    "U64": (8, "uint64"),
    "U32": (4, "uint32"),
    "U16": (2, "uint16"),
    "U8": (1, "uint8"),
    "BOOL": (1, "bool"),
    "C64": (8, "complex64"),
    "C128": (16, "complex128"),
}
"""Type name in safetensors (C128 is ours) -> (bytes of one element, attribute of `torch`)."""
ITEM_BYTES: dict[str, int] = {name: size for name, (size, _) in _TYPES.items()}
"""Name of a type -> bytes of one element."""
TORCH_TYPES: dict[str, str] = {name: attribute for name, (_, attribute) in _TYPES.items()}
"""Name of a type -> name of the attribute of `torch`."""
MAX_DIMS = 64
"""Most dimensions of a tensor; array libraries support no more."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, type and shape of a whole tensor, independent of its shards."""

    role: str
    """Model of the state; `main` if there is only one."""
    kind: str
    fqn: str
    """Canonical name, without the prefixes of wrappers."""
    dtype: str
    shape: Sides


_KEY = attrgetter("role", "kind", "fqn")


@dataclass(frozen=True)
class TensorTable:
    """Tensors as columns [t]; (role, kind, fqn) is the name of a tensor, its row the number."""

    roles: tuple[str, ...]
    kinds: tuple[str, ...]
    fqns: tuple[str, ...]
    dtypes: tuple[str, ...]
    dims: I64
    """[t], number of dimensions."""
    shapes: I64
    """[t, n], n = `max_dims`; padded with 1."""

    @classmethod
    def from_specs(cls, specs: Sequence[TensorSpec]) -> tuple[TensorTable, I64]:
        """Return a table of the distinct tensors, and [len(specs)] the row of each spec."""
        # Fast path: if each fqn appears once, the triples are not needed.
        if len({spec.fqn for spec in specs}) == len(specs):
            return cls._of(specs), np.arange(len(specs), dtype=np.int64)
        first: dict[tuple[str, str, str], TensorSpec] = {}
        faults: dict[str, None] = {}
        for key, spec in zip(map(_KEY, specs), specs, strict=True):
            known = first.setdefault(key, spec)
            if known != spec:
                both = " and ".join(f"{each.dtype} {each.shape}" for each in (known, spec))
                faults[f"`{spec.fqn}`: {both}"] = None
        if faults:
            raise LayoutMismatch(
                f"one name must have one type and one shape, got {'; '.join(faults)}"
            )
        table = cls._of(list(first.values()))
        return table, np.array([table.ids[key] for key in map(_KEY, specs)], np.int64)

    @classmethod
    def _of(cls, specs: Sequence[TensorSpec]) -> TensorTable:
        dtypes = tuple([spec.dtype for spec in specs])
        shapes = [spec.shape for spec in specs]
        dims = np.fromiter(map(len, shapes), np.int64, len(shapes))
        return cls(
            tuple([spec.role for spec in specs]),
            tuple([spec.kind for spec in specs]),
            tuple([spec.fqn for spec in specs]),
            dtypes,
            dims,
            padded(shapes, dims, int(dims.max(initial=0)), 1),
        )

    def __len__(self) -> int:
        return len(self.fqns)

    @property
    def max_dims(self) -> int:
        """Number of columns of padded shapes and boxes: the most dimensions of any tensor here."""
        return int(self.shapes.shape[1])

    @functools.cached_property
    def ids(self) -> dict[tuple[str, str, str], int]:
        """(role, kind, fqn) -> row."""
        names = zip(self.roles, self.kinds, self.fqns, strict=True)
        return {name: row for row, name in enumerate(names)}

    @functools.cached_property
    def item_bytes(self) -> I64:
        """[t], bytes of one element."""
        return np.array([ITEM_BYTES[dtype] for dtype in self.dtypes], np.int64)

    def spec(self, row: int) -> TensorSpec:
        """Return one tensor."""
        shape = tuple(self.shapes[row, : self.dims[row]].tolist())
        names = self.roles[row], self.kinds[row], self.fqns[row], self.dtypes[row]
        return TensorSpec(*names, shape)

    def quoted(self, row: int) -> str:
        """Return a tensor's name for messages."""
        return quoted_name(self.roles[row], self.kinds[row], self.fqns[row])

    def pad(self, sides: Sequence[Sides], owners: I64, value: int) -> I64:
        """Return [k, max_dims]: padded offsets or lengths; box i is of tensor `owners[i]`."""
        return padded(sides, self.dims[owners], self.max_dims, value)


def padded(rows: Sequence[Sides], dims: I64, width: int, value: int) -> I64:
    """Return [len(rows), width] int64; `value` fills the missing columns of shorter rows."""
    flat = np.fromiter(chain.from_iterable(rows), np.int64, int(dims.sum()))
    return pad(flat, dims, width, value)


def pad(flat: I64, dims: I64, width: int, value: int) -> I64:
    """Return [len(dims), width] int64: row i is the next `dims[i]` numbers of `flat`, padded."""
    if len(dims) and int(dims.min()) == width:
        return flat.reshape(len(dims), width)
    result = np.full((len(dims), width), value, np.int64)
    result[np.arange(width) < dims[:, None]] = flat
    return result


def refuse_beyond(
    max_bytes: int, shards: int, tensors: int, files: int, width: int, other_bytes: int
) -> None:
    """Refuse tables that may need more than `max_bytes`, before they are allocated.

    `width` is the most dimensions of a tensor; `other_bytes` counts names, checksums and JSON.
    """
    if width > MAX_DIMS:
        raise FormatFault(f"a tensor of {width} dimensions")
    needed = shards * (128 + 32 * width) + tensors * (704 + 8 * width) + 640 * files
    needed += JSON_GROWTH * other_bytes
    if needed > max_bytes:
        raise FormatFault(
            f"{shards} shards and {tensors} tensors may need {needed} bytes, more than the bound "
            f"of {max_bytes}"
        )


def renamed(kind: str, fqn: str, rename: Callable[[str], str] | None) -> str:
    """Return the stored name of a tensor, for a `rename` of parameters and buffers.

    The tensor of an optimizer is `<parameter>.<state>`.
    """
    if rename is None or kind not in ("model", "optim"):
        return fqn
    if kind == "model":
        return rename(fqn)
    parameter, dot, state = fqn.rpartition(".")
    return f"{rename(parameter)}{dot}{state}" if dot else fqn


def quoted_name(role: str, kind: str, fqn: str) -> str:
    """Return a tensor's name for messages, without the role if it is `main`."""
    return f"`{kind}.{fqn}`" if role == "main" else f"`{role}: {kind}.{fqn}`"


Finish = Callable[[Values], None]
"""Called with the loaded small values by name; puts them into the state."""


@dataclass(slots=True)
class LocalItem:
    """One local value of a rank: source of a save, destination of a load.

    Replicas are items of different ranks with equal tensor and equal boxes. `plan_save` refuses
    boxes that overlap without being equal.
    """

    tensor: TensorSpec
    boxes: tuple[Box, ...]
    """Consecutive row-major pieces: one box for a regular shard, several for a flat slice."""
    data: torch.Tensor | None = None
    """One box: a tensor of its shape, with any strides. Several boxes: a contiguous 1-D tensor of
    the summed volume, box after box. None in simulations."""

    @property
    def volume(self) -> int:
        """Number of elements."""
        return sum(box.volume for box in self.boxes)


@dataclass
class Collected:
    """Result of an adapter for one role's state on this rank."""

    items: Sequence[LocalItem]
    shared: Fields = field(default_factory=dict)
    """Small values equal on all ranks; written once for the role."""
    own: Fields = field(default_factory=dict)
    """Small values of this rank alone: states of random generators."""
    loader: Any = None
    """`loader_state.LoaderState` of ranks that read data, else None."""
    facts: Fields = field(default_factory=dict)
    """JSON that a load needs before it plans (`aliases` of tied weights); rank 0's is stored."""
    finish: list[Finish] = field(default_factory=list)
    """Functions that a load calls in order, once every item has been filled."""
    report: dict[str, str] = field(default_factory=dict)
    """Outcomes that `finish` adds, by name (`rng`: exact, reseeded or absent)."""


@dataclass(frozen=True)
class Columns:
    """The items of one rank as arrays, without their data.

    Row i of the item columns is `items[i]` of the argument of `from_items`. Empty boxes are left
    out, so an item may have no box.
    """

    tensors: TensorTable
    """The tensors that the items belong to, in order of first appearance."""
    item_tensor: I64
    """[i], row of `tensors`."""
    item_starts: I64
    """[i + 1], the boxes of item i are rows `item_starts[i] : item_starts[i + 1]`."""
    offsets: I64
    """[b, n], n = `tensors.max_dims`; padded with 0."""
    lengths: I64
    """[b, n], at least 1; padded with 1."""

    @classmethod
    def from_items(cls, items: Sequence[LocalItem]) -> Columns:
        """Turn the items of one rank into columns."""
        tensors, rows = TensorTable.from_specs([item.tensor for item in items])
        held = [item.boxes for item in items]
        counts = np.fromiter(map(len, held), np.int64, len(items))
        boxes = list(chain.from_iterable(held))
        owners = np.repeat(rows, counts)
        offsets = tensors.pad([box[0] for box in boxes], owners, 0)
        lengths = tensors.pad([box[1] for box in boxes], owners, 1)
        full = (lengths > 0).all(axis=1)
        if not full.all():
            item_of = np.repeat(np.arange(len(items)), counts)[full]
            counts = np.bincount(item_of, minlength=len(items))
            offsets, lengths = offsets[full], lengths[full]
        starts = np.zeros(len(items) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        return cls(tensors, rows, starts, offsets, lengths)

    @property
    def box_item(self) -> I64:
        """[b], the item of each box."""
        return np.repeat(np.arange(len(self.item_tensor)), np.diff(self.item_starts))

    @property
    def box_tensor(self) -> I64:
        """[b], the tensor of each box."""
        return np.repeat(self.item_tensor, np.diff(self.item_starts))

    def encode(self) -> bytes:
        """Return the columns as bytes; equal columns give equal bytes."""
        table = self.tensors
        tensors: dict[str, I64 | Sequence[str]] = {
            "role": table.roles,
            "kind": table.kinds,
            "fqn": table.fqns,
            "dtype": table.dtypes,
            "dims": table.dims,
            "shapes": table.shapes.reshape(-1),
        }
        return pack_columns(
            {},
            {
                "tensors": np.frombuffer(pack_columns({}, tensors), np.uint8),
                "tensor": self.item_tensor,
                "starts": self.item_starts,
                "offsets": self.offsets.reshape(-1),
                "lengths": self.lengths.reshape(-1),
            },
        )

    @classmethod
    def decode(cls, data: bytes, known: dict[bytes, TensorTable] | None = None) -> Columns:
        """Undo `encode`.

        `known` is a cache, bytes -> table, so that ranks with equal tensors share one table.
        """
        _, columns = unpack_columns(data)
        key, known = columns["tensors"].tobytes(), {} if known is None else known
        if key not in known:
            _, held = unpack_columns(key)
            roles, kinds, fqns, dtypes = (
                tuple(held[name].tolist()) for name in ("role", "kind", "fqn", "dtype")
            )
            dims = held["dims"]
            shapes = held["shapes"].reshape(len(dims), int(dims.max(initial=0)))
            known[key] = TensorTable(roles, kinds, fqns, dtypes, dims, shapes)
        table = known[key]
        shape = int(columns["starts"][-1]), table.max_dims
        return cls(
            table,
            columns["tensor"],
            columns["starts"],
            columns["offsets"].reshape(shape),
            columns["lengths"].reshape(shape),
        )

    def signature(self) -> bytes:
        """Return the SHA-256 of `encode()`."""
        return hashlib.sha256(self.encode()).digest()


def pack_columns(head: Values, columns: Mapping[str, NDArray[Any] | Sequence[str]]) -> bytes:
    """Return JSON, and columns of numbers or texts of any lengths, as one Arrow message.

    Equal content gives equal bytes. Ranks send each other such messages to plan.
    """
    import pyarrow as pa

    from planish.base import arrow

    arrays = []
    for column in columns.values():
        if isinstance(column, np.ndarray):
            values = arrow.numbers(column)
        else:
            values = arrow.texts([text.encode() for text in column])
        arrays.append(arrow.lists(np.array([0, len(column)]), values))
    batch = pa.record_batch(arrays, names=list(columns), metadata={"head": json.dumps(head)})
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def unpack_columns(data: bytes) -> tuple[Fields, Fields]:
    """Undo `pack_columns`; the columns are read-only arrays."""
    import pyarrow as pa

    from planish.base import arrow

    reader = pa.ipc.open_stream(data)
    batch = reader.read_next_batch()
    head: Fields = json.loads(reader.schema.metadata[b"head"])
    found: Fields = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_text = column.values.type == pa.string()
        values = column.values.to_pylist() if is_text else arrow.to_numpy(column.values)
        found[name] = np.array(values, object) if is_text else values
    return head, found
