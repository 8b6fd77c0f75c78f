"""Write and read record sets: shards first, manifest last; readers verify every digest.

A set is immutable: a stage that runs again writes equal bytes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.base.telemetry import timed
from planish.records import layout
from planish.records.files import fetch_files, publish, write_files
from planish.records.manifest import MANIFEST, Manifest, Shard, read_manifest, seal
from planish.records.refs import Ref
from planish.records.schema import ColumnData, Record, RecordT, join

__all__ = [
    "Manifest",
    "fetch_files",
    "finished",
    "iter_set",
    "read_manifest",
    "read_set",
    "write_files",
    "write_set",
]

ROW_GROUPS_PER_SHARD = 32
"""A shard ends after this many row groups: about 32 million numbers."""

_REMEDY = "remove the set and run its stage again"


def write_set(
    uri: str, record: Record, *, parents: Mapping[str, str], attributes: Mapping[str, Any]
) -> Ref:
    """Write a record set: shards first, the manifest last.

    `parents` maps each input to the sha256 of its manifest. `attributes` are JSON values that
    describe this set: config_sha256, iteration, seed ... They have no URI, time or host name, so
    that equal runs have equal digests.

    Returns:
        The Ref of the set; its attributes are the scalar `attributes` and `num_rows`.

    Raises:
        RecordError: a number is not finite.
    """
    from planish.records.parquet import encode, row_group_bounds

    with timed("planish_records_write_seconds", schema=record.SCHEMA):
        record.check_finite()
        columns = record.columns()
        bounds = row_group_bounds(columns, record.group_starts())
        files: dict[str, bytes] = {}
        shards: list[Shard] = []
        for number, start in enumerate(range(0, max(1, len(bounds) - 1), ROW_GROUPS_PER_SHARD)):
            piece = bounds[start : start + ROW_GROUPS_PER_SHARD + 1]
            data = encode(columns, record.COLUMNS, piece)
            name = f"shard-{number:05d}.parquet"
            files[name] = data
            digest = hashlib.sha256(data).hexdigest()
            shards.append(Shard(name, piece[-1] - piece[0], len(data), digest))
        manifest, text = seal(record.SCHEMA, record.num_rows, shards, parents, attributes)
        publish(uri, text, files)
        return manifest.ref(uri)


def read_set(
    cls: type[RecordT], uri: str, *, sha256: str | None = None, with_optional: bool = True
) -> RecordT:
    """Read a record set and check its schema and digests; the writer has checked the rules.

    `sha256` is the expected digest of the manifest. `with_optional` reads optional lists too,
    which may be most of the bytes.

    Raises:
        ObjectMissing: no finished set there.
        RecordError: of another schema or version, or damaged.
    """
    with timed("planish_records_read_seconds", schema=cls.SCHEMA):
        pieces = list(iter_set(cls, uri, sha256=sha256, with_optional=with_optional))
        return cls.from_columns(join(pieces, cls.COLUMNS))


def iter_set(
    cls: type[Record], uri: str, *, sha256: str | None = None, with_optional: bool = True
) -> Iterator[dict[str, ColumnData]]:
    """Read the columns of a record set piece by piece; memory is one shard's file and one piece.

    Raises:
        ObjectMissing: no finished set there.
        RecordError: of another schema or version, or damaged.
    """
    manifest = read_manifest(uri, sha256=sha256)
    if manifest.schema not in (cls.SCHEMA, *cls.OLDER):
        name, _, major = cls.SCHEMA.partition("/")
        if manifest.schema.partition("/")[0] == name:
            raise RecordError(
                f"`{uri}` must hold version {major} of {name}, got {manifest.schema}; "
                "read it with the release that wrote it"
            )
        raise RecordError(
            f"`{uri}` must hold {cls.SCHEMA}, got {manifest.schema}; pass the URI of another set"
        )
    if not manifest.shards:
        raise RecordError(f"`{uri}` must have at least one shard, got none; {_REMEDY}")
    for shard in manifest.shards:
        yield from _read_shard(uri, shard, cls, with_optional)


def _read_shard(
    uri: str, shard: Shard, cls: type[Record], with_optional: bool
) -> Iterator[dict[str, ColumnData]]:
    place = f"{uri.rstrip('/')}/{shard.name}"
    try:
        data = store.read(place, 0, shard.bytes + 1)
    except ObjectMissing:
        raise RecordError(
            f"`{place}` must be there, since its manifest names it, but is missing; {_REMEDY}"
        ) from None
    digest = hashlib.sha256(data).hexdigest()
    if digest != shard.sha256:
        raise RecordError(f"`{place}` must have the sha256 {shard.sha256}, got {digest}; {_REMEDY}")
    from planish.records.parquet import decode_pieces

    yield from decode_pieces(data, cls.COLUMNS, name=place, with_optional=with_optional)


def finished(uri: str, *schemas: str, parents: Mapping[str, str], config_sha256: str) -> Ref | None:
    """Return the Ref of a set of one of `schemas` that an earlier attempt made of the same inputs.

    `parents` and `config_sha256` are what its manifest must name.

    Returns:
        None when there is no set, or one made from other inputs.
    """
    try:
        manifest = read_manifest(uri)
    except ObjectMissing:
        return None
    same = (
        manifest.schema in schemas
        and manifest.parents == dict(parents)
        and manifest.attributes.get("config_sha256") == config_sha256
    )
    return manifest.ref(uri) if same else None


def policy_versions(root: str) -> list[int]:
    """Return the versions of the finished policies of a run, ascending."""
    folder = layout.policy(root, 0).rpartition("/")[0]
    manifest = re.compile(rf"{re.escape(folder)}/(\d+)/{re.escape(MANIFEST)}")
    found = map(manifest.fullmatch, store.list_uris(folder))
    return sorted(int(match[1]) for match in found if match)
