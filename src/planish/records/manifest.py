"""Manifests: the file written last that makes a set exist, and the only way to read one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planish import store
from planish.base.errors import ObjectMissing, RecordError
from planish.records.refs import Ref, Scalar

MANIFEST = "manifest.json"
"""Name of the manifest in the folder of its set."""

_LIMIT_BYTES = 64 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SCHEMA = re.compile(r"[a-z][a-z0-9-]*/[1-9][0-9]*")
_NAME_PART = re.compile(r"[A-Za-z0-9._-]{1,200}")
_FIELDS = {"schema", "num_rows", "shards", "parents", "attributes"}


@dataclass(frozen=True)
class Shard:
    """One file of a set."""

    name: str
    """Path below the folder of the set."""
    rows: int
    """Rows in this file; 0 in sets of plain files."""
    bytes: int
    """Length of the file."""
    sha256: str
    """64 hex digits."""


@dataclass(frozen=True)
class Manifest:
    """What a set holds and what it was made from: no URI, time or host.

    Example:
        >>> manifest = Manifest("rewards/1", 0, (), {}, {"config_sha256": "ab"})
        >>> parse_manifest(manifest.to_bytes(), "here").attributes
        {'config_sha256': 'ab'}
    """

    schema: str
    """Name and major version, e.g. `rollouts/1`."""
    num_rows: int
    """Rows in all shards together."""
    shards: tuple[Shard, ...]
    """In row order."""
    parents: dict[str, str]
    """Name of each input to the sha256 of its manifest."""
    attributes: dict[str, Any]
    """JSON values: config_sha256, and iteration, policy_version, seed where they apply."""
    sha256: str = field(default="", compare=False)
    """Digest of the bytes this manifest was read from; empty before it is written."""

    def to_bytes(self) -> bytes:
        """Return the bytes on disk: sorted keys, two spaces, ASCII.

        Raises:
            RecordError: an attribute is not JSON.
        """
        raw = {
            "schema": self.schema,
            "num_rows": self.num_rows,
            "shards": [vars(shard) for shard in self.shards],
            "parents": self.parents,
            "attributes": self.attributes,
        }
        try:
            text = json.dumps(raw, sort_keys=True, indent=2, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"attributes of a set must be finite JSON values, got {self.attributes!r:.300} "
                f"({error}); the stage that writes the set passes them"
            ) from None
        return (text + "\n").encode("ascii")

    def ref(self, uri: str) -> Ref:
        """Return the Ref of this manifest, which was read from or written to `uri`."""
        scalars: dict[str, Scalar] = {
            key: value for key, value in self.attributes.items() if isinstance(value, Scalar)
        }
        if self.num_rows or any(shard.name.endswith(".parquet") for shard in self.shards):
            scalars["num_rows"] = self.num_rows
        return Ref(self.schema, uri.rstrip("/"), self.sha256, scalars)


def seal(
    schema: str,
    num_rows: int,
    shards: Sequence[Shard],
    parents: Mapping[str, str],
    attributes: Mapping[str, Any],
) -> tuple[Manifest, bytes]:
    """Build a manifest that knows its own digest, and its bytes.

    Raises:
        RecordError: the schema's name, a parent's digest or an attribute can not be.
    """
    faults = _header_faults(schema, parents)
    if faults:
        raise RecordError(f"a manifest can not be written: {'; '.join(faults)}")
    draft = Manifest(schema, num_rows, tuple(shards), dict(parents), dict(attributes))
    data = draft.to_bytes()
    return parse_manifest(data, schema), data


def _header_faults(schema: object, parents: Mapping[Any, Any]) -> list[str]:
    faults = []
    if not isinstance(schema, str) or not _SCHEMA.fullmatch(schema):
        faults.append(f"`schema` must read `<name>/<major>`, got {schema!r:.80}")
    faults += [
        f"parent `{name}` must be the sha256 of a manifest (64 hex digits), got {digest!r:.80}"
        for name, digest in parents.items()
        if not isinstance(name, str) or not isinstance(digest, str) or not _DIGEST.fullmatch(digest)
    ]
    return faults


def manifest_uri(uri: str) -> str:
    """Return where the manifest of the set at `uri` lies."""
    return f"{uri.rstrip('/')}/{MANIFEST}"


def read_manifest(uri: str, *, sha256: str | None = None) -> Manifest:
    """Read and check the manifest of the set at `uri`.

    Raises:
        ObjectMissing: there is no finished set at `uri`.
        RecordError: not a manifest, or its digest is not `sha256`.
    """
    place = manifest_uri(uri)
    try:
        data = store.read(place, 0, _LIMIT_BYTES + 1)
    except ObjectMissing:
        raise ObjectMissing(
            f"`{uri}` must hold a finished set, but has no `{MANIFEST}`; "
            "run the stage that writes it"
        ) from None
    if len(data) > _LIMIT_BYTES:
        raise RecordError(f"`{place}` must be at most {_LIMIT_BYTES} bytes long, got more")
    seen = hashlib.sha256(data).hexdigest()
    if sha256 is not None and seen != sha256:
        raise RecordError(
            f"`{place}` must have the sha256 {sha256}, got {seen}; the set was written again "
            "after the reference to it was made: run the stage that reads it with its new Ref"
        )
    return parse_manifest(data, place)


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Parse the bytes of a manifest, trusting nothing in them.

    Args:
        data: the whole file.
        name: what to call it in errors.

    Raises:
        RecordError: with every fault.
    """
    try:
        raw: Any = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"`{name}` must be JSON, got {data[:80]!r} ({error})") from None
    faults = _shape_faults(raw)
    if faults:
        raise RecordError(
            f"`{name}` is damaged: {'; '.join(faults[:8])}; remove the set and run its stage again"
        )
    shards = tuple(Shard(s["name"], s["rows"], s["bytes"], s["sha256"]) for s in raw["shards"])
    return Manifest(
        raw["schema"],
        raw["num_rows"],
        shards,
        raw["parents"],
        raw["attributes"],
        hashlib.sha256(data).hexdigest(),
    )


def _shape_faults(raw: Any) -> list[str]:
    if not isinstance(raw, dict) or raw.keys() != _FIELDS:
        seen = sorted(raw) if isinstance(raw, dict) else type(raw).__name__
        return [f"a manifest must have the fields {sorted(_FIELDS)}, got {seen!s:.200}"]
    parents, attributes, shards = raw["parents"], raw["attributes"], raw["shards"]
    if not (
        isinstance(parents, dict) and isinstance(attributes, dict) and isinstance(shards, list)
    ):
        return ["`parents` and `attributes` must be objects and `shards` a list"]
    faults = _header_faults(raw["schema"], parents)
    for position, shard in enumerate(shards):
        faults += _shard_faults(position, shard)
    if not faults:
        names = [shard["name"] for shard in shards]
        if len(set(names)) < len(names):
            faults.append("names of shards must not repeat")
        rows = sum(shard["rows"] for shard in shards)
        if not _is_count(raw["num_rows"]) or rows != raw["num_rows"]:
            faults.append(
                f"`num_rows` must be the {rows} rows of the shards, got {raw['num_rows']!r}"
            )
    return faults


def _shard_faults(position: int, shard: Any) -> list[str]:
    if not isinstance(shard, dict) or shard.keys() != {"name", "rows", "bytes", "sha256"}:
        return [f"shard {position} must have name, rows, bytes and sha256, got {shard!r:.120}"]
    faults = []
    if not is_file_name(shard["name"]):
        faults.append(
            f"the name of shard {position} must be a path below its set, got {shard['name']!r:.120}"
        )
    if not (_is_count(shard["rows"]) and _is_count(shard["bytes"])):
        faults.append(
            f"rows and bytes of shard {position} must be counts, "
            f"got {shard['rows']!r:.40} and {shard['bytes']!r:.40}"
        )
    if not isinstance(shard["sha256"], str) or not _DIGEST.fullmatch(shard["sha256"]):
        faults.append(
            f"sha256 of shard {position} must be 64 hex digits, got {shard['sha256']!r:.80}"
        )
    return faults


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def is_file_name(name: object) -> bool:
    """Return whether `name` is a relative path that stays below its folder.

    Example:
        >>> is_file_name("a/model.safetensors"), is_file_name("../a"), is_file_name("manifest.json")
        (True, False, False)
    """
    return (
        isinstance(name, str)
        and len(name) <= 1000
        and name != MANIFEST
        and all(_NAME_PART.fullmatch(p) and p not in {".", ".."} for p in name.split("/"))
    )
