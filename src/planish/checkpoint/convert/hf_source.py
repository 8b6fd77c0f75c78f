"""An earlier policy of the same model: its small files, and names, types and shapes of its weights.

Nothing is used before its digest has been checked, but for the headers of weight files, which are
only compared with.
"""

from __future__ import annotations

import hashlib

from planish import store
from planish.base.errors import CheckpointError, ObjectMissing
from planish.checkpoint.convert.hf_files import Form
from planish.checkpoint.format.safetensors_file import header_bytes, parse_header
from planish.checkpoint.pinned import read_pinned
from planish.records.manifest import Manifest

POLICY_SCHEMA = "policy/1"
_WEIGHTS = (".safetensors", ".safetensors.index.json")


class PolicySource:
    """A finished policy, opened by its pin."""

    def __init__(self, uri: str, manifest: Manifest) -> None:
        """Use `PolicySource.open`."""
        self.uri = uri
        self._shards = {shard.name: shard for shard in manifest.shards}

    @classmethod
    def open(cls, pin: str) -> PolicySource:
        """Open `<uri>#sha256=<digest>`.

        Raises:
            CheckpointIncomplete: no manifest there.
            CheckpointError: a set of another schema.
            RecordError: another manifest than the pinned one.
        """
        uri, manifest = read_pinned(pin, POLICY_SCHEMA, remedy="export it again")
        return cls(uri, manifest)

    def small_files(self) -> dict[str, bytes]:
        """Return configuration, tokenizer and the like: all but weights, verified.

        Raises:
            CheckpointError: a file is missing or damaged.
        """
        return {name: self._read(name) for name in self._shards if not name.endswith(_WEIGHTS)}

    def forms(self) -> dict[str, Form]:
        """Return types and shapes of all weights, from the headers of their files.

        Raises:
            CheckpointCorrupt: a weight file is no safetensors file.
        """
        found: dict[str, Form] = {}
        for name, shard in self._shards.items():
            if not name.endswith(".safetensors"):
                continue
            place = f"{self.uri}/{name}"
            length = header_bytes(store.read(place, 0, 8), shard.bytes, file=place)
            header = parse_header(store.read(place, 0, length), shard.bytes, file=place)
            found |= {key: Form(e.dtype, e.shape) for key, e in header.entries.items()}
        return found

    def _read(self, name: str) -> bytes:
        shard = self._shards[name]
        place = f"{self.uri}/{name}"
        try:
            data = store.read(place)
        except ObjectMissing:
            data = b""
        if len(data) != shard.bytes or hashlib.sha256(data).hexdigest() != shard.sha256:
            raise CheckpointError(
                f"`{place}` must have {shard.bytes} bytes with sha256 {shard.sha256}, got "
                f"{len(data)} others; export with another policy as source"
            )
        return data
