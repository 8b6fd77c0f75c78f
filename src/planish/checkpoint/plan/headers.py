"""Headers of data files: their text on the rank that writes, their length alone where one plans.

A data file is a safetensors file with one entry for each stored box, named by tensor, offsets and
lengths. Planning needs only how long a header gets; the text is the work of each rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np

from planish.checkpoint.geometry import I64
from planish.checkpoint.plan.ordering import run_sums

ALIGNMENT = 64
"""Data begin at a multiple of so many bytes; padded with spaces, which the format allows."""
_PLAIN = " !#$&'()*+,/:;<=>?@[]^`{}~"
"""Kept in names besides letters, digits and `_.-`; all else is percent-encoded, `|` and `%` too."""
_STORED = {"C128": ("F64", (2,))}
"""Types that the format cannot name: as what they are stored, and the dimensions added."""
_FIXED = len('"||":{"dtype":"","shape":[],"data_offsets":[,]}')
Size = TypeVar("Size", int, I64)
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


def quoted(fqn: str) -> str:
    """Return a tensor's name as headers spell it: printable ASCII, no `|`, no quotes.

    Example:
        >>> quoted("model.a|b")
        'model.a%7Cb'
    """
    return quote(fqn, safe=_PLAIN, errors="surrogatepass")


def header(names: Sequence[str], dtypes: Sequence[str], rows: Rows) -> bytes:
    """Return the beginning of a file: length word, JSON and padding.

    Args:
        names: Of the tensors, as `quoted` returns them.
        dtypes: Of the tensors.
        rows: Entries in the order of their bytes.

    Example:
        >>> one, zero = np.ones(1, np.int64), np.zeros(1, np.int64)
        >>> box = Rows(zero, one, zero[:, None], 2 * one[:, None], zero, 8 * one)
        >>> header(["w"], ["F32"], box)[8:].rstrip()
        b'{"w|0|2":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    """
    columns = (column.tolist() for column in rows)
    texts = []
    for tensor, dims, offsets, lengths, start, stop in zip(*columns, strict=True):
        dtype, more = _STORED.get(dtypes[tensor], (dtypes[tensor], ()))
        shown = ",".join(map(str, lengths[:dims]))
        shape = ",".join(map(str, (*lengths[:dims], *more)))
        name = f"{names[tensor]}|{','.join(map(str, offsets[:dims]))}|{shown}"
        texts.append(
            f'"{name}":{{"dtype":"{dtype}","shape":[{shape}],"data_offsets":[{start},{stop}]}}'
        )
    text = ("{" + ",".join(texts) + "}").encode("ascii")
    size = _padded(8 + len(text))
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8)


def header_sizes(names: Sequence[str], dtypes: Sequence[str], rows: Rows, files: I64) -> I64:
    """Return [f]: the bytes of each header that `header` would write.

    Args:
        names: Of the tensors, as `quoted` returns them.
        dtypes: Of the tensors.
        rows: Entries of all files, file by file.
        files: [f], the first row of each file; no file is empty.
    """
    stored = [_STORED.get(dtype, (dtype, ())) for dtype in dtypes]
    fixed = np.array(
        [
            len(name) + len(dtype) + sum(1 + len(str(side)) for side in more)
            for name, (dtype, more) in zip(names, stored, strict=True)
        ],
        np.int64,
    )
    scalars = np.array([bool(more) for _, more in stored], bool)
    size = _FIXED + 1 + fixed[rows.tensor] + digits(rows.start) + digits(rows.stop)
    size += 3 * np.maximum(rows.dims - 1, 0) - (scalars[rows.tensor] & (rows.dims == 0))
    for dim in range(rows.offsets.shape[1]):
        count = digits(rows.offsets[:, dim]) + 2 * digits(rows.lengths[:, dim])
        size += np.where(rows.dims > dim, count, 0)
    return _padded(run_sums(size, files) + 8 + 1)


def digits(values: I64) -> I64:
    """Return how many decimal digits non-negative numbers have.

    Example:
        >>> digits(np.array([0, 9, 10, 12345])).tolist()
        [1, 1, 2, 5]
    """
    return np.searchsorted(_POWERS, values, side="right").astype(np.int64) + 1


def _padded(size: Size) -> Size:
    return -(-size // ALIGNMENT) * ALIGNMENT
