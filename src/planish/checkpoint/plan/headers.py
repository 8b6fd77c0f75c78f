"""Headers of data files: their text on the rank that writes, their length alone where one plans.

A data file is a safetensors file with one entry for each stored box, named by tensor, offsets and
lengths. Planning needs only how long a header gets; the text is the work of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from planish.checkpoint.format.geometry import I64
from planish.checkpoint.format.safetensors_file import ALIGNMENT, Entry, plan_header
from planish.checkpoint.format.tables import ITEM_BYTES
from planish.checkpoint.plan.ordering import run_sums

_POWERS = 10 ** np.arange(1, 19, dtype=np.int64)


class Rows(NamedTuple):
    """The entries of one or more headers."""

    tensor: I64
    """[b], position in the names and types given beside."""
    dims: I64
    """[b], dimensions of the tensor."""
    offsets: I64
    """[b, n], padded with 0."""
    lengths: I64
    """[b, n], padded with 1."""
    start: I64
    """[b], first byte, counted from the end of the header."""
    stop: I64
    """[b], one past the last byte."""


def header(names: Sequence[str], dtypes: Sequence[str], rows: Rows) -> bytes:
    """Return the beginning of a file: length word, JSON and padding.

    Args:
        names: Of the tensors, as `safetensors_file.quote_fqn` returns them.
        dtypes: Of the tensors.
        rows: Entries in the order of their bytes.

    Example:
        >>> one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
        >>> box = Rows(zero, one, zero[:, None], 2 * one[:, None], zero, 8 * one)
        >>> header(["w"], ["F32"], box)[8:].rstrip()
        b'{"w|0|2":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    """
    entries = []
    columns = (column.tolist() for column in rows[:4])
    for tensor, dims, offsets, lengths in zip(*columns, strict=True):
        box = f"{','.join(map(str, offsets[:dims]))}|{','.join(map(str, lengths[:dims]))}"
        entries.append(Entry(f"{names[tensor]}|{box}", dtypes[tensor], tuple(lengths[:dims])))
    return plan_header(entries)[0]


def header_sizes(names: Sequence[str], dtypes: Sequence[str], rows: Rows, files: I64) -> I64:
    """Return [f]: the bytes of each header that `header` would write.

    Args:
        names: Of the tensors, as `safetensors_file.quote_fqn` returns them.
        dtypes: Of the tensors.
        rows: Entries of all files, file by file.
        files: [f], the first row of each file; no file is empty.
    """
    fixed = {dtype: _fixed(dtype) for dtype in dict.fromkeys(dtypes)}
    lengths = np.array([len(name) for name in names], np.int64)
    scalar, sided = np.array([fixed[dtype] for dtype in dtypes], np.int64).reshape(-1, 2).T
    size = np.where(rows.dims == 0, scalar[rows.tensor], sided[rows.tensor]) + 1
    size += lengths[rows.tensor] + digits(rows.start) + digits(rows.stop)
    size += 3 * np.maximum(rows.dims - 1, 0)
    for dim in range(rows.offsets.shape[1]):
        count = digits(rows.offsets[:, dim]) + 2 * digits(rows.lengths[:, dim])
        size += np.where(rows.dims > dim, count, 0)
    # The length word and two braces; one comma less than entries.
    total = run_sums(size, files) + 8 + 2 - 1
    return np.asarray(-(-total // ALIGNMENT) * ALIGNMENT)


def _fixed(dtype: str) -> tuple[int, int]:
    """Return the characters of an entry besides name and numbers: of a scalar, and of others."""
    known = len("{}") + len(f"0{ITEM_BYTES[dtype]}")
    scalar, sided = (
        len(plan_header([Entry(name, dtype, shape)])[0][8:].rstrip()) - known
        for name, shape in (("||", ()), ("|0|1", (1,)))
    )
    return scalar, sided - 3


def digits(values: I64) -> I64:
    """Return how many decimal digits non-negative numbers have.

    Example:
        >>> digits(np.array([0, 9, 10, 12345])).tolist()
        [1, 1, 2, 5]
    """
    return np.searchsorted(_POWERS, values, side="right").astype(np.int64) + 1
