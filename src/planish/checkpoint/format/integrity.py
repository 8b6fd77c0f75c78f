"""Checksums of blocks of 1 MiB, so that a part of an object can be checked without the rest.

CRC-32C in C where the package `google-crc32c` brings its C module, else zlib's CRC-32; which one
is recorded per file. Checksums find accidents, not forgeries: what must not be forged is bound by
the SHA-256 of the metadata.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from planish.base.errors import CheckpointCorrupt

Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]
BLOCK = 1 << 20
"""Bytes of a block; the last one of a file may be shorter."""

_Extend = Callable[[int, Any], int]
ALGORITHMS: dict[str, _Extend] = {
    "crc32c": google_crc32c.extend,
    "crc32": lambda crc, data: zlib.crc32(data, crc),
}
"""Name in the metadata -> checksum of bytes that follow bytes with a known checksum (0: none)."""
DEFAULT = "crc32c" if google_crc32c.implementation == "c" else "crc32"
"""The faster of the two here."""


def block_crcs(buffer: Buffer, algorithm: str = DEFAULT) -> NDArray[np.uint32]:
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


def joined_crc(crcs: NDArray[np.uint32], buffer: Buffer, algorithm: str = DEFAULT) -> int:
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
