"""Tables of record sets and of sets of files such as policies and train states."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import RenderableType

from planish import store
from planish.base.errors import RecordError
from planish.base.text import bytes_text
from planish.models.headers import read_headers
from planish.records import PromptSet, Ragged, RewardSet, RolloutSet, TraceSet, ValueSet, WaitingSet
from planish.records.io import iter_set
from planish.records.manifest import Manifest
from planish.records.schema import Record
from planish.show.text import table
from planish.store.sources import SourceFolder

RECORDS: dict[str, type[Record]] = {
    schema: cls
    for cls in (PromptSet, TraceSet, RolloutSet, RewardSet, ValueSet, WaitingSet)
    for schema in (cls.SCHEMA, *cls.OLDER)
}

PARQUET_MAGIC = b"PAR1"

_SHOWN_TEXTS = 4
"""Most different texts of a column that are shown."""
_COUNTED_TEXTS = 1_000_000
"""Most different texts of a column that are counted."""


def manifest_tables(uri: str, manifest: Manifest) -> list[RenderableType]:
    """Return schema, files, parents and attributes of a set."""
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
    """Return a summary of the columns of a record set, and its first rows."""
    cls = RECORDS[manifest.schema]
    summaries: dict[str, _Numbers | _Texts] = {}
    cells: list[list[Any]] = []
    for piece in iter_set(cls, uri, sha256=manifest.sha256):
        there = [spec for spec in cls.COLUMNS if spec.name in piece]
        for spec in there:
            kind = _Texts if spec.kind in {"text", "messages"} else _Numbers
            summaries.setdefault(spec.name, kind()).add(piece[spec.name])
        for row in range(min(rows - len(cells), len(piece[cls.COLUMNS[0].name]))):
            cells.append([])
            for spec in there:
                column = piece[spec.name]
                value = column.row(row).copy() if isinstance(column, Ragged) else column[row]
                value = value.item() if isinstance(value, np.generic) else value
                cells[-1].append([spec.name, value])
    specs = [[c.name, c.kind, summaries[c.name].text(), c.meaning] for c in there]
    return [
        table("columns", "column", "type", "values", "meaning", rows=specs),
        *(
            table(f"row {row} of {manifest.num_rows}", "", "", rows=values, width=100)
            for row, values in enumerate(cells)
        ),
    ]


class _Numbers:
    """Range of a column's numbers, or of its lists' lengths; the rows come in pieces."""

    def __init__(self) -> None:
        self._rows = self._known = 0
        self._total, self._low, self._high = 0.0, math.inf, -math.inf
        self._kind = ""

    def add(self, data: Any) -> None:
        if isinstance(data, Ragged):
            self._kind, numbers = "list", data.lengths
        else:
            self._kind, numbers = data.dtype.kind, data
        self._rows += len(numbers)
        known = numbers[~np.isnan(numbers)] if self._kind == "f" else numbers
        self._known += len(known)
        if len(known):
            self._total += float(known.sum(dtype=np.float64))
            self._low = min(self._low, known.min().item())
            self._high = max(self._high, known.max().item())

    def text(self) -> str:
        if self._kind == "list":
            span = f"{self._low}..{self._high}" if self._rows else "none"
            return f"{self._total:.0f} in rows of {span}"
        if not self._rows:
            return "none"
        if self._kind == "b":
            return f"{self._total:.0f} of {self._rows} true"
        if not self._known:
            return "not measured"
        mean = self._total / self._known
        return f"{self._low:.4g}..{self._high:.4g}, mean {mean:.4g}"


class _Texts:
    """Most frequent texts of a column, or numbers of messages."""

    def __init__(self) -> None:
        self._seen: Counter[str | int] = Counter()
        self._hashes: set[int] = set()

    def add(self, data: Any) -> None:
        values = [value if isinstance(value, str) else len(value) for value in data]
        if len(self._seen) <= _SHOWN_TEXTS:
            self._seen.update(values)
        if len(self._hashes) <= _COUNTED_TEXTS:
            self._hashes.update(map(hash, values))
        if len(self._seen) > _SHOWN_TEXTS:
            self._seen = Counter(itertools.islice(self._seen, _SHOWN_TEXTS + 1))

    def text(self) -> str:
        if len(self._seen) > _SHOWN_TEXTS:
            over = "more than " if len(self._hashes) > _COUNTED_TEXTS else ""
            return f"{over}{min(len(self._hashes), _COUNTED_TEXTS)} different"
        return ", ".join(f"{value}: {count}" for value, count in self._seen.most_common())


def parquet_tables(uri: str, *, rows: int) -> list[RenderableType]:
    """Return the columns of any Parquet file, and its first rows."""
    from planish.records.parquet import read_batches

    with tempfile.TemporaryDirectory(prefix="planish-show-") as folder:
        path = store.local_path(uri)
        if path is None:
            path = Path(folder) / "file.parquet"
            store.read_file(uri, path)
        cells: list[dict[str, Any]] = []
        num_rows = 0
        for batch in read_batches(path, name=uri):
            schema, num_rows = batch.schema, num_rows + batch.num_rows
            cells += batch.slice(0, max(0, rows - len(cells))).to_pylist()
    columns: list[list[Any]] = [[field.name, str(field.type)] for field in schema]
    return [
        table(uri, "column", "type", rows=columns),
        *(
            table(f"row {row} of {num_rows}", "", "", rows=[list(c) for c in cell.items()])
            for row, cell in enumerate(cells)
        ),
    ]


def file_tables(uri: str, manifest: Manifest) -> list[RenderableType]:
    """Return the files of a set, and the tensors of safetensors files."""
    files = [[s.name, bytes_text(s.bytes), s.sha256[:12]] for s in manifest.shards]
    tables: list[RenderableType] = [table("files", "name", "size", "sha256", rows=files)]
    sizes = {s.name: s.bytes for s in manifest.shards if s.name.endswith(".safetensors")}
    facts = [_tensor_facts(uri, name, size) for name, size in sizes.items()]
    if facts:
        tables.append(
            table("tensors", "file", "tensors", "parameters", "types", rows=facts, width=80)
        )
    return tables


def _tensor_facts(uri: str, name: str, size: int) -> list[Any]:
    """Return numbers of tensors and parameters and the types in the header of a file.

    Raises:
        RecordError: the file is no whole safetensors file.
    """

    def read(name: str, start: int, length: int) -> bytes:
        return store.read(f"{uri}/{name}", start, length)

    tensors, faults = read_headers(SourceFolder(uri, {name: size}, read))
    if faults:
        raise RecordError(f"`{uri}`: {faults[0]}")
    types = Counter(dtype for dtype, _ in tensors.values())
    counts = ", ".join(f"{dtype}: {n}" for dtype, n in sorted(types.items()))
    return [name, len(tensors), sum(math.prod(shape) for _, shape in tensors.values()), counts]
