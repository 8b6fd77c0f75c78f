"""Small Parquet files that decode to a lot, and the memory that a program takes to read them."""

import re

import pyarrow as pa
import pyarrow.parquet as pq

from tests.processes import python


def bomb(kind: str, *, decoded: int = 2 << 30) -> bytes:
    """Return a file of a few kilobytes that decodes to `decoded` bytes."""
    sink = pa.BufferOutputStream()
    if kind == "numbers":
        table = pa.table({"question": pa.nulls(1 << 22, pa.int64()).fill_null(7)})
        with pq.ParquetWriter(sink, table.schema, compression="zstd") as writer:
            for _ in range(decoded >> 25):
                writer.write_table(table)
    else:
        rows = decoded >> 20
        texts = pa.DictionaryArray.from_arrays(
            pa.nulls(rows, pa.int32()).fill_null(0), pa.array(["x" * (1 << 20)])
        )
        column = pa.StructArray.from_arrays([texts], ["content"]) if kind == "nested" else texts
        pq.write_table(pa.table({"question": column}), sink, compression="zstd")
    data: bytes = sink.getvalue().to_pybytes()
    return data


def peak_megabytes(code: str) -> tuple[int, str]:
    """Run lines in another process; return the memory it took at most, and what it printed."""
    # Not `ru_maxrss`: that begins with the memory of the process that started this one.
    ending = "import sys\nsys.stderr.write(open('/proc/self/status').read())"
    done = python("-c", f"{code}\n{ending}")
    return int(re.findall(r"VmHWM:\s+(\d+) kB", done.stderr)[0]) >> 10, done.stdout
