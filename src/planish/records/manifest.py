"""Manifests: the file that is written last and makes a set exist; every reader goes through it."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Annotated, Any, Self

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic import model_validator as validator
from pydantic.dataclasses import dataclass

from planish import store
from planish.base.config import document_faults
from planish.base.errors import ObjectMissing, RecordError
from planish.records.refs import Ref, Scalar

MANIFEST = "manifest.json"

_LIMIT_BYTES = 64 << 20
_NAME_PART = re.compile(r"[A-Za-z0-9._-]{1,200}")
_STRICT = ConfigDict(strict=True, extra="forbid")


def file_name(name: str) -> str:
    """Return a relative path that stays below its folder; refuse any other.

    Example:
        >>> file_name("a/model.safetensors")
        'a/model.safetensors'

    Raises:
        ValueError: the path leaves the folder, or is that of a manifest.
    """
    parts = name.split("/")
    is_below = all(_NAME_PART.fullmatch(part) and part not in {".", ".."} for part in parts)
    if not is_below or len(name) > 1000 or name == MANIFEST:
        raise ValueError("the name of a file must be a path below its set")
    return name


Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=1 << 62)]


@dataclass(frozen=True, config=_STRICT)
class Shard:
    """One file of a set."""

    name: Annotated[str, AfterValidator(file_name)]
    """Path below the folder of the set."""
    rows: Count
    """Rows in this file; 0 in sets of plain files."""
    bytes: Count
    sha256: Digest


@dataclass(frozen=True, config=_STRICT)
class Manifest:
    """Content and inputs of a set, without URI, time or host.

    Example:
        >>> manifest = Manifest("rewards/1", 0, (), {}, {"config_sha256": "ab"})
        >>> parse_manifest(manifest.to_bytes(), "here").attributes
        {'config_sha256': 'ab'}
    """

    schema: Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*/[1-9][0-9]*$")]
    """Name and major version, e.g. `rollouts/2`."""
    num_rows: Count
    shards: tuple[Shard, ...]
    """In row order."""
    parents: dict[str, Digest]
    """Name of each input to the sha256 of its manifest."""
    attributes: dict[str, Any]
    """JSON values: config_sha256, and iteration, policy_version, seed where they apply."""
    sha256: str = field(default="", compare=False)
    """Digest of the bytes this manifest was read from; empty before it is written."""

    @validator(mode="after")
    def _check_shards(self) -> Self:
        if len({shard.name for shard in self.shards}) < len(self.shards):
            raise ValueError("names of shards must not repeat")
        if (rows := sum(shard.rows for shard in self.shards)) != self.num_rows:
            raise ValueError(
                f"`num_rows` must be the {rows} rows of the shards, got {self.num_rows}"
            )
        return self

    def to_bytes(self) -> bytes:
        """Return the bytes on disk: sorted keys, two spaces, ASCII."""
        raw = {name: part for name, part in vars(self).items() if name != "sha256"}
        text = json.dumps(raw, sort_keys=True, indent=2, allow_nan=False, default=vars)
        return f"{text}\n".encode("ascii")

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
    """Build a manifest that knows its own digest, and its bytes."""
    data = Manifest(schema, num_rows, tuple(shards), dict(parents), dict(attributes)).to_bytes()
    return parse_manifest(data, schema), data


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


@functools.cache
def adapter(cls: Any) -> TypeAdapter[Any]:
    """Return the parser of a dataclass, built on first use."""
    return TypeAdapter(cls)


def parse_manifest(data: bytes, name: str) -> Manifest:
    """Parse the bytes of a manifest, trusting nothing in them.

    `name` stands in errors.

    Raises:
        RecordError: the manifest is wrong; the message names every fault.
    """
    try:
        manifest: Manifest = adapter(Manifest).validate_json(data)
    except ValidationError as error:
        raise RecordError(
            f"`{name}` is no manifest: {document_faults(error)}; remove the set and run its stage "
            "again"
        ) from None
    return replace(manifest, sha256=hashlib.sha256(data).hexdigest())
