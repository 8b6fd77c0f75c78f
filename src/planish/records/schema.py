"""What all record sets share: column specs, the Record protocol, checks and joins of columns.

Parquet and manifests are the business of `parquet.py` and `manifest.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

import numpy as np

from planish.base.errors import RecordError
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
    """A record set in memory: a frozen dataclass with a field for each column."""

    SCHEMA: ClassVar[str]
    """Name and major version, e.g. `rollouts/1`."""
    COLUMNS: ClassVar[tuple[Column, ...]]
    """Columns on disk, in order."""
    REMEDY: ClassVar[str]
    """What to do about a broken rule: who writes this set."""

    @property
    def num_rows(self) -> int:
        """Number of rows on disk."""

    def columns(self) -> dict[str, ColumnData]:
        """Return the data of every column of `COLUMNS`, all with `num_rows` rows."""
        return {column.name: getattr(self, column.name) for column in self.COLUMNS}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build the record from the columns of all shards."""
        return cls(**columns)

    def group_starts(self) -> Array:
        """Return [R] bool: rows at which a row group may begin; every row but for groups."""
        return np.ones(self.num_rows, dtype=np.bool_)

    def validate(self) -> None:
        """Check every rule of the schema.

        Raises:
            RecordError: with every fault.
        """
        faults = self.form_faults() or self.value_faults()
        raise_faults(self.SCHEMA, faults, remedy=self.REMEDY)

    def form_faults(self) -> list[str]:
        """Return what is wrong with types and lengths."""
        kinds = {column.name: column.kind for column in self.COLUMNS}
        return column_faults(self.columns(), kinds, self.num_rows)

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""

    def __eq__(self, other: object) -> bool:
        """Same columns by value; NaN equals NaN."""
        if not isinstance(other, type(self)):
            return NotImplemented
        return records_equal(self.columns(), other.columns())


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


def take_rows(data: Any, rows: Array) -> Any:
    """Return the cells `rows` [K] int of one column, in that order."""
    if isinstance(data, list):
        return [data[row] for row in rows]
    return data.take(rows) if isinstance(data, Ragged) else data[rows]


def join(parts: Sequence[Mapping[str, Any]], specs: Sequence[Column]) -> dict[str, Any]:
    """Put the rows of several sets of columns one after another; at least one part."""
    joined: dict[str, Any] = {}
    for spec in specs:
        columns = [part[spec.name] for part in parts]
        if spec.kind.startswith("list<"):
            joined[spec.name] = Ragged.concat(columns)
        elif spec.kind in {"text", "messages"}:
            joined[spec.name] = [value for column in columns for value in column]
        else:
            joined[spec.name] = np.concatenate(columns)
    return joined


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
