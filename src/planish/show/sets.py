"""Tables of record sets and of sets of files such as policies and train states."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
from rich.console import RenderableType

from planish.errors import RecordError
from planish.records import (
    PromptSet,
    Ragged,
    RewardSet,
    RolloutSet,
    TraceSet,
    ValueSet,
    WaitingSet,
    read_set,
)
from planish.records.manifest import Manifest
from planish.records.schema import Record
from planish.show.text import bytes_text, table
from planish.store import open_store

RECORDS: dict[str, type[Record]] = {
    cls.SCHEMA: cls for cls in (PromptSet, TraceSet, RolloutSet, RewardSet, ValueSet, WaitingSet)
}
"""Schemas whose rows can be printed."""

_HEADER_LIMIT_BYTES = 100 << 20


def manifest_tables(uri: str, manifest: Manifest) -> list[RenderableType]:
    """Return what the manifest itself tells."""
    total = sum(shard.bytes for shard in manifest.shards)
    facts: list[list[Any]] = [
        ["schema", manifest.schema],
        ["files", f"{len(manifest.shards)} ({bytes_text(total)})"],
        ["manifest sha256", manifest.sha256],
        *([f"parent {name}", digest] for name, digest in sorted(manifest.parents.items())),
        *([name, value] for name, value in sorted(manifest.attributes.items())),
    ]
    if manifest.schema in RECORDS:
        facts.insert(1, ["rows", manifest.num_rows])
    return [table(uri, "", "", rows=facts, width=100)]


def record_tables(uri: str, manifest: Manifest, *, rows: int) -> list[RenderableType]:
    """Return the columns of a record set, summarised, and its first rows.

    Raises:
        RecordError: the set is damaged.
    """
    record: Record = read_set(RECORDS[manifest.schema], uri, sha256=manifest.sha256)
    columns = record.columns()
    specs = [
        [spec.name, spec.kind, _summary(columns[spec.name]), spec.meaning]
        for spec in record.COLUMNS
    ]
    shown = min(rows, record.num_rows)
    tables: list[RenderableType] = [
        table("columns", "column", "type", "values", "meaning", rows=specs)
    ]
    for row in range(shown):
        cells = [[spec.name, _cell(columns[spec.name], row)] for spec in record.COLUMNS]
        tables.append(table(f"row {row} of {record.num_rows}", "", "", rows=cells, width=100))
    return tables


def _cell(data: Any, row: int) -> Any:
    if isinstance(data, Ragged):
        return data.row(row)
    value = data[row]
    return value.item() if isinstance(value, np.generic) else value


def _summary(data: Any) -> str:
    """Range of numbers, lengths of lists, the most frequent texts."""
    if isinstance(data, Ragged):
        lengths = data.lengths
        span = f"{lengths.min()}..{lengths.max()}" if len(lengths) else "none"
        return f"{len(data.values)} in rows of {span}"
    if isinstance(data, np.ndarray):
        if not len(data):
            return "none"
        if data.dtype == np.bool_:
            return f"{int(data.sum())} of {len(data)} true"
        known = data[~np.isnan(data)] if data.dtype.kind == "f" else data
        if not len(known):
            return "not measured"
        return f"{known.min():.4g}..{known.max():.4g}, mean {known.mean():.4g}"
    distinct = Counter(value if isinstance(value, str) else len(value) for value in data)
    if len(distinct) > 4:
        return f"{len(distinct)} different"
    return ", ".join(f"{value}: {count}" for value, count in distinct.most_common())


def file_tables(uri: str, manifest: Manifest) -> list[RenderableType]:
    """Return the files of a set, and what the safetensors among them hold."""
    files = [[s.name, bytes_text(s.bytes), s.sha256[:12]] for s in manifest.shards]
    tables: list[RenderableType] = [table("files", "name", "size", "sha256", rows=files)]
    tensors = [
        [s.name, *_tensor_facts(f"{uri}/{s.name}")]
        for s in manifest.shards
        if s.name.endswith(".safetensors")
    ]
    if tensors:
        tables.append(
            table("tensors", "file", "tensors", "parameters", "types", rows=tensors, width=80)
        )
    return tables


def _tensor_facts(uri: str) -> list[Any]:
    entries = [v for k, v in safetensors_header(uri).items() if k != "__metadata__"]
    try:
        parameters = sum(int(np.prod(entry["shape"], dtype=np.int64)) for entry in entries)
        types = Counter(str(entry["dtype"]) for entry in entries)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"`{uri}` must be safetensors, but its header is not ({error})") from None
    return [
        len(entries),
        parameters,
        ", ".join(f"{name}: {n}" for name, n in sorted(types.items())),
    ]


def safetensors_header(uri: str) -> dict[str, Any]:
    """Read the header of a safetensors file: two ranged reads, no tensor.

    Raises:
        RecordError: not safetensors.
    """
    store = open_store(uri)
    length = int.from_bytes(store.read(uri, 0, 8), "little")
    if not 0 < length <= _HEADER_LIMIT_BYTES:
        raise RecordError(
            f"`{uri}` must be safetensors with a header of 1..{_HEADER_LIMIT_BYTES} bytes, "
            f"got {length}"
        )
    try:
        header: Any = json.loads(store.read(uri, 8, length))
    except (ValueError, RecursionError) as error:
        raise RecordError(f"`{uri}` must be safetensors, but its header is not ({error})") from None
    if not isinstance(header, dict):
        raise RecordError(f"`{uri}` must be safetensors, but its header is no object")
    return header
