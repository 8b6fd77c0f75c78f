"""Common parts of all record sets: columns, the Record protocol, checks and joins of columns.

`parquet.py` and `manifest.py` handle Parquet and manifests.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, dataclass_transform

import numpy as np

from planish.base.errors import RecordError
from planish.records.ragged import Array, Ragged

Kind = Literal[
    "int64",
    "int32",
    "int8",
    "float32",
    "float64",
    "bool",
    "text",
    "messages",
    "list<int32>",
    "list<float32>",
    "list<int8|int16>",
]
Messages = list[dict[str, str]]
ColumnData = Array | Ragged | list[str] | list[Messages]

RecordT = TypeVar("RecordT", bound="Record")

_HEX16 = re.compile(r"[0-9a-f]{16}")
_MAX_FAULTS = 8


def limit_bytes(size: int) -> int:
    """Return the most bytes that a file of `size` bytes may decode to."""
    return max(512 << 20, 64 * size)


@dataclass(frozen=True)
class Column:
    """One column on disk."""

    name: str
    """Name in the Parquet file."""
    kind: Kind
    meaning: str
    """One line for `planish show` and for readers of the schema."""
    optional: bool = False
    """A set may lack it: None in memory, no column on disk."""


def column(kind: Kind, meaning: str, *, default: Any = MISSING) -> Any:
    """Return a field of a record that is a column of the same name on disk.

    `|` between types of numbers allows one of them for a whole set. `meaning` is one line for
    `planish show`. None as `default` makes the column optional.
    """
    metadata = {"kind": kind, "meaning": meaning, "optional": default is None}
    return field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(column,))
def record(cls: type[RecordT]) -> type[RecordT]:
    """Make a frozen dataclass of a class whose fields are columns, and fill in its `COLUMNS`."""
    made: Any = dataclass(frozen=True, eq=False)(cls)
    made.COLUMNS = tuple(Column(name=f.name, **f.metadata) for f in fields(made))
    return cls


class Record(Protocol):
    """A record set in memory; see `record`."""

    SCHEMA: ClassVar[str]
    """Name and major version, e.g. `rollouts/2`."""
    OLDER: ClassVar[tuple[str, ...]] = ()
    """Versions before it that can be read too: they lack columns that a set may lack."""
    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    """Columns on disk, in order: one for each field."""
    REMEDY: ClassVar[str]
    """Remedy for a broken rule: who writes this set."""

    @property
    def num_rows(self) -> int:
        """Number of rows on disk: the length of the first column."""
        return len(getattr(self, self.COLUMNS[0].name))

    def columns(self) -> dict[str, ColumnData]:
        """Return the data of every column that the set has, all with `num_rows` rows."""
        every = {spec.name: getattr(self, spec.name) for spec in self.COLUMNS}
        return {name: data for name, data in every.items() if data is not None}

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build the record from the columns of all shards."""
        return cls(**columns)

    def group_starts(self) -> Array:
        """Return [R] bool: rows at which a row group may begin: all, or the first of each group."""
        return np.ones(self.num_rows, dtype=np.bool_)

    def validate(self) -> None:
        """Check every rule of the schema.

        Raises:
            RecordError: a rule is broken; the message has every fault, at most 8 of them in full.
        """
        faults = self.form_faults() or self.value_faults()
        if faults:
            first = "; ".join(faults[:_MAX_FAULTS])
            left = len(faults) - _MAX_FAULTS
            more = f"; and {left} more" if left > 0 else ""
            raise RecordError(f"{self.SCHEMA}: {first}{more}; {self.REMEDY}")

    def form_faults(self) -> list[str]:
        """Return what is wrong with types and lengths."""
        columns, rows = self.columns(), self.num_rows
        return [
            fault
            for spec in self.COLUMNS
            if spec.name in columns
            for fault in column_faults(spec.name, spec.kind, columns[spec.name], rows)
        ]

    def value_faults(self) -> list[str]:
        """Return what is wrong with values of the right form."""

    def __eq__(self, other: object) -> bool:
        """Same columns by value; NaN equals NaN."""
        if not isinstance(other, type(self)):
            return NotImplemented
        ours, theirs = self.columns(), other.columns()
        if ours.keys() != theirs.keys():
            return False
        for name, left in ours.items():
            right = theirs[name]
            if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
                is_float = left.dtype.kind == "f"
                if left.dtype != right.dtype or not np.array_equal(left, right, equal_nan=is_float):
                    return False
            elif type(left) is not type(right) or left != right:
                return False
        return True


def column_faults(name: str, kind: Kind, data: object, rows: int) -> list[str]:
    """Return what is wrong with the type and the length of the data of one column."""
    if kind.startswith("list<"):
        dtypes = kind[len("list<") : -1].split("|")
        if not isinstance(data, Ragged):
            return [f"`{name}` must be a Ragged of {dtypes[0]}, got {type(data).__name__}"]
        found = str(data.values.dtype)
        return data.faults(name, rows=rows, dtype=found if found in dtypes else dtypes[0])
    if kind in ("text", "messages"):
        cells = "texts" if kind == "text" else "lists of messages"
        if not isinstance(data, list) or len(data) != rows:
            seen = len(data) if isinstance(data, list) else type(data).__name__
            return [f"`{name}` must be a list of {rows} {cells}, got {seen}"]
        is_sound, rule = _CELL_RULES[kind]
        wrong = np.array([not is_sound(value) for value in data], np.bool_)
        return row_faults(f"`{name}` must be {rule}", wrong, data)
    if not isinstance(data, np.ndarray):
        return [f"`{name}` must be an array [R] {kind}, got {type(data).__name__}"]
    if data.dtype != np.dtype(kind) or data.shape != (rows,):
        return [f"`{name}` must be [{rows}] {kind}, got {list(data.shape)} {data.dtype}"]
    return []


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


_CELL_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "text": (is_text, "text that UTF-8 can hold"),
    "messages": (_is_conversation, "a list of at least one {role, content} of text"),
}
"""Kind of a column to the check of a cell, and its rule in words."""


def row_faults(rule: str, wrong: Array, *seen: Any) -> list[str]:
    """Return a fault if rows break a rule, with the values of the first such row.

    Args:
        rule: such as "`reward` must be finite".
        wrong: [R] bool.
        seen: [R] each: values that the fault shows.
    """
    rows = np.flatnonzero(wrong)
    if not len(rows):
        return []
    cells = [column[rows[0]] for column in seen]
    plain = [cell.item() if isinstance(cell, np.generic) else cell for cell in cells]
    values = " for ".join(f"{cell!r:.80}" for cell in plain)
    return [f"{rule}, got {values} in row {rows[0]} ({len(rows)} rows)"]


def value_faults(rule: str, wrong: Array, values: Array) -> list[str]:
    """Return a fault if values of lists break a rule, with the first such value."""
    bad = values[wrong]
    return [f"{rule}, got {bad[0]} ({len(bad)} values)"] if len(bad) else []


def prompt_id_faults(ids: Sequence[str]) -> list[str]:
    """Return the faults of the column `prompt_id`."""
    wrong = np.array([not _HEX16.fullmatch(value) for value in ids], np.bool_)
    return row_faults("`prompt_id` must be 16 hex digits", wrong, ids)


def take_rows(data: Any, rows: Array) -> Any:
    """Return the cells `rows` [K] int of one column, in that order."""
    if isinstance(data, list):
        return [data[row] for row in rows]
    return data.take(rows) if isinstance(data, Ragged) else data[rows]


def join(parts: Sequence[Mapping[str, Any]], specs: Sequence[Column]) -> dict[str, Any]:
    """Put the rows of several sets of columns one after another; at least one part.

    An optional column is in all parts or in none.
    """
    joined: dict[str, Any] = {}
    for spec in specs:
        if spec.optional and parts[0].get(spec.name) is None:
            continue
        columns = [part[spec.name] for part in parts]
        if spec.kind.startswith("list<"):
            joined[spec.name] = Ragged.concat(columns)
        elif spec.kind in {"text", "messages"}:
            joined[spec.name] = [value for column in columns for value in column]
        else:
            joined[spec.name] = np.concatenate(columns)
    return joined
