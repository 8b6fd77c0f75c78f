"""Reads a tensor of a checkpoint with numpy, pyarrow and nothing of ours: the format by code.

python reader_50_lines.py ATTEMPT_FOLDER ROLE KIND FQN
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

TYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "C64": "<c8", "C128": "<c16",
    "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "<i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "<u1", "BOOL": "<b1",
}  # fmt: skip


def tensor(folder, role, kind, fqn):
    """Return a whole tensor, put together from its boxes in whatever files they lie."""
    row = pa.ipc.open_file(Path(folder) / "meta/global.bin").read_all().to_pylist()[0]
    found = [(t["role"], t["kind"], t["fqn"]) for t in row["tensors"]].index((role, kind, fqn))
    dtype = np.dtype(TYPES[row["tensors"][found]["dtype"]])
    result = np.zeros(row["tensors"][found]["shape"], dtype)
    place = 0
    for shard in row["shards"]:
        dims = len(row["tensors"][shard["tensor"]]["shape"])
        offset, length = (row[name][place : place + dims] for name in ("offset", "length"))
        place += dims
        if shard["tensor"] != found:
            continue
        path = Path(folder) / row["files"][shard["file"]]["key"]
        data = np.fromfile(path, dtype, int(np.prod(length)), "", shard["start"])
        box = tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))
        result[(..., *box)] = data.reshape(length)
    return result


if __name__ == "__main__":
    print(tensor(*sys.argv[1:5]))
