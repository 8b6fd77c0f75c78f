"""`meta/global.bin`: the metadata of a checkpoint as one file of columns; checksums of its files.

The layout is that of `packing.py`, followed by the SHA-256 of everything before it. Columns::

    tensor.role .kind .dtype   number in `roles`, `kinds`, `dtypes` of the head
    tensor.dims .shape.<d>     dimensions; extent in dimension d, of the tensors that have it
    tensor.name_size .names    characters of each fqn; all fqns as UTF-8
    file.size .algorithm       bytes; number in `algorithms` of the head
    file.key_size .keys        characters of each key; all keys as UTF-8
    file.crcs                  checksum of every MiB of every file, in order
    shard.tensor .file         rows of the tables above
    shard.start .bytes         place in the file
    shard.offset.<d> .length.<d>   the box, in dimension d, of the shards whose tensor has it

A type belongs to a tensor, not to a shard, so the deduplicated table of basic metadata is the
column `tensor.dtype`. The bytes follow from the content alone: no time, no random id, no machine.
Nothing in the file is executed, and nothing is allocated before its size has been checked.

Checksums of blocks of 1 MiB let a part of an object be checked without the rest: CRC-32C in C where
the package `google-crc32c` brings its C module, else zlib's CRC-32; which one is recorded per file.
They find accidents, not forgeries: what must not be forged is bound by the SHA-256 of the metadata.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (global metadata file, byte metadata).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format.geometry import I64, MAX_ELEMENTS, volumes
from planish.checkpoint.format.items import KINDS, TensorTable, read_table, table_columns
from planish.checkpoint.format.packing import (
    JSON_GROWTH,
    NewerVersion,
    PackFault,
    Unsigned,
    column_of,
    head_bytes,
    pack,
    pack_choices,
    pack_ragged,
    pack_texts,
    signed,
    unpack,
    unpack_choices,
    unpack_ragged,
    unpack_texts,
)

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
BLOCK = 1 << 20
"""Bytes of a block; the last one of a file may be shorter."""

_Extend = Callable[[int, Any], int]
ALGORITHMS: dict[str, _Extend] = {
    "crc32c": google_crc32c.extend,
    "crc32": lambda crc, data: zlib.crc32(data, crc),
}
"""Name in the metadata -> checksum of bytes that follow bytes with a known checksum (0: none)."""
DEFAULT_CHECKSUM = "crc32c" if google_crc32c.implementation == "c" else "crc32"
"""The faster of the two here."""


def block_crcs(buffer: Buffer, algorithm: str = DEFAULT_CHECKSUM) -> NDArray[np.uint32]:
    """Return the checksum of every block of `buffer`, the first of which begins at its start.

    Args:
        buffer: Contiguous bytes of any type, read-only or not; not copied.
        algorithm: Key of `ALGORITHMS`.

    Example:
        >>> hex(block_crcs(b"123456789", "crc32c")[0]), hex(block_crcs(b"123456789", "crc32")[0])
        ('0xe3069283', '0xcbf43926')
        >>> len(block_crcs(bytes(BLOCK + 1))), len(block_crcs(b""))
        (2, 0)
    """
    extend = ALGORITHMS[algorithm]
    data = as_bytes(buffer)
    crcs = [extend(0, data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
    return np.array(crcs, np.uint32)


def joined_crc(crcs: NDArray[np.uint32], buffer: Buffer, algorithm: str = DEFAULT_CHECKSUM) -> int:
    """Return the checksum of `buffer` as a whole from those of its blocks.

    Only a last block that is shorter is read again.

    Args:
        crcs: `block_crcs(buffer, algorithm)`.
        buffer: As there.
        algorithm: As there.

    Example:
        >>> data = bytes(BLOCK) + b"123456789"
        >>> joined_crc(block_crcs(data, "crc32"), data, "crc32") == zlib.crc32(data)
        True
    """
    data, columns, found = as_bytes(buffer), _shift_by_a_block(algorithm), 0
    full = len(data) // BLOCK
    for crc in crcs[:full].tolist():
        shifted = 0
        for bit, column in enumerate(columns):
            if found >> bit & 1:
                shifted ^= column
        found = shifted ^ crc
    return ALGORITHMS[algorithm](found, data[full * BLOCK :]) if len(data) % BLOCK else found


@functools.cache
def _shift_by_a_block(algorithm: str) -> list[int]:
    """Return what each bit of a checksum becomes when a block of any content follows.

    A checksum is linear in the one before it: crc(a + b) = shift(crc(a)) ^ crc(b).
    """
    zeros, extend = bytes(BLOCK), ALGORITHMS[algorithm]
    alone = extend(0, zeros)
    return [extend(1 << bit, zeros) ^ alone for bit in range(32)]


def as_bytes(buffer: Buffer) -> NDArray[np.uint8]:
    """Return contiguous bytes as an array without copying them."""
    if isinstance(buffer, np.ndarray):
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(buffer, np.uint8) if len(buffer) else np.zeros(0, np.uint8)


def widen(start: int, stop: int, size: int) -> tuple[int, int]:
    """Return the smallest range of whole blocks of a file of `size` that holds `[start, stop)`.

    Example:
        >>> widen(5, BLOCK + 1, BLOCK + 9), widen(BLOCK, BLOCK + 1, BLOCK + 9)
        ((0, 1048585), (1048576, 1048585))
    """
    return start // BLOCK * BLOCK, min(size, -(-stop // BLOCK) * BLOCK)


def check_blocks(
    buffer: Buffer,
    crcs: NDArray[np.uint32],
    *,
    file: str,
    algorithm: str,
    first: int = 0,
) -> None:
    """Compare bytes with the checksums of their file.

    Args:
        buffer: Whole blocks, from block `first` on; shorter only at the end of the file.
        crcs: [blocks of the file].
        file: Its key, for the error.
        algorithm: That of the file.
        first: Number of the first block in `buffer`.

    Raises:
        CheckpointCorrupt: at least one block differs; `block` is the first.
    """
    if algorithm not in ALGORITHMS:
        raise CheckpointCorrupt(
            f"`{file}` has checksums `{algorithm}`, this program knows {', '.join(ALGORITHMS)}; "
            "read it with the version that wrote it",
            file=file,
        )
    seen = block_crcs(buffer, algorithm)
    wanted = crcs[first : first + len(seen)]
    wrong = np.flatnonzero(seen[: len(wanted)] != wanted)
    if len(wanted) < len(seen) or len(wrong):
        block = first + (int(wrong[0]) if len(wrong) else len(wanted))
        raise CheckpointCorrupt(
            f"`{file}` must have the checksums of its metadata, block {block} of {len(crcs)} "
            f"({algorithm}, 1 MiB each) differs; go back to an older checkpoint",
            file=file,
            block=block,
        )


NAME = "meta/global.bin"
"""Key of the file, relative to the folder of an attempt."""
MAGIC = b"PLNSHCKP"
VERSION = 1
MAX_BYTES = 4 << 30
"""Default bound of what `decode` may hold."""
U32 = NDArray[np.uint32]
"""Checksums."""

_DIGEST = 32
_TEXT_BYTES = 160
"""Bound of a row's Python objects in the tables of tensors and files."""
_KEY = re.compile(r"(?!\.{1,2}(/|$))[^/\\\x00-\x1f\x7f]+(/(?!\.{1,2}(/|$))[^/\\\x00-\x1f\x7f]+)*")


@dataclass
class FileTable:
    """The objects of a checkpoint.

    Example:
        >>> table = FileTable()
        >>> table.add("data/main.model/00000-0.safetensors", 2 << 20, algorithm="crc32c")
        0
        >>> table.num_blocks(0), len(table.crcs[0])
        (2, 0)
    """

    keys: list[str] = field(default_factory=list)
    """Relative to the attempt's folder."""
    sizes: list[int] = field(default_factory=list)
    """Bytes."""
    algorithms: list[str] = field(default_factory=list)
    """Checksum of each file: a key of `ALGORITHMS`."""
    crcs: list[U32] = field(default_factory=list)
    """Checksum of each block of 1 MiB; [0] while the file has not been written."""

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.keys)

    def add(self, key: str, size: int, *, algorithm: str, crcs: U32 | None = None) -> int:
        """Append a file and return its row."""
        self.keys.append(key)
        self.sizes.append(size)
        self.algorithms.append(algorithm)
        self.crcs.append(np.zeros(0, np.uint32) if crcs is None else crcs)
        return len(self.keys) - 1

    def num_blocks(self, row: int) -> int:
        """Return how many checksums a file has."""
        return -(-self.sizes[row] // BLOCK)


@dataclass(frozen=True)
class Shards:
    """The stored boxes of all tensors.

    Example:
        >>> one = np.ones((1, 1), np.int64)
        >>> Shards(one[0], one[0], one[0], one[0], one, one).num_shards
        1
    """

    tensor: I64
    """[k], row of the tensor table."""
    file: I64
    """[k], row of the file table."""
    start: I64
    """[k], first byte in the file."""
    nbytes: I64
    """[k], the box's elements in row-major order."""
    offsets: I64
    """[k, n], padded with 0."""
    lengths: I64
    """[k, n], padded with 1."""

    @property
    def num_shards(self) -> int:
        """Number of stored boxes."""
        return len(self.tensor)


@dataclass
class Metadata:
    """All of a checkpoint but its data: the content of `meta/global.bin`.

    Example:
        >>> from planish.checkpoint.format.items import TensorSpec
        >>> tensors, _ = TensorTable.from_specs([TensorSpec("main", "model", "w", "F32", (2, 2))])
        >>> zero, shape = np.zeros(1, np.int64), np.full((1, 2), 2)
        >>> shards = Shards(zero, zero, zero + 128, zero + 16, np.zeros((1, 2), np.int64), shape)
        >>> files = FileTable(["data/main.model/00000-0.safetensors"], [144], ["crc32c"], [])
        >>> metadata = Metadata({"step": 3}, tensors, files, shards)
        >>> metadata.tensor_ids["main", "model", "w"], metadata.shards_of(0).tolist()
        (0, [0])
    """

    header: dict[str, Any]
    """JSON: step, roles, layout, parents, attributes, versions. No time, no attempt, no process:
    equal states give equal bytes."""
    tensors: TensorTable
    """Every tensor of every role."""
    files: FileTable
    """Data, extra and loader objects."""
    shards: Shards
    """Which box lies where."""
    objects: dict[str, Any] = field(default_factory=dict)
    """JSON, by role: keys of the shared extra file, the ranks' own ones, the loader's."""

    @property
    def tensor_ids(self) -> dict[tuple[str, str, str], int]:
        """(role, kind, fqn) -> row of `tensors`."""
        return self.tensors.ids

    def shards_of(self, tensor: int) -> I64:
        """Return, ascending, the rows of `shards` that belong to a tensor."""
        order, bounds = self._by_tensor
        return order[bounds[tensor] : bounds[tensor + 1]]

    @functools.cached_property
    def _by_tensor(self) -> tuple[I64, I64]:
        order = np.argsort(self.shards.tensor, kind="stable").astype(np.int64)
        bounds = np.searchsorted(
            self.shards.tensor[order], np.arange(len(self.tensors) + 1)
        ).astype(np.int64)
        return order, bounds


def encode(meta: Metadata) -> bytes:
    """Return the file; equal metadata gives equal bytes.

    Raises:
        ValueError: a file lacks checksums, or `header` or `objects` is not plain JSON.
    """
    files, shards = meta.files, meta.shards
    lacking = [
        key for row, key in enumerate(files.keys) if len(files.crcs[row]) != files.num_blocks(row)
    ]
    if lacking:
        raise ValueError(
            f"every file must have a checksum for each MiB, {len(lacking)} do not, first "
            f"`{lacking[0]}`; fill `files.crcs` from the ranks' results before encoding"
        )
    head, columns = table_columns(meta.tensors)
    algorithms, algorithm = pack_choices(files.algorithms, len(files))
    key_sizes, keys = pack_texts(files.keys)
    dims = meta.tensors.dims[shards.tensor]
    columns |= {
        "file.size": np.array(files.sizes, np.int64),
        "file.algorithm": algorithm,
        "file.key_size": key_sizes,
        "file.keys": keys,
        "file.crcs": np.concatenate([np.zeros(0, np.uint32), *files.crcs]).astype(np.int64),
        "shard.tensor": shards.tensor,
        "shard.file": shards.file,
        "shard.start": shards.start,
        "shard.bytes": shards.nbytes,
        **pack_ragged("shard.offset", shards.offsets, dims),
        **pack_ragged("shard.length", shards.lengths, dims),
    }
    head |= {"algorithms": algorithms, "header": meta.header, "objects": meta.objects}
    body = pack(MAGIC, VERSION, head, columns)
    return body + hashlib.sha256(body).digest()


def decode(data: bytes, *, max_bytes: int = MAX_BYTES, file: str = NAME) -> Metadata:
    """Read an untrusted file.

    Args:
        data: The whole file.
        max_bytes: Never hold more than this, besides `data` itself.
        file: Its key, for errors.

    Raises:
        CheckpointCorrupt: not what `encode` writes, too large, or of a newer version. A tensor
            whose shards do not tile it is not found here but by `coverage.cover_faults`.
    """
    try:
        body = memoryview(data)[:-_DIGEST]
        head_size = head_bytes(body, MAGIC, VERSION)
        if head_size * JSON_GROWTH > max_bytes:
            raise PackFault(f"its head needs more than the bound of {max_bytes} bytes")
        if hashlib.sha256(body).digest() != data[-_DIGEST:]:
            raise PackFault("its SHA-256 differs")
        head, columns = unpack(body, MAGIC, VERSION)
        _refuse_beyond(max_bytes, columns, head_size)
        tensors = read_table(head, columns)
        if not set(tensors.kinds) <= set(KINDS):
            raise PackFault(
                f"a kind must be one of {', '.join(KINDS)}, got {set(tensors.kinds)!r:.80}"
            )
        sizes = np.multiply.reduce(tensors.shapes.astype(np.float64), axis=1) * tensors.item_bytes
        if (sizes >= MAX_ELEMENTS).any():
            raise PackFault("a tensor must have less than 2**62 bytes")
        files = _read_files(head, columns)
        shards = _read_shards(columns, tensors, files)
        header, objects = head.get("header"), head.get("objects")
        if not isinstance(header, dict) or not isinstance(objects, dict):
            raise PackFault("`header` and `objects` must be objects")
    except NewerVersion as fault:
        raise CheckpointCorrupt(
            f"`{file}` was written by a newer version of this program: it {fault}; upgrade",
            file=file,
        ) from None
    except PackFault as fault:
        raise CheckpointCorrupt(
            f"`{file}` is damaged: {fault}; go back to an older checkpoint", file=file
        ) from None
    return Metadata(header, tensors, files, shards, objects)


def _refuse_beyond(max_bytes: int, columns: Mapping[str, Unsigned], head_size: int) -> None:
    """Refuse what would need more than `max_bytes`, before any of it is allocated."""
    dims = column_of(columns, "tensor.dims")
    width = int(dims.max(initial=0))
    shards, tensors = len(column_of(columns, "shard.tensor")), len(dims)
    texts = len(column_of(columns, "tensor.names")) + len(column_of(columns, "file.keys"))
    # Columns of shards, and as much again for the arrays that check them.
    needed = shards * 8 * (2 * (4 + 2 * width) + 8)
    needed += tensors * (8 * (width + 8) + _TEXT_BYTES * 4) + 8 * texts
    needed += len(column_of(columns, "file.size")) * _TEXT_BYTES * 4
    needed += 24 * len(column_of(columns, "file.crcs")) + head_size * JSON_GROWTH
    if needed > max_bytes:
        raise PackFault(
            f"{shards} shards, {tensors} tensors and a head of {head_size} bytes may need {needed} "
            f"bytes, more than the bound of {max_bytes}"
        )


def _read_files(head: Mapping[str, Any], columns: Mapping[str, Unsigned]) -> FileTable:
    sizes = signed(column_of(columns, "file.size"))
    count = len(sizes)
    algorithms = unpack_choices(head.get("algorithms"), column_of(columns, "file.algorithm", count))
    keys = unpack_texts(column_of(columns, "file.key_size", count), column_of(columns, "file.keys"))
    strange = [key for key in keys if not _KEY.fullmatch(key)]
    if strange or len(set(keys)) != count:
        raise PackFault(f"keys of files must differ and stay in their folder, got {strange!r:.80}")
    blocks = sizes // BLOCK + (sizes % BLOCK > 0)
    crcs = column_of(columns, "file.crcs")
    if int(blocks.max(initial=0)) > len(crcs) or int(blocks.sum()) != len(crcs):
        raise PackFault(f"{len(crcs)} checksums do not fit the sizes of {count} files")
    bounds = [0, *np.cumsum(blocks).tolist()]
    values = crcs.astype(np.uint32)
    if crcs.dtype.itemsize == 8 and (values != crcs).any():
        raise PackFault("a checksum must have 32 bits")
    parts = [values[a:b] for a, b in itertools.pairwise(bounds)]
    return FileTable(keys, sizes.tolist(), list(algorithms), parts)


def _read_shards(columns: Mapping[str, Unsigned], tensors: TensorTable, files: FileTable) -> Shards:
    """Read the shards; each must lie in its tensor and file, and have the size of its box."""
    tensor = signed(column_of(columns, "shard.tensor"))
    if len(tensor) and int(tensor.max()) >= len(tensors):
        raise PackFault(f"shard of tensor {int(tensor.max())} of {len(tensors)}")
    file, start, nbytes = (
        signed(column_of(columns, f"shard.{name}", len(tensor)))
        for name in ("file", "start", "bytes")
    )
    dims = tensors.dims[tensor]
    offsets, lengths = (
        unpack_ragged(f"shard.{name}", columns, dims, width=tensors.max_dims, fill=fill)
        for name, fill in (("offset", 0), ("length", 1))
    )
    shards = Shards(tensor, file, start, nbytes, offsets, lengths)
    if not len(tensor):
        return shards
    if int(file.max()) >= len(files):
        raise PackFault(f"shard in file {int(file.max())} of {len(files)}")
    inside = start <= np.array(files.sizes, np.int64)[file] - nbytes
    for dim in range(tensors.max_dims):
        length = lengths[:, dim]
        inside &= (length > 0) & (offsets[:, dim] <= tensors.shapes[tensor, dim] - length)
    if not inside.all():
        raise PackFault(f"shard {int(np.argmin(inside))} lies outside of its tensor or file")
    fits = nbytes == volumes(lengths) * tensors.item_bytes[tensor]
    if not fits.all():
        raise PackFault(f"shard {int(np.argmin(fits))} has another size than its box")
    return shards
