"""Reader of metadata of format 1, which this program wrote before format 2; see `metafile`.

::

    magic      8 bytes, `PLNSHCKP`
    version    u32, 1
    head size  u32, bytes
    head       JSON: {"columns": [[name, width, count], ...], "head": {...}}
    columns    in that order, without gaps: count x unsigned integers of width 1, 2, 4 or 8
    digest     32 bytes, SHA-256 of everything before

Columns: `tensor.role`, `.kind`, `.dtype`, `file.algorithm` (numbers of names that the head lists),
`tensor.dims`, `file.size`, `file.crcs`, `shard.tensor`, `.file`, `.start`, `.bytes`; texts as
`tensor.name_size` with `.names`, `file.key_size` with `.keys` (characters of each, all as UTF-8);
`tensor.shape.<d>`, `shard.offset.<d>`, `shard.length.<d>` of the rows that have dimension d.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planish.checkpoint.format.geometry import I64, cut
from planish.checkpoint.format.items import TensorTable, refuse_beyond
from planish.checkpoint.format.strict_json import JSON_GROWTH, Fields, FormatFault, load_json

MAGIC = b"PLNSHCKP"
_FIXED = struct.Struct("<8sII")
_DIGEST_BYTES = 32
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}


def read(data: bytes, max_bytes: int) -> Fields:
    """Return unchecked fields of `metafile.Metadata`, as `version_2.read`."""
    body = memoryview(data)[:-_DIGEST_BYTES]
    if len(body) < _FIXED.size:
        raise FormatFault(f"must have at least {_FIXED.size + _DIGEST_BYTES} bytes")
    _, version, size = _FIXED.unpack_from(body)
    start = _FIXED.size + size
    if version != 1 or start > len(body):
        raise FormatFault(f"version {version} with a head of {size} bytes in {len(data)}")
    if size * JSON_GROWTH > max_bytes:
        raise FormatFault(f"a head of {size} bytes needs more than the bound of {max_bytes}")
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        raise FormatFault("its SHA-256 differs")
    try:
        parsed = load_json(bytes(body[_FIXED.size : start]))
        head, columns = parsed["head"], _Columns(parsed["columns"], body[start:])
        return _tables(head, columns, max_bytes)
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as fault:
        raise FormatFault(f"{type(fault).__name__} {fault!s:.200}") from None


def _tables(head: Fields, columns: _Columns, max_bytes: int) -> Fields:
    width = int(columns["tensor.dims"].max(initial=0))
    names = ("shard.tensor", "tensor.dims", "file.size")
    shards, count, num_files = (len(columns[name]) for name in names)
    rest = sum(len(columns[name]) for name in ("tensor.names", "file.keys", "file.crcs"))
    refuse_beyond(max_bytes, shards, count, num_files, width, rest + len(str(head)))
    dims = columns.counts("tensor.dims")
    tensors = TensorTable(
        columns.choices("tensor.role", head["roles"], count),
        columns.choices("tensor.kind", head["kinds"], count),
        tuple(columns.texts("tensor.name_size", "tensor.names", count)),
        columns.choices("tensor.dtype", head["dtypes"], count),
        dims,
        columns.ragged("tensor.shape", dims, width, 1),
    )
    sizes, crcs = columns.counts("file.size"), columns["file.crcs"].astype(np.uint32)
    blocks = -(-sizes // (1 << 20))
    if int(blocks.max(initial=0)) > len(crcs) or int(blocks.sum()) != len(crcs):
        raise FormatFault(f"{len(crcs)} checksums do not fit the sizes of {len(sizes)} files")
    files = (
        columns.texts("file.key_size", "file.keys", num_files),
        sizes.tolist(),
        list(columns.choices("file.algorithm", head["algorithms"], num_files)),
        cut(crcs, blocks),
    )
    owner = columns.counts("shard.tensor")
    rows = [columns.counts(f"shard.{name}", shards) for name in ("file", "start", "bytes")]
    sides = [
        columns.ragged(f"shard.{name}", dims[owner], width, fill)
        for name, fill in (("offset", 0), ("length", 1))
    ]
    return {
        "header": head["header"],
        "objects": head["objects"],
        "tensors": tensors,
        "files": files,
        "shards": (owner, *rows, *sides),
    }


class _Columns(dict[str, NDArray[Any]]):
    """The columns of the file by name."""

    def __init__(self, listed: Any, data: memoryview) -> None:
        super().__init__()
        place = 0
        for name, width, count in listed:
            if name in self or type(count) is not int or not 0 <= count <= len(data):
                raise FormatFault(f"column {name!r:.80} of {count!r:.80} values")
            self[name] = np.frombuffer(data[place : place + count * width], _WIDTHS[width])
            place += count * width
            if len(self[name]) != count:
                raise FormatFault(f"column {name!r:.80} goes over the end")
        if place != len(data):
            raise FormatFault(f"{len(data) - place} bytes follow the last column")

    def counts(self, name: str, count: int = -1) -> I64:
        values = self[name].astype(np.int64)
        if count not in {-1, len(values)} or int(values.min(initial=0)) < 0:
            raise FormatFault(f"column `{name}` has {len(values)} values, or one of 2**63 or more")
        return values

    def choices(self, name: str, names: list[str], count: int) -> tuple[str, ...]:
        if not all(isinstance(each, str) for each in names):
            raise FormatFault(f"names must be texts, got {names!r:.80}")
        return tuple([names[number] for number in self.counts(name, count).tolist()])

    def texts(self, sizes: str, pool: str, count: int) -> list[str]:
        text, counts = self[pool].tobytes().decode(), self.counts(sizes, count)
        if int(counts.max(initial=0)) > len(text) or int(counts.sum()) != len(text):
            raise FormatFault(f"column `{sizes}` does not fit `{pool}`")
        return cut(text, counts)

    def ragged(self, prefix: str, dims: I64, width: int, fill: int) -> I64:
        result = np.full((len(dims), width), fill, np.int64)
        for dim in range(width):
            has = dims > dim
            if has.any():
                result[has, dim] = self.counts(f"{prefix}.{dim}", int(has.sum()))
        return result
