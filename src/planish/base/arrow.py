"""Conversion between numpy arrays and Arrow arrays by their buffers.

`pa.array` and `to_numpy` import pandas if it is installed, which takes a quarter of a second in
each process. This module does not need them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

Array = NDArray[Any]

_DTYPES = {
    pa.from_numpy_dtype(dtype): np.dtype(dtype)
    for dtype in ("int64", "int32", "int16", "int8", "uint32", "uint8", "float32", "float64")
}


def numbers(values: Array) -> pa.Array:
    """Return an array of numbers or of bool; numbers share their memory with it."""
    is_bool = values.dtype == np.bool_
    packed = np.packbits(values, bitorder="little") if is_bool else np.ascontiguousarray(values)
    kind = pa.bool_() if is_bool else pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(packed)])


def texts(values: Sequence[bytes]) -> pa.Array:
    """Return an array of texts from their UTF-8 bytes, which must be shorter than 2 GiB in
    total.
    """
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def lists(offsets: Array, values: pa.Array, kind: pa.DataType | None = None) -> pa.Array:
    """Return an array of lists.

    Args:
        offsets: [lists + 1], index in `values` at which each list begins, and the end of the last
            list.
        values: the items of all lists.
        kind: type of the lists; None: plain lists of the type of `values`.
    """
    buffer = pa.py_buffer(offsets.astype(np.int32))
    kind = kind or pa.list_(values.type)
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, buffer], children=[values])


def to_numpy(array: pa.Array) -> Array:
    """Return the numbers of an array without nulls, as a read-only view; bool values are copied."""
    buffer = array.buffers()[1]
    first, last = array.offset, array.offset + len(array)
    if array.type == pa.bool_():
        bits = np.frombuffer(buffer, np.uint8) if buffer else np.empty(0, np.uint8)
        return np.unpackbits(bits, bitorder="little")[first:last].astype(np.bool_)
    dtype = _DTYPES[array.type]
    return np.frombuffer(buffer, dtype)[first:last] if buffer else np.empty(0, dtype)
