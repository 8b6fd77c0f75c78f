"""Columns as one Arrow message: what our own ranks send each other to plan."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def pack_columns(
    head: Mapping[str, Any], columns: Mapping[str, NDArray[Any] | Sequence[str]]
) -> bytes:
    """Return JSON, and columns of numbers or texts of any lengths; equal content, equal bytes."""
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


def unpack_columns(data: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Undo `pack_columns`; the columns are read-only arrays."""
    import pyarrow as pa

    from planish.base import arrow

    reader = pa.ipc.open_stream(data)
    batch = reader.read_next_batch()
    head: dict[str, Any] = json.loads(reader.schema.metadata[b"head"])
    found: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        is_text = column.values.type == pa.string()
        values = column.values.to_pylist() if is_text else arrow.to_numpy(column.values)
        found[name] = np.array(values, object) if is_text else values
    return head, found
