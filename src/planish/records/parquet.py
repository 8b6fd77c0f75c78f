"""Columns to the bytes of a Parquet file and back; equal columns give equal bytes.

One list column is exactly one `Ragged`. This module knows neither stores nor manifests.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from planish.base import arrow
from planish.base.errors import RecordError
from planish.base.thrift import read_value
from planish.records.ragged import Array, Ragged
from planish.records.schema import Column, ColumnData, Kind, limit_bytes

ROW_GROUP_CELLS = 1 << 20
"""A row group ends with the first whole group that brings it to this many numbers."""

_MAX_TEXT_BYTES = 1 << 31
_BATCH_ROWS = 16_384
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
"""Bytes of one value by physical type of Parquet."""
_SCALARS: dict[str, pa.DataType] = {
    "int64": pa.int64(),
    "int32": pa.int32(),
    "int16": pa.int16(),
    "int8": pa.int8(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.string(),
}
_ENTRIES = pa.dictionary(pa.int32(), pa.string())
"""Type in which texts are read."""
_LIGHT = ("text", "bool", "float32", "float64")
"""Kinds of columns that a set may lack and that every reader gets."""
_DICTIONARY = {"text": "{}", "list<int8|int16>": "{}.list.element"}
"""Kinds with few different values in many rows, to the path of their values in Parquet."""


def _list_of(value: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("element", value, nullable=False))


def arrow_type(kind: Kind, dtype: str = "", text: pa.DataType = _SCALARS["text"]) -> pa.DataType:
    """Return the Arrow type of a cell of `kind`; `dtype` chooses among its numbers.

    `text` is the type of texts.
    """
    if kind == "text":
        return text
    if kind == "messages":
        fields = [pa.field(name, text, nullable=False) for name in ("role", "content")]
        return _list_of(pa.struct(fields))
    if kind.startswith("list<"):
        dtypes = kind[len("list<") : -1].split("|")
        return _list_of(_SCALARS[dtype if dtype in dtypes else dtypes[0]])
    return _SCALARS[kind]


def _dtype(data: ColumnData) -> str:
    return str(data.values.dtype) if isinstance(data, Ragged) else ""


def row_group_bounds(columns: Mapping[str, ColumnData], starts: Array) -> list[int]:
    """Return the rows at which row groups begin, and the number of rows at the end.

    Args:
        columns: the data of the columns, R rows each.
        starts: [R] bool, rows at which a row group may begin.

    Example:
        >>> row_group_bounds({"n": np.zeros(3, np.int8)}, np.array([True, True, False]))
        [0, 3]
    """
    cells = np.zeros(len(starts), dtype=np.int64)
    for data in columns.values():
        cells += data.lengths if isinstance(data, Ragged) else 1
    total = np.cumsum(cells)
    candidates = np.flatnonzero(starts)
    bounds, done = [0], 0
    while True:
        # The first allowed row whose predecessors bring the row group to its size.
        full = candidates[candidates > bounds[-1]]
        full = full[total[full - 1] - done >= ROW_GROUP_CELLS] if len(full) else full
        if not len(full):
            break
        bounds.append(int(full[0]))
        done = int(total[full[0] - 1])
    return [*bounds, len(starts)] if len(starts) else [0]


def encode(columns: Mapping[str, ColumnData], specs: Sequence[Column], bounds: list[int]) -> bytes:
    """Return the bytes of one Parquet file; this function fixes every writer setting.

    Optional columns without data are left out. `bounds` are the first rows of the row groups of
    this file, then the row after the last.
    """
    sink = pa.BufferOutputStream()
    specs = [spec for spec in specs if spec.name in columns]
    kinds = [(c.name, arrow_type(c.kind, _dtype(columns[c.name]))) for c in specs]
    schema = pa.schema([pa.field(name, kind, nullable=False) for name, kind in kinds])
    writer = pq.ParquetWriter(
        sink,
        schema,
        version="2.6",
        data_page_version="1.0",
        compression="zstd",
        compression_level=3,
        use_dictionary=[_DICTIONARY[c.kind].format(c.name) for c in specs if c.kind in _DICTIONARY],
        write_statistics=False,
        use_byte_stream_split=False,
        use_compliant_nested_type=True,
        store_schema=False,
        write_batch_size=1024,
        data_page_size=1 << 20,
        dictionary_pagesize_limit=1 << 20,
        max_rows_per_page=20_000,
        write_page_index=False,
        write_page_checksum=False,
        use_content_defined_chunking=False,
    )
    with writer:
        for start, stop in itertools.pairwise(bounds):
            arrays = [_to_arrow(columns[c.name], c.kind, start, stop) for c in specs]
            table = pa.Table.from_arrays(arrays, schema=schema)
            writer.write_table(table, row_group_size=max(1, stop - start))
    data: bytes = sink.getvalue().to_pybytes()
    return data


def _to_arrow(data: Any, kind: Kind, start: int, stop: int) -> pa.Array:
    if isinstance(data, Ragged):
        rows = data.slice(start, stop)
        cells = arrow.numbers(rows.values)
        return arrow.lists(rows.offsets, cells, arrow_type(kind, _dtype(data)))
    part = data[start:stop]
    if kind == "text":
        return _texts(part)
    if kind == "messages":
        flat = [message for messages in part for message in messages]
        fields = [_texts([m["role"] for m in flat]), _texts([m["content"] for m in flat])]
        offsets = np.cumsum([0, *(len(messages) for messages in part)], dtype=np.int64)
        cells = pa.StructArray.from_arrays(fields, fields=list(arrow_type(kind).value_type))
        return arrow.lists(offsets, cells, arrow_type(kind))
    return arrow.numbers(part)


def _texts(values: Sequence[str]) -> pa.Array:
    data = [value.encode("utf-8") for value in values]
    if (num_bytes := sum(map(len, data))) >= _MAX_TEXT_BYTES:
        raise RecordError(
            f"the text of one row group must be under {_MAX_TEXT_BYTES} bytes, got {num_bytes}; "
            "shorten the responses"
        )
    return arrow.texts(data)


def decode_pieces(
    data: bytes, specs: Sequence[Column], *, name: str, with_optional: bool = True
) -> Iterator[dict[str, ColumnData]]:
    """Read a file of `encode` piece by piece; an empty file gives one piece of no rows.

    `with_optional` decodes optional lists too; `name` stands in errors.

    Raises:
        RecordError: damaged, or with other columns.
    """
    asked = [s for s in specs if with_optional or not s.optional or s.kind in _LIGHT]
    for batch in read_batches(data, name=name, columns=[spec.name for spec in asked]):
        found = [s for s in asked if not s.optional or s.name in batch.schema.names]
        for spec in found:
            _check_field(batch.schema, spec, name)
        yield {spec.name: _from_arrow(batch.column(spec.name), spec) for spec in found}


def _check_field(schema: pa.Schema, spec: Column, name: str) -> None:
    """Refuse a column that `encode` would not write, for example with nulls or other numbers."""
    place = schema.get_field_index(spec.name)
    dtypes = spec.kind.removeprefix("list<").rstrip(">").split("|")
    kinds = [arrow_type(spec.kind, dtype, _ENTRIES) for dtype in dtypes]
    if place < 0 or schema.field(place).nullable or schema.field(place).type not in kinds:
        raise RecordError(
            f"`{name}` must have the column `{spec.name}` as {kinds[0]} without nulls, got others "
            f"({schema!s:.200}); write the set again"
        )


def read_batches(
    source: bytes | Path, *, name: str, columns: list[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Read a Parquet file of unknown origin without decoding more than `limit_bytes` of its size.

    Texts are dictionary-encoded: memory has equal texts once, and their length is known before any
    is built. An empty file gives one batch of no rows.

    `name` stands in errors. None for `columns` decodes all columns, else those that exist.

    Raises:
        RecordError: no valid Parquet file, or larger than the limit.
    """
    try:
        opened = pa.BufferReader(source) if isinstance(source, bytes) else pa.OSFile(str(source))
        found = chunk_sizes(opened)
        plain = list(pq.ParquetFile(opened).schema)
        # Of all values, texts counted as indices, or of all pages.
        widths = [_width(column) or 4 for column in plain]
        values = sum(number * widths[place] for place, number, _ in found)
        total = max(values, sum(pages for *_, pages in found))
        _check_size(total, opened.size(), name)
        texts = [column.path for column in plain if _width(column) is None]
        file, batch = pq.ParquetFile(opened, read_dictionary=texts), None
        # One row group at a time: a batch would else be filled from several. No threads: one of
        # Arrow's that drops the last hold on the bytes while Python ends aborts the process.
        for group in range(file.metadata.num_row_groups):
            for batch in file.iter_batches(_BATCH_ROWS, [group], columns, use_threads=False):
                batch.validate(full=True)
                total += sum(_text_bytes(column) for column in batch.columns)
                _check_size(total, opened.size(), name)
                yield batch
        if batch is None:
            yield pa.RecordBatch.from_pylist([], schema=file.schema_arrow)
    except (pa.ArrowException, OSError, UnicodeError, IndexError) as error:
        raise RecordError(
            f"`{name}` must be a Parquet file, got {error!s:.200}; copy or write it again"
        ) from None


def _check_size(total: int, size: int, name: str) -> None:
    if total > limit_bytes(size):
        raise RecordError(
            f"`{name}` has {size} bytes and must decode to at most {limit_bytes(size)} (64 times "
            f"its length, and 512 MiB in any case), got {total} or more; write it in several files"
        )


def chunk_sizes(opened: Any) -> list[tuple[int, int, int]]:
    """Return the sizes of each column's chunks from the footer of an open file.

    Arrow's own method ends the process if an entry contradicts the schema.

    Returns:
        Place of the column in the schema, its values, and the bytes of its pages once decompressed.

    Raises:
        ArrowInvalid: the footer is damaged.

    Source: the Parquet format, `FileMetaData`, in the compact protocol of Thrift.
    """
    end = max(opened.size() - 8, 0)
    length = int.from_bytes(opened.read_at(4, end), "little")
    try:
        groups = read_value(iter(opened.read_at(min(length, end), max(end - length, 0))))[4]
        columns = [pair for group in groups for pair in enumerate(group[1])]
        return [(place, column[3][5], column[3][6]) for place, column in columns]
    except (LookupError, TypeError, StopIteration, RecursionError) as error:
        raise pa.ArrowInvalid(f"a damaged footer ({error!r})") from None


def _width(column: Any) -> int | None:
    """Return the bytes of one value of a Parquet column; None for texts."""
    if column.physical_type == "FIXED_LEN_BYTE_ARRAY":
        return int(column.length)
    return _WIDTHS.get(column.physical_type)


def _text_bytes(array: pa.Array) -> int:
    """Return the bytes of all texts in an array; a repeated text counts each time."""
    kind = array.type
    if pa.types.is_dictionary(kind):
        # Binary has the buffers of text, and no faults of encoding.
        entries = array.dictionary
        ends = np.frombuffer(entries.buffers()[1] or b"\0" * 4, np.int32)
        lengths = np.diff(ends[entries.offset : entries.offset + len(entries) + 1])
        used = array.indices.drop_null()
        return int(lengths[arrow.to_numpy(used)].sum(dtype=np.int64)) if len(used) else 0
    if pa.types.is_struct(kind) or pa.types.is_nested(kind):
        inner = array.flatten()
        return sum(_text_bytes(part) for part in (inner if isinstance(inner, list) else [inner]))
    return 0


def _from_arrow(array: pa.Array, spec: Column) -> Any:
    if spec.kind.startswith("list<"):
        offsets = arrow.to_numpy(array.offsets).astype(np.int64)
        # Copies are writable and keep no file in memory.
        return Ragged(arrow.to_numpy(array.flatten()).copy(), offsets - offsets[0])
    if spec.kind == "text":
        entries = array.dictionary.to_pylist()
        return [entries[index] for index in arrow.to_numpy(array.indices).tolist()]
    if spec.kind == "messages":
        return array.to_pylist()
    return arrow.to_numpy(array).copy()
