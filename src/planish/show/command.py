"""The command `planish show`: detects what a URI is and prints its content."""

from __future__ import annotations

import hashlib

from rich.console import Console, RenderableType

from planish import store
from planish.base.errors import ConfigError, ObjectMissing, RecordError
from planish.records import layout, parse_pin, read_manifest
from planish.records.manifest import MANIFEST
from planish.show.run import document_tables, folder_tables, run_tables
from planish.show.sets import (
    PARQUET_MAGIC,
    RECORDS,
    file_tables,
    manifest_tables,
    parquet_tables,
    record_tables,
)
from planish.store import normal_uri

_DOCUMENT_LIMIT_BYTES = 16 << 20


def show(text: str, console: Console, *, rows: int) -> None:
    """Print the content of a URI, a pin or a path, with `rows` complete rows of a record set."""
    if not text.strip():
        raise ConfigError(
            f"what to show must be a URI or a path, got {text!r}; a dot is the working directory"
        )
    digest = None
    if "#" in text:
        text, digest = parse_pin(text)
    for piece in tables_of(normal_uri(text), digest, rows=rows):
        console.print(piece)


def tables_of(uri: str, digest: str | None, *, rows: int) -> list[RenderableType]:
    """Return the tables for `uri`."""
    if store.exists(uri):
        data = store.read(uri, 0, _DOCUMENT_LIMIT_BYTES)
        seen = hashlib.sha256(data).hexdigest()
        if digest not in {None, seen}:
            raise RecordError(f"`{uri}` must have the sha256 {digest}, got {seen}")
        if data.startswith(PARQUET_MAGIC):
            return parquet_tables(uri, rows=rows)
        return document_tables(uri, data)
    if digest is not None or store.exists(f"{uri}/{MANIFEST}"):
        manifest = read_manifest(uri, sha256=digest)
        known = manifest.schema in RECORDS
        details = record_tables(uri, manifest, rows=rows) if known else file_tables(uri, manifest)
        return [*manifest_tables(uri, manifest), *details]
    if store.exists(layout.run_file(uri)):
        return run_tables(uri)
    tables = folder_tables(uri)
    if not tables:
        raise ObjectMissing(f"`{uri}` must be a set, a report or a run root, but nothing is there")
    return tables
