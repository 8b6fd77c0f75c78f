"""Common parts of all record sets: columns, the Record protocol, checks and joins of columns.

`parquet.py` and `manifest.py` handle Parquet and manifests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar, dataclass_transform

import numpy as np

from planish.base.errors import RecordError
from planish.records.ragged import Array, Ragged, same_numbers

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
    may_be_nan: bool = False
    """Numbers may be NaN, for unknown ones."""


def column(kind: Kind, meaning: str, *, default: Any = MISSING, may_be_nan: bool = False) -> Any:
    """Return a field of a record that is a column of the same name on disk.

    `|` between types of numbers allows one of them for a whole set. `meaning` is one line for
    `planish show`. None as `default` makes the column optional.
    """
    metadata = {
        "kind": kind,
        "meaning": meaning,
        "optional": default is None,
        "may_be_nan": may_be_nan,
    }
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

    @property
    def num_rows(self) -> int:
        """Number of rows on disk: the length of the first column."""
        return len(getattr(self, self.COLUMNS[0].name))

    def columns(self) -> dict[str, ColumnData]:
        """Return the data of every column that the set has, all with `num_rows` rows."""
        every = {spec.name: getattr(self, spec.name) for spec in self.COLUMNS}
        return {name: data for name, data in every.items() if data is not None}

    @classmethod
    def empty(cls) -> Self:
        """Return a set of no rows."""
        none: dict[str, Any] = {}
        for spec in cls.COLUMNS:
            if spec.optional:
                continue
            if spec.kind.startswith("list<"):
                none[spec.name] = Ragged.empty(spec.kind[len("list<") : -1])
            else:
                none[spec.name] = [] if spec.kind == "text" else np.empty(0, dtype=spec.kind)
        return cls(**none)

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Build the record from the columns of all shards."""
        return cls(**columns)

    def group_starts(self) -> Array:
        """Return [R] bool: rows at which a row group may begin: all, or the first of each group."""
        return np.ones(self.num_rows, dtype=np.bool_)

    def check_finite(self) -> None:
        """Refuse NaN and infinity, which a model or a function of the user may have computed.

        Raises:
            RecordError: a column has such a number, and may have none.
        """
        columns = self.columns()
        for spec in self.COLUMNS:
            data = columns.get(spec.name)
            numbers = data.values if isinstance(data, Ragged) else data
            if spec.may_be_nan or not isinstance(numbers, np.ndarray):
                continue
            wrong = numbers[~np.isfinite(numbers)]
            if len(wrong):
                raise RecordError(
                    f"{self.SCHEMA}: `{spec.name}` must be finite, got {wrong[0]} "
                    f"({len(wrong)} of {len(numbers)} values); see which model or reward function "
                    "computes them"
                )

    def __eq__(self, other: object) -> bool:
        """Same columns by value; NaN equals NaN."""
        if not isinstance(other, type(self)):
            return NotImplemented
        ours, theirs = self.columns(), other.columns()
        return ours.keys() == theirs.keys() and all(
            same_numbers(data, theirs[name])
            if isinstance(data, np.ndarray)
            else data == theirs[name]
            for name, data in ours.items()
        )


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
