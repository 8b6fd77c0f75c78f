"""`meta/global.bin`: the metadata of a checkpoint as an Arrow file; checksums of its files.

Format 2 is an Arrow file (`version_2`); format 1 (`version_1`) is read as well.

The bytes depend on the content alone: no time, no random id, no machine. A reader executes nothing
in the file, and checks each size before it allocates. COMMIT has the SHA-256 of the file, so a
change is found before the file is parsed.

A checksum for each block of 1 MiB lets a reader check a part of an object without the rest. It is
CRC-32C if `google-crc32c` has its C module, else zlib's CRC-32; each file names its algorithm. The
checksums find accidents, not forgeries; the SHA-256 in COMMIT protects the metadata from these.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (global metadata file, byte metadata).
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.format import version_1
from planish.checkpoint.format.geometry import I64, MAX_ELEMENTS, volumes
from planish.checkpoint.format.items import ITEM_BYTES, KINDS, TensorTable
from planish.checkpoint.format.strict_json import Fields, FormatFault

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
BLOCK = 1 << 20
"""Bytes of a block; the last block of a file may be shorter."""

_Extend = Callable[[int, Any], int]
ALGORITHMS: dict[str, _Extend] = {
    "crc32c": google_crc32c.extend,
    "crc32": lambda crc, data: zlib.crc32(data, crc),
}
"""Name in the metadata -> function that extends a checksum (0 at the start) by further bytes."""
DEFAULT_CHECKSUM = "crc32c" if google_crc32c.implementation == "c" else "crc32"


def block_crcs(buffer: Buffer, algorithm: str = DEFAULT_CHECKSUM) -> NDArray[np.uint32]:
    """Return [blocks]: the checksum of every block of a contiguous buffer, without copying it."""
    extend = ALGORITHMS[algorithm]
    data = as_bytes(buffer)
    crcs = [extend(0, data[start : start + BLOCK]) for start in range(0, len(data), BLOCK)]
    return np.array(crcs, np.uint32)


def joined_crc(crcs: NDArray[np.uint32], buffer: Buffer, algorithm: str = DEFAULT_CHECKSUM) -> int:
    """Return the checksum of the whole `buffer`, computed from those of its blocks.

    `crcs` is `block_crcs(buffer, algorithm)`. Only the bytes of a shorter last block are read.
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
    """Return [32]: `shift` of each single bit of a checksum, for a following block of 1 MiB.

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
    """Return the smallest range of whole blocks that contains `[start, stop)`, cut at `size`."""
    return start // BLOCK * BLOCK, min(size, -(-stop // BLOCK) * BLOCK)


def check_blocks(
    buffer: Buffer,
    crcs: NDArray[np.uint32],
    *,
    file: str,
    algorithm: str,
    first: int = 0,
) -> None:
    """Compare whole blocks of a file, from block `first` on, with its checksums `crcs` [blocks].

    `CheckpointCorrupt` names the first block that differs.
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
MAX_BYTES = 4 << 30
"""Default bound of the bytes that `decode` allocates."""
U32 = NDArray[np.uint32]

_KEY = re.compile(r"(?!\.{1,2}(/|$))[^/\\\x00-\x1f\x7f]+(/(?!\.{1,2}(/|$))[^/\\\x00-\x1f\x7f]+)*")


@dataclass
class FileTable:
    """The objects of a checkpoint."""

    keys: list[str] = field(default_factory=list)
    """Keys relative to the attempt's folder."""
    sizes: list[int] = field(default_factory=list)
    algorithms: list[str] = field(default_factory=list)
    """Checksum of each file: a key of `ALGORITHMS`."""
    crcs: list[U32] = field(default_factory=list)
    """Checksum of each block of 1 MiB; [0] while the file has not been written."""

    def __len__(self) -> int:
        return len(self.keys)

    def add(self, key: str, size: int, *, algorithm: str, crcs: U32 | None = None) -> int:
        """Append a file and return its row."""
        self.keys.append(key)
        self.sizes.append(size)
        self.algorithms.append(algorithm)
        self.crcs.append(np.zeros(0, np.uint32) if crcs is None else crcs)
        return len(self.keys) - 1

    def num_blocks(self, row: int) -> int:
        """Return the number of blocks, and checksums, of a file."""
        return -(-self.sizes[row] // BLOCK)


@dataclass(frozen=True)
class Shards:
    """The stored boxes of all tensors."""

    tensor: I64
    """[k], row of the tensor table."""
    file: I64
    """[k], row of the file table."""
    start: I64
    """[k], first byte in the file."""
    nbytes: I64
    """[k], number of bytes: the box's elements in row-major order."""
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
    """All of a checkpoint but its data: the content of `meta/global.bin`."""

    header: Fields
    """JSON: step, roles, layout, parents, attributes, versions. It has no time, attempt or process,
    so that equal states give equal bytes."""
    tensors: TensorTable
    files: FileTable
    shards: Shards
    objects: Fields = field(default_factory=dict)
    """JSON: role -> keys of its small objects, as in `small_objects`."""

    @property
    def tensor_ids(self) -> dict[tuple[str, str, str], int]:
        """(role, kind, fqn) -> row of `tensors`."""
        return self.tensors.ids

    def shards_of(self, tensor: int) -> I64:
        """Return the rows of `shards` that belong to a tensor, ascending."""
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
    """Return the bytes of the file; equal metadata gives equal bytes."""
    # Import Arrow only here and in `decode`, because other users do not need it.
    from planish.checkpoint.format import version_2

    return version_2.write(meta)


def decode(data: bytes, *, max_bytes: int = MAX_BYTES, file: str = NAME) -> Metadata:
    """Read an untrusted file of format 1 or 2; `file` is its key, for errors.

    It allocates at most `max_bytes` besides `data`. It does not check that the shards of a tensor
    tile it; `coverage.cover_faults` does.

    Raises:
        CheckpointCorrupt: the file violates the format, or is too large.
    """
    try:
        if data.startswith(version_1.MAGIC):
            parts = version_1.read(data, max_bytes)
        else:
            from planish.checkpoint.format import version_2

            parts = version_2.read(data, max_bytes)
        files, shards = FileTable(*parts.pop("files")), Shards(*parts.pop("shards"))
        meta = Metadata(**parts, files=files, shards=shards)
        _check(meta)
    except FormatFault as fault:
        raise CheckpointCorrupt(
            f"`{file}` is damaged: {fault}; go back to an older checkpoint", file=file
        ) from None
    return meta


def _check(meta: Metadata) -> None:
    """Raise `FormatFault` for tables that are inconsistent or have invalid values."""
    tensors, files, shards = meta.tensors, meta.files, meta.shards
    if not isinstance(meta.header, dict) or not isinstance(meta.objects, dict):
        raise FormatFault("`header` and `objects` must be objects")
    odd = (set(tensors.kinds) - set(KINDS)) | (set(tensors.dtypes) - ITEM_BYTES.keys())
    if odd:
        raise FormatFault(f"unknown kinds or types of tensors {sorted(odd)!r:.80}")
    if len(tensors.ids) != len(tensors):
        raise FormatFault("a tensor appears twice")
    sizes = np.multiply.reduce(tensors.shapes.astype(np.float64), axis=1) * tensors.item_bytes
    if int(tensors.shapes.min(initial=0)) < 0 or (sizes >= MAX_ELEMENTS).any():
        raise FormatFault("a tensor must have less than 2**62 bytes")
    strange = [key for key in files.keys if not _KEY.fullmatch(key)]
    if strange or len(set(files.keys)) != len(files):
        raise FormatFault(
            f"keys of files must differ and stay in their folder, got {strange!r:.80}"
        )
    if any(len(crcs) != files.num_blocks(row) for row, crcs in enumerate(files.crcs)):
        raise FormatFault("a file must have a checksum for each MiB")
    owner, file = shards.tensor, shards.file
    for rows, limit in ((owner, len(tensors)), (file, len(files))):
        if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < limit:
            raise FormatFault(f"a shard of tensor or file {rows.max()} of {limit}")
    ends = np.array(files.sizes, np.int64)[file] if len(file) else file
    inside = (shards.start >= 0) & (shards.nbytes >= 0) & (shards.start <= ends - shards.nbytes)
    inside &= (shards.lengths > 0).all(axis=1) & (shards.offsets >= 0).all(axis=1)
    inside &= (shards.offsets <= tensors.shapes[owner] - shards.lengths).all(axis=1)
    fits = inside & (shards.nbytes == volumes(shards.lengths) * tensors.item_bytes[owner])
    if not fits.all():
        raise FormatFault(
            f"shard {int(np.argmin(fits))} lies outside of its tensor or file, or has another size"
        )
