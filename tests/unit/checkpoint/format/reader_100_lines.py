"""Reads a tensor of a checkpoint with numpy and nothing of ours: the format, explained by code.

    python reader_100_lines.py ATTEMPT_FOLDER ROLE KIND FQN

`ATTEMPT_FOLDER/meta/global.bin` begins with the magic `PLNSHCKP`, the version (u32) and the size
of a JSON head (u32). The head lists columns [name, width, count]; they follow it without gaps as
little-endian unsigned integers. The last 32 bytes are the SHA-256 of all before.
"""

import hashlib
import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np

WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "C128": "<c16",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<b1",
}  # fmt: skip
BLOCK = 1 << 20


def read_columns(path):
    """Return the head and the columns of `global.bin`."""
    data = Path(path).read_bytes()
    if hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise SystemExit(f"{path}: the SHA-256 differs")
    magic, version, size = struct.unpack_from("<8sII", data)
    if (magic, version) != (b"PLNSHCKP", 1):
        raise SystemExit(f"{path}: not metadata of version 1")
    head = json.loads(data[16 : 16 + size])
    columns, place = {}, 16 + size
    for name, width, count in head["columns"]:
        columns[name] = np.frombuffer(data, WIDTHS[width], count, place).astype(np.int64)
        place += width * count
    return head["head"], columns


def texts(columns, sizes, pool):
    """Return texts that lie one after the other; sizes are in characters."""
    text = columns[pool].astype(np.uint8).tobytes().decode()
    ends = np.cumsum(columns[sizes]).tolist()
    return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def ragged(columns, prefix, dims):
    """Return a tuple per row; column `<prefix>.<d>` has the rows of more than d dimensions."""
    places = [iter(columns.get(f"{prefix}.{d}", [])) for d in range(max(dims, default=0))]
    return [tuple(int(next(places[d])) for d in range(count)) for count in dims]


def tensor(folder, role, kind, fqn):
    """Return a whole tensor, put together from its boxes in whatever files they lie."""
    head, columns = read_columns(Path(folder) / "meta/global.bin")
    names = texts(columns, "tensor.name_size", "tensor.names")
    keys = texts(columns, "file.key_size", "file.keys")
    dims = columns["tensor.dims"].tolist()
    row = next(
        n
        for n, name in enumerate(names)
        if name == fqn
        and head["roles"][columns["tensor.role"][n]] == role
        and head["kinds"][columns["tensor.kind"][n]] == kind
    )
    dtype = np.dtype(TYPES[head["dtypes"][columns["tensor.dtype"][row]]])
    result = np.zeros(ragged(columns, "tensor.shape", dims)[row], dtype)
    owners = columns["shard.tensor"].tolist()
    shard_dims = [dims[owner] for owner in owners]
    offsets = ragged(columns, "shard.offset", shard_dims)
    lengths = ragged(columns, "shard.length", shard_dims)
    for n in (n for n, owner in enumerate(owners) if owner == row):
        path = Path(folder) / keys[columns["shard.file"][n]]
        data = np.fromfile(path, np.uint8, columns["shard.bytes"][n], "", columns["shard.start"][n])
        place = tuple(slice(o, o + s) for o, s in zip(offsets[n], lengths[n], strict=True))
        result[(..., *place)] = data.view(dtype).reshape(lengths[n])
    return result


def check_crc32(folder):
    """Check every file whose checksums are zlib's CRC-32; return how many blocks were right."""
    head, columns = read_columns(Path(folder) / "meta/global.bin")
    block = 0
    for n, key in enumerate(texts(columns, "file.key_size", "file.keys")):
        data = (Path(folder) / key).read_bytes()
        for start in range(0, int(columns["file.size"][n]), BLOCK):
            if head["algorithms"][columns["file.algorithm"][n]] == "crc32":
                assert zlib.crc32(data[start : start + BLOCK]) == columns["file.crcs"][block], key
            block += 1
    return block


if __name__ == "__main__":
    print(tensor(*sys.argv[1:5]))
