"""What all record sets share: column specs, the Record protocol and checks of columns.

Parquet and manifests are the business of `parquet.py` and `manifest.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import numpy as np

from planish.errors import RecordError
from planish.records.ragged import Array, Ragged

Kind = Literal[
    "int64", "int32", "int8", "float32", "bool", "text", "messages", "list<int32>", "list<float32>"
]
Messages = list[dict[str, str]]
ColumnData = Array | Ragged | list[str] | list[Messages]

_HEX16 = re.compile(r"[0-9a-f]{16}")
_MAX_FAULTS = 8


@dataclass(frozen=True)
class Column:
    """One column as it lies on disk."""

    name: str
    """Name in the Parquet file."""
    kind: Kind
    """Type of a cell; no column holds nulls."""
    meaning: str
    """One line for `planish show` and for readers of the schema."""


class Record(Protocol):
    """A record set in memory: a frozen dataclass of columns."""

    SCHEMA: ClassVar[str]
    """Name and major version, e.g. `rollouts/1`."""
    COLUMNS: ClassVar[tuple[Column, ...]]
    """Columns on disk, in order."""

    @property
    def num_rows(self) -> int:
        """Number of rows on disk."""

    def columns(self) -> dict[str, ColumnData]:
        """Return the data of every column of `COLUMNS`, all with `num_rows` rows."""

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Any:
        """Build the record from the columns of all shards."""

    def group_starts(self) -> Array:
        """Return [R] bool: rows at which a row group may begin."""

    def validate(self) -> None:
        """Check every rule; raises one `RecordError` that names every fault."""


RecordT = TypeVar("RecordT", bound=Record)


def raise_faults(schema: str, faults: Sequence[str], *, remedy: str) -> None:
    """Raise one `RecordError` with every fault (at most 8 in full); return when there is none."""
    if not faults:
        return
    told = "; ".join(faults[:_MAX_FAULTS])
    more = f"; and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
    raise RecordError(f"{schema}: {told}{more}; {remedy}")


def column_faults(columns: Mapping[str, object], kinds: Mapping[str, Kind], rows: int) -> list[str]:
    """Return what is wrong with the types and lengths of `columns`."""
    faults: list[str] = []
    for name, kind in kinds.items():
        data = columns[name]
        if kind.startswith("list<"):
            dtype = kind[len("list<") : -1]
            faults += (
                data.faults(name, rows=rows, dtype=dtype)
                if isinstance(data, Ragged)
                else [f"`{name}` must be a Ragged of {dtype}, got {type(data).__name__}"]
            )
        elif kind == "text":
            faults += _text_faults(name, data, rows)
        elif kind == "messages":
            faults += _message_faults(name, data, rows)
        else:
            faults += _array_faults(name, data, rows, kind)
    return faults


def _array_faults(name: str, data: object, rows: int, dtype: str) -> list[str]:
    if not isinstance(data, np.ndarray):
        return [f"`{name}` must be an array [R] {dtype}, got {type(data).__name__}"]
    if data.dtype != np.dtype(dtype) or data.shape != (rows,):
        return [f"`{name}` must be [{rows}] {dtype}, got {list(data.shape)} {data.dtype}"]
    return []


def _text_faults(name: str, data: object, rows: int) -> list[str]:
    if not isinstance(data, list) or len(data) != rows:
        seen = len(data) if isinstance(data, list) else type(data).__name__
        return [f"`{name}` must be a list of {rows} texts, got {seen}"]
    return [
        f"`{name}` must be text that UTF-8 can hold, got {value!r:.60} in row {row}"
        for row, value in enumerate(data)
        if not is_text(value)
    ]


def _message_faults(name: str, data: object, rows: int) -> list[str]:
    if not isinstance(data, list) or len(data) != rows:
        seen = len(data) if isinstance(data, list) else type(data).__name__
        return [f"`{name}` must be a list of {rows} lists of messages, got {seen}"]
    return [
        f"`{name}` must be a list of at least one {{role, content}} of text, "
        f"got {value!r:.80} in row {row}"
        for row, value in enumerate(data)
        if not _is_conversation(value)
    ]


def _is_conversation(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict)
            and m.keys() == {"role", "content"}
            and is_text(m["role"])
            and is_text(m["content"])
            for m in value
        )
    )


def is_text(value: object) -> bool:
    """Return whether `value` is text without lone surrogates, which UTF-8 can not hold."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


def hex_id_faults(name: str, ids: Sequence[str]) -> list[str]:
    """Return the faults of a column of 16 hex digits."""
    return [
        f"`{name}` must be 16 hex digits, got {value!r:.60} in row {row}"
        for row, value in enumerate(ids)
        if not _HEX16.fullmatch(value)
    ]


def records_equal(left: Mapping[str, ColumnData], right: Mapping[str, ColumnData]) -> bool:
    """Compare columns by value; NaN equals NaN."""
    return left.keys() == right.keys() and all(
        _equal(value, right[name]) for name, value in left.items()
    )


def _equal(left: ColumnData, right: ColumnData) -> bool:
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(
            left, right, equal_nan=left.dtype.kind == "f"
        )
    return type(left) is type(right) and bool(left == right)
