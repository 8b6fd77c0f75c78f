"""Small values of a checkpoint: shared ones, each rank's own, the data loader's.

Rank 0 reads what all ranks need and hands it on; each rank reads what it alone needs: its own
values and the buffers of its data loader. See `small_objects` for how metadata lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.adapters.loader_state import LoaderState, sources
from planish.checkpoint.format.extra_codec import decode_extra, encode_extra
from planish.checkpoint.format.items import Collected
from planish.checkpoint.load.options import LoadOptions
from planish.checkpoint.load.reader import BlockReader

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control


@dataclass
class Extras:
    """Decoded small values, by role."""

    shared: dict[str, dict[str, Any]] = field(default_factory=dict)
    own: dict[str, dict[str, Any]] = field(default_factory=dict)
    loader: dict[str, LoaderState] = field(default_factory=dict)


@dataclass(frozen=True)
class Names:
    """Objects of one role, empty where there is none.

    Example:
        >>> names_of({"main": {"own": {"0": "data/main.extra/00000.bin"}}}, "main").own
        {'0': 'data/main.extra/00000.bin'}
    """

    shared: str
    own: Mapping[str, str]
    """Saving rank to key."""
    common: str
    shards: tuple[Mapping[str, Any], ...]
    """Key and index of each shard of the loader."""


def names_of(objects: Mapping[str, Any], role: str) -> Names:
    """Check which objects untrusted metadata names for a role.

    Raises:
        CheckpointCorrupt: of another form.
    """
    listed = objects.get(role, {})
    try:
        own, loader = listed.get("own", {}), listed.get("loader", {})
        shards = tuple({**shard} for shard in loader.get("shards", ()))
        names = Names(listed.get("shared", ""), {**own}, loader.get("common", ""), shards)
        keys = [names.shared, *names.own.values(), names.common]
        if all(isinstance(key, str) for key in (*keys, *(shard["key"] for shard in shards))):
            return names
    except (AttributeError, TypeError, ValueError, KeyError):
        pass
    raise CheckpointCorrupt(
        f"the metadata must name the small objects of role `{role}`, got {listed!r:.200}",
        file="meta/global.bin",
    )


def read_extras(
    reader: BlockReader,
    collected: Mapping[str, Collected],
    call: Control,
    options: LoadOptions,
) -> Extras:
    """Read and decode small values; a collective of all ranks.

    Raises:
        CheckpointIncomplete: an object is missing or short.
        CheckpointCorrupt: an object is damaged.
    """
    found, data = _Found(reader, options), b""
    error: Exception | None = None
    try:
        for role in sorted(collected):
            found.read_mine(role, collected[role], call.rank)
        if call.rank == 0:
            keys = found.common_keys()
            data = encode_extra({key: reader.read_file(key) for key in keys})
    except Exception as caught:
        error = caught
    call.settle(error, "extras")
    content = decode_extra(call.broadcast(data, "extras.data"))
    for role, names in found.names.items():
        if names.shared in content:
            found.extras.shared[role] = found.values(names.shared, content[names.shared])
        if names.common in content and role in found.shards:
            common = found.value(names.common, content[names.common])
            found.extras.loader[role] = LoaderState.from_data(common, found.shards[role])
    return found.extras


class _Found:
    """What one rank has read so far."""

    def __init__(self, reader: BlockReader, options: LoadOptions) -> None:
        self.reader, self.options = reader, options
        self.extras = Extras()
        self.names: dict[str, Names] = {}
        self.shards: dict[str, list[Mapping[str, Any]]] = {}

    def read_mine(self, role: str, wanted: Collected, rank: int) -> None:
        """Read what only this rank needs."""
        names = self.names[role] = names_of(self.reader.opened.metadata.objects, role)
        key = names.own.get(str(rank), "")
        if "extra" in self.options.parts and key:
            self.extras.own[role] = self.values(key, self.reader.read_file(key))
        if "loader" in self.options.parts and names.common and wanted.loader is not None:
            self.shards[role] = self._read_shards(names, wanted.loader)

    def _read_shards(self, names: Names, wanted: LoaderState) -> list[Mapping[str, Any]]:
        """Return all shards, those whose buffers this rank needs as a whole."""
        ranks = [shard.get("dp_rank") for shard in names.shards]
        saved = 1 + max((rank for rank in ranks if type(rank) is int), default=0)
        needed = sources(saved, wanted.dp_rank, wanted.dp_size)
        return [
            self.value(shard["key"], self.reader.read_file(shard["key"]))
            if shard.get("dp_rank") in needed
            else shard
            for shard in names.shards
        ]

    def common_keys(self) -> Sequence[str]:
        """Return the objects that every rank needs."""
        keys = []
        for names in self.names.values():
            # Options of parameter groups lie there too.
            wanted = {"model", "optim", "extra"} & set(self.options.parts)
            keys += [names.shared] if wanted and names.shared else []
            keys += [names.common] if "loader" in self.options.parts and names.common else []
        return keys

    def value(self, key: str, data: bytes) -> Any:
        """Decode an object."""
        return decode_extra(data, allow_pickle=self.options.allow_pickle, file=key)

    def values(self, key: str, data: bytes) -> dict[str, Any]:
        """Decode an object that holds values by name."""
        value = self.value(key, data)
        if not isinstance(value, dict):
            raise CheckpointCorrupt(f"`{key}` must hold values by name, got {value!r:.80}")
        return value
