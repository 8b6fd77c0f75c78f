"""Named columns of whole numbers as bytes: a short JSON head, then little-endian arrays.

::

    magic      8 bytes
    version    u32
    head size  u32, bytes
    head       JSON: {"columns": [[name, width, count], ...], "head": {...}}
    columns    in that order, without gaps: count x unsigned integers of width 1, 2, 4 or 8

Every column has the smallest width that holds its values, and JSON is written with sorted keys:
equal content gives equal bytes. Nothing is compressed, so no reader can be made to unpack more
than it was given. Texts are columns of width 1 (UTF-8).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planish.checkpoint.format.geometry import I64

_FIXED = struct.Struct("<8sII")
_WIDTHS = {1: "<u1", 2: "<u2", 4: "<u4", 8: "<u8"}
_LIMITS = ((1, 1 << 8), (2, 1 << 16), (4, 1 << 32), (8, 1 << 63))
MAX_HEAD_BYTES = 64 << 20
"""A longer head is refused before it is parsed."""
JSON_GROWTH = 48
"""Upper bound of memory per byte of JSON, once parsed."""

Unsigned = NDArray[np.unsignedinteger[Any]]
"""A column as it lies in the file."""


class PackFault(ValueError):
    """The bytes are not what `pack` writes; callers turn it into an error of their own."""


class NewerVersion(PackFault):
    """Written by a later version of the format."""


def pack(
    magic: bytes, version: int, head: Mapping[str, Any], columns: Mapping[str, I64 | bytes]
) -> bytes:
    """Return `head` and `columns` as bytes.

    Args:
        magic: 8 bytes.
        version: Of the format.
        head: JSON-able, finite numbers only.
        columns: Texts, or whole numbers in [0, 2**63) of any integer type, one dimension.

    Raises:
        ValueError: a negative number, or a head that JSON cannot hold.
    """
    rows, parts = [], []
    for name, column in columns.items():
        if isinstance(column, bytes):
            width, part = 1, column
        else:
            low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
            if low < 0:
                raise ValueError(f"column `{name}` must hold no negative number, got {low}")
            width = next(width for width, limit in _LIMITS if high < limit)
            part = column.astype(_WIDTHS[width]).tobytes()
        rows.append([name, width, len(part) // width])
        parts.append(part)
    text = dump_json({"columns": rows, "head": dict(head)})
    return b"".join([_FIXED.pack(magic, version, len(text)), text, *parts])


def unpack(
    data: bytes | memoryview, magic: bytes, version: int
) -> tuple[dict[str, Any], dict[str, Unsigned]]:
    """Read what `pack` wrote, without copying the columns.

    Raises:
        NewerVersion: a later version wrote the bytes.
        PackFault: anything else that `pack` would not write.
    """
    start = _FIXED.size + head_bytes(data, magic, version)
    head = load_json(bytes(data[_FIXED.size : start]))
    if not isinstance(head, dict) or head.keys() != {"columns", "head"}:
        raise PackFault("the head must have `columns` and `head`")
    if not isinstance(head["head"], dict) or not isinstance(head["columns"], list):
        raise PackFault("`columns` must be a list and `head` an object")
    columns: dict[str, Unsigned] = {}
    for row in head["columns"]:
        if not isinstance(row, list) or len(row) != 3:
            raise PackFault(f"a column must be [name, width, count], got {row!r:.80}")
        name, width, count = row
        is_new = isinstance(name, str) and name not in columns
        if not is_new or type(width) is not int or width not in _WIDTHS:
            raise PackFault(
                f"a column must have its own name and width 1, 2, 4 or 8, got {row!r:.80}"
            )
        if type(count) is not int or count < 0:
            raise PackFault(f"a count must be a whole number, got {count!r:.80}")
        if count > (len(data) - start) // width:
            raise PackFault(f"column `{name}` of {count} x {width} bytes goes over the end")
        columns[name] = np.frombuffer(data, _WIDTHS[width], count, start)
        start += count * width
    if start != len(data):
        raise PackFault(f"{len(data) - start} bytes follow the last column")
    return head["head"], columns


def column_of(columns: Mapping[str, Unsigned], name: str, count: int = -1) -> Unsigned:
    """Return a column that must be there, with `count` values unless -1.

    Raises:
        PackFault: it is not there, or has another number of values.
    """
    column = columns.get(name)
    if column is None or count not in {-1, len(column)}:
        seen = "none" if column is None else len(column)
        raise PackFault(f"column `{name}` must have {max(count, 0)} values, got {seen}")
    return column


def head_bytes(data: bytes | memoryview, magic: bytes, version: int) -> int:
    """Return the size of the JSON head, after a check of the fixed part.

    Raises:
        NewerVersion: a later version wrote the bytes.
        PackFault: `pack` would not begin so.
    """
    if len(data) < _FIXED.size:
        raise PackFault(f"must have at least {_FIXED.size} bytes, got {len(data)}")
    found, number, size = _FIXED.unpack_from(data)
    if found != magic:
        raise PackFault(f"must begin with {magic!r}, got {found!r}")
    if number > version:
        raise NewerVersion(f"has version {number}, this program reads up to {version}")
    if number != version or size > min(len(data) - _FIXED.size, MAX_HEAD_BYTES):
        raise PackFault(f"version {number} with a head of {size} bytes in {len(data)}")
    return int(size)


def signed(column: Unsigned) -> I64:
    """Return a column as int64.

    Raises:
        PackFault: a value is 2**63 or more.
    """
    result = column.astype(np.int64)
    if column.dtype.itemsize == 8 and len(result) and int(result.min()) < 0:
        raise PackFault("a number must be less than 2**63")
    return result


def pack_texts(texts: Sequence[str]) -> tuple[I64, bytes]:
    """Return the number of characters of each text, and all texts as UTF-8.

    Raises:
        ValueError: a text holds half of a surrogate pair.
    """
    return np.fromiter(map(len, texts), np.int64, len(texts)), "".join(texts).encode()


def unpack_texts(counts: Unsigned, pool: Unsigned) -> list[str]:
    """Read what `pack_texts` wrote."""
    try:
        text = pool.tobytes().decode()
    except UnicodeDecodeError as error:
        raise PackFault(f"texts must be UTF-8, got {error}") from None
    if len(counts) and int(counts.max()) > len(text):
        raise PackFault("a text goes over the end of its column")
    ends = np.cumsum(signed(counts)).tolist()
    if (ends[-1] if ends else 0) != len(text):
        raise PackFault(f"texts of {ends[-1] if ends else 0} characters in {len(text)}")
    return [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)] if ends else []


def pack_ragged(prefix: str, padded: I64, dims: I64) -> dict[str, I64]:
    """Return one column per dimension of `padded` [k, n], of the rows that have it."""
    columns = {}
    for dim in range(int(dims.max(initial=0))):
        has = dims > dim
        column = padded[:, dim]
        columns[f"{prefix}.{dim}"] = column if has.all() else column[has]
    return columns


def unpack_ragged(
    prefix: str, columns: Mapping[str, Unsigned], dims: I64, *, width: int, fill: int
) -> I64:
    """Return [k, width] int64: what `pack_ragged` wrote, missing dimensions set to `fill`."""
    result = np.full((len(dims), width), fill, np.int64)
    for dim in range(width):
        has = dims > dim
        column = columns.get(f"{prefix}.{dim}", np.zeros(0, np.uint8))
        if int(has.sum()) != len(column):
            raise PackFault(f"column `{prefix}.{dim}` must have {int(has.sum())} values")
        if has.all():
            result[:, dim] = signed(column)
        else:
            result[has, dim] = signed(column)
    return result


def pack_choices(values: Iterable[str], count: int) -> tuple[list[str], I64]:
    """Return the different values in order of first appearance, and [count] which one each is."""
    listed = list(values)
    if len(set(listed)) == 1:
        return listed[:1], np.zeros(count, np.int64)
    names = {name: number for number, name in enumerate(dict.fromkeys(listed))}
    return list(names), np.fromiter(map(names.__getitem__, listed), np.int64, count)


def unpack_choices(names: Any, column: Unsigned) -> tuple[str, ...]:
    """Read what `pack_choices` wrote."""
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise PackFault(f"names must be texts, got {names!r:.80}")
    if len(column) and int(column.max()) >= len(names):
        raise PackFault(f"choice {int(column.max())} of {len(names)} names")
    return tuple([names[number] for number in column.tolist()])


def dump_json(value: Any) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, ASCII.

    Raises:
        ValueError: not JSON-able, or a number that is not finite.
    """
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode(
            "ascii"
        )
    except (TypeError, RecursionError) as error:
        raise ValueError(f"must be plain JSON, got {error}") from error


def load_json(data: bytes) -> Any:
    """Parse JSON from an untrusted source; a name may appear once in an object.

    Raises:
        PackFault: not JSON, too deep, a name twice, a number that is not finite.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name appears twice in one object")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise ValueError(f"number {name}")

    try:
        # As text: of bytes, `json` guesses the encoding and may import a codec for it.
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise PackFault(f"must be JSON, got {error!r:.200}") from None
