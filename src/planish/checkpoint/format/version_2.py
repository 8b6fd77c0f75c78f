"""Format 2 of the metadata: one Arrow file; `metafile` checks the values.

It is an Arrow IPC file, compressed with zstd, of one row::

    facts    JSON: `header` and `objects`
    tensors  list of {role, kind, fqn, dtype, shape}
    files    list of {key, size, algorithm, crcs}: one checksum for each MiB
    shards   list of {tensor, file, start}: rows of the lists above, first byte in the file
    offset, length  the sides of all shards' boxes, concatenated: one number per dimension
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from planish.base import arrow
from planish.checkpoint.format.geometry import I64, cut, volumes
from planish.checkpoint.format.items import (
    ITEM_BYTES,
    TensorTable,
    pad,
    refuse_beyond,
)
from planish.checkpoint.format.strict_json import FormatFault, dump_json, load_json

if TYPE_CHECKING:
    from planish.checkpoint.format.metafile import Metadata

_START = b"ARROW1\0\0"
_OPTIONS = pa.ipc.IpcWriteOptions(
    compression=pa.Codec("zstd", compression_level=3), use_threads=False
)
_SCHEMA = pa.schema({
    "facts": pa.string(),
    "tensors": pa.list_(pa.struct({
        "role": pa.string(), "kind": pa.string(), "fqn": pa.string(), "dtype": pa.string(),
        "shape": pa.list_(pa.int64()),
    })),
    "files": pa.list_(pa.struct({
        "key": pa.string(), "size": pa.int64(), "algorithm": pa.string(),
        "crcs": pa.list_(pa.uint32()),
    })),
    "shards": pa.list_(pa.struct({
        "tensor": pa.int64(), "file": pa.int64(), "start": pa.int64(),
    })),
    "offset": pa.list_(pa.int64()),
    "length": pa.list_(pa.int64()),
})  # fmt: skip
_COLUMNS = _SCHEMA.serialize().to_pybytes()


def write(meta: Metadata) -> bytes:
    """Return the bytes of the file."""
    tensors, files, shards = meta.tensors, meta.files, meta.shards
    num_crcs = np.array([len(crcs) for crcs in files.crcs], np.int64)
    crcs = np.concatenate([np.zeros(0, np.uint32), *files.crcs])
    shape = _lists(arrow.numbers(_sides(tensors.shapes, tensors.dims)), tensors.dims)
    facts = dump_json({"header": meta.header, "objects": meta.objects})
    tables: dict[str, list[Any]] = {
        "tensors": [tensors.roles, tensors.kinds, tensors.fqns, tensors.dtypes, shape],
        "files": [files.keys, files.sizes, files.algorithms, _lists(arrow.numbers(crcs), num_crcs)],
        "shards": [shards.tensor, shards.file, shards.start],
    }
    row = [arrow.texts([facts])]
    for name, columns in tables.items():
        fields = list(_SCHEMA.field(name).type.value_type)
        arrays = [_column(c, f.type) for c, f in zip(columns, fields, strict=True)]
        row.append(_whole(pa.StructArray.from_arrays(arrays, fields=fields)))
    dims = tensors.dims[shards.tensor]
    row += [_whole(arrow.numbers(_sides(s, dims))) for s in (shards.offsets, shards.lengths)]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA, options=_OPTIONS) as writer:
        writer.write_batch(pa.record_batch(row, schema=_SCHEMA))
    return bytes(sink.getvalue())


def _column(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values
    if kind == pa.string():
        return arrow.texts([text.encode() for text in values])
    return arrow.numbers(np.asarray(values, np.int64))


def _lists(values: pa.Array, counts: I64) -> pa.Array:
    return arrow.lists(np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]), values)


def _whole(values: pa.Array) -> pa.Array:
    """Return a column whose only row holds all values."""
    return _lists(values, np.array([len(values)]))


def _sides(padded: I64, dims: I64) -> I64:
    """Undo `items.pad`."""
    has = np.arange(padded.shape[1]) < dims[:, None]
    return padded.reshape(-1) if has.all() else padded[has]


def read(data: bytes, max_bytes: int) -> dict[str, Any]:
    """Return unchecked fields of `Metadata`; `files`, `shards` are arguments of their classes."""
    if not data.startswith(_START):
        raise FormatFault(f"must begin with {_START!r}, got {data[: len(_START)]!r}")
    # Arrow uses a schema before it checks it, and a damaged one can end the process.
    rows = len(_START) + len(_COLUMNS)
    if data[len(_START) : rows] != _COLUMNS:
        raise FormatFault(f"has other columns than {_SCHEMA.names}")
    try:
        # The message after the schema is enough: the footer only repeats the positions of both.
        message = pa.ipc.read_message(pa.py_buffer(data)[rows:])
        needed = unpacked_bytes(message)
        if needed > max_bytes:
            raise FormatFault(f"its columns take {needed} bytes, more than {max_bytes}")
        batch = pa.ipc.read_record_batch(message, _SCHEMA)
        batch.validate(full=True)
    except (pa.ArrowException, EOFError, OSError, struct.error) as fault:
        raise FormatFault(f"is no Arrow file, {fault!s:.200}") from None
    if batch.num_rows != 1 or any(map(_has_nulls, batch.columns)):
        raise FormatFault("must have one row without nulls")
    facts = batch.column("facts")[0].as_py()
    tensors, files, shards = (
        dict(zip(table.type.names, table.flatten(), strict=True))
        for table in (batch.column(name).flatten() for name in ("tensors", "files", "shards"))
    )
    dims, blocks = _counts(tensors["shape"]), _counts(files["crcs"])
    width, crcs = int(dims.max(initial=0)), arrow.to_numpy(files["crcs"].flatten())
    rest = len(facts) + tensors["fqn"].nbytes + files["key"].nbytes + crcs.nbytes
    owner = arrow.to_numpy(shards["tensor"])
    refuse_beyond(max_bytes - needed, len(owner), len(dims), len(blocks), width, rest)
    if len(owner) and not 0 <= int(owner.min()) <= int(owner.max()) < len(dims):
        raise FormatFault(f"a shard of tensor {owner.max()} of {len(dims)}")
    offset, length = (arrow.to_numpy(batch.column(n).flatten()) for n in ("offset", "length"))
    if not len(offset) == len(length) == int(dims[owner].sum()):
        raise FormatFault("a shard must have the dimensions of its tensor")
    head = load_json(facts.encode())
    if not isinstance(head, dict) or head.keys() != {"header", "objects"}:
        raise FormatFault("its facts must be `header` and `objects`")
    roles, kinds, fqns, dtypes = (
        tuple(tensors[name].to_pylist()) for name in ("role", "kind", "fqn", "dtype")
    )
    item_bytes = np.array([ITEM_BYTES.get(dtype, 0) for dtype in dtypes], np.int64)
    lengths = pad(length, dims[owner], width, 1)
    return {
        **head,
        "tensors": TensorTable(
            roles,
            kinds,
            fqns,
            dtypes,
            dims,
            pad(arrow.to_numpy(tensors["shape"].flatten()), dims, width, 1),
        ),
        "files": (
            *(files[name].to_pylist() for name in ("key", "size", "algorithm")),
            cut(crcs, blocks),
        ),
        "shards": (
            *(owner, arrow.to_numpy(shards["file"]), arrow.to_numpy(shards["start"])),
            volumes(lengths) * item_bytes[owner],
            pad(offset, dims[owner], width, 0),
            lengths,
        ),
    }


def _counts(lists: pa.ListArray) -> I64:
    ends: I64 = arrow.to_numpy(lists.offsets).astype(np.int64)
    return np.diff(ends)


def _has_nulls(array: pa.Array) -> bool:
    if array.null_count or not pa.types.is_nested(array.type):
        return bool(array.null_count)
    inner = array.flatten()
    return any(map(_has_nulls, inner if isinstance(inner, list) else [inner]))


def unpacked_bytes(message: pa.Message) -> int:
    """Return the bytes of an Arrow message's columns after decompression.

    Arrow allocates for each compressed buffer the size that its first 8 bytes name. The positions
    of the buffers come from the message, in the layout of Arrow's Message.fbs and of flatbuffers;
    Arrow has verified the message.
    """
    text, body = bytes(message.metadata), memoryview(message.body)

    def number(form: str, place: int) -> int:
        return int(struct.unpack_from(form, text, place)[0])

    def field_of(table: int, row: int) -> int:
        fields = table - number("<i", table)
        shift = number("<H", fields + 4 + 2 * row) if 4 + 2 * row < number("<H", fields) else 0
        return table + shift if shift else 0

    if message.type != "record batch":
        raise FormatFault(f"a message of type {message.type}")
    header = field_of(number("<I", 0), 2)
    batch = header + number("<I", header)
    listed, is_compressed = field_of(batch, 2), bool(field_of(batch, 3))
    first = listed + number("<I", listed)
    total = 0
    for row in range(number("<I", first)):
        start, length = struct.unpack_from("<qq", text, first + 4 + 16 * row)
        size = struct.unpack_from("<q", body, start)[0] if is_compressed and length else -1
        total += size if size >= 0 else length
    return total
