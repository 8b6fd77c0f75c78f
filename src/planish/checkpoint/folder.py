"""Reading a state's folder: nothing is used before its digest has been checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from planish.checkpoint.regions import EXTRA_FILE, INDEX_FILE, StoredTensor, parse_index
from planish.errors import CheckpointError, CheckpointIncomplete, ObjectMissing
from planish.records.files import hash_file
from planish.records.manifest import Manifest, Shard, read_manifest
from planish.records.refs import parse_pin
from planish.store import open_store

STATE_SCHEMA = "train-state/1"


class StateFolder:
    """A finished train state, or another file set of tensors."""

    def __init__(self, uri: str, manifest: Manifest) -> None:
        self.uri = uri
        self.manifest = manifest
        self.files: dict[str, Shard] = {shard.name: shard for shard in manifest.shards}

    @classmethod
    def open(cls, pin: str, *, schema: str = STATE_SCHEMA) -> StateFolder:
        """Open `<uri>#sha256=<digest>`.

        Raises:
            CheckpointIncomplete: no manifest there: the save never finished.
            CheckpointError: a set of another schema.
            RecordError: another manifest than the pinned one.
        """
        uri, digest = parse_pin(pin)
        try:
            manifest = read_manifest(uri, sha256=digest)
        except ObjectMissing:
            raise CheckpointIncomplete(
                f"`{uri}` must hold a finished {schema}, got no manifest; its save never finished: "
                "resume from an earlier state"
            ) from None
        if manifest.schema != schema:
            raise CheckpointError(
                f"`{uri}` must hold {schema}, got {manifest.schema}; pass the URI of another set"
            )
        return cls(uri, manifest)

    def read(self, name: str) -> bytes:
        """Return the verified bytes of one file.

        Raises:
            CheckpointError: not in the manifest, missing or damaged.
        """
        shard = self._shard(name)
        place = f"{self.uri}/{name}"
        try:
            data = open_store(self.uri).read(place)
        except ObjectMissing:
            raise self._damaged(name, "no such object") from None
        if len(data) != shard.bytes or hashlib.sha256(data).hexdigest() != shard.sha256:
            raise self._damaged(name, f"{len(data)} bytes with another sha256")
        return data

    def local(self, name: str, scratch: Path) -> Path:
        """Return a verified local file: the object itself, or a copy below `scratch`."""
        shard = self._shard(name)
        store, place = open_store(self.uri), f"{self.uri}/{name}"
        path = store.local_path(place)
        if path is None:
            path = scratch / name
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                store.read_file(place, path)
            except ObjectMissing:
                raise self._damaged(name, "no such object") from None
        elif not path.is_file():
            raise self._damaged(name, "no such file")
        if hash_file(path) != (shard.bytes, shard.sha256):
            raise self._damaged(name, f"{path.stat().st_size} bytes with another sha256")
        return path

    def index(self) -> dict[str, StoredTensor]:
        """Return which region of which tensor lies where."""
        tensors = parse_index(self.read(INDEX_FILE), name=f"{self.uri}/{INDEX_FILE}")
        named = {region.file for tensor in tensors.values() for region in tensor.regions}
        unknown = sorted(named - self.files.keys())
        if unknown:
            raise CheckpointError(
                f"`{self.uri}/{INDEX_FILE}` must name files of its manifest only, got {unknown}; "
                "save the state again"
            )
        return tensors

    def extra(self) -> dict[str, Any]:
        """Return the JSON part: counters, data position."""
        data = self.read(EXTRA_FILE)
        try:
            value = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise self._damaged(EXTRA_FILE, f"no JSON ({error})") from None
        if not isinstance(value, dict):
            raise self._damaged(EXTRA_FILE, f"a {type(value).__name__}")
        return value

    def _shard(self, name: str) -> Shard:
        if name not in self.files:
            raise CheckpointError(
                f"`{self.uri}` must hold `{name}`, got {sorted(self.files)}; it is not a train "
                "state that this version wrote"
            )
        return self.files[name]

    def _damaged(self, name: str, seen: str) -> CheckpointError:
        shard = self.files[name]
        return CheckpointError(
            f"`{self.uri}/{name}` must have {shard.bytes} bytes with sha256 {shard.sha256}, got "
            f"{seen}; resume from an earlier state"
        )
