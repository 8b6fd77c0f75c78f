"""Small values of a checkpoint: shared ones, each rank's own, the data loader's.

Rank 0 reads the shared values and broadcasts them. Each rank reads its own values and the buffers
of its data loader. `small_objects` describes their list in the metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from planish.base.errors import CheckpointCorrupt
from planish.checkpoint.adapters.loader_state import LoaderState, sources
from planish.checkpoint.format.items import Collected
from planish.checkpoint.format.small_objects import decode_extra, encode_extra
from planish.checkpoint.format.strict_json import Fields, Values
from planish.checkpoint.loading.agree import LoadOptions
from planish.checkpoint.loading.reader import BlockReader

if TYPE_CHECKING:
    from planish.checkpoint.ranks.control import Control


@dataclass
class Extras:
    """Decoded small values, by role."""

    values: dict[str, Fields] = field(default_factory=dict)
    """Role -> values that are equal on all ranks, and values saved by the rank of this number."""
    loader: dict[str, LoaderState] = field(default_factory=dict)
    """Role -> loader state of all saving ranks; without the role if there is none."""


class Names(NamedTuple):
    """Keys of the small objects of one role; a key is empty if there is no object."""

    shared: str
    own: Mapping[str, str]
    common: str
    shards: tuple[Values, ...]
    """Key and index of each shard of the loader."""


def names_of(objects: Values, role: str) -> Names:
    """Return the keys of a role's small objects, from `Metadata.objects`."""
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


def read_shared(reader: BlockReader, role: str) -> Fields:
    """Return the values of a role that all ranks share; {} if there are none."""
    key = names_of(reader.opened.metadata.objects, role).shared
    shared = decode_extra(reader.read_file(key), file=key) if key else {}
    return shared if isinstance(shared, dict) else {}


def read_extras(
    reader: BlockReader,
    collected: Mapping[str, Collected],
    call: Control,
    options: LoadOptions,
) -> Extras:
    """Read and decode small values; a collective of all ranks."""

    def decoded(key: str, data: bytes) -> Any:
        return decode_extra(data, allow_pickle=options.allow_pickle, file=key)

    def by_name(key: str, data: bytes) -> Fields:
        value = decoded(key, data)
        if not isinstance(value, dict):
            raise CheckpointCorrupt(f"`{key}` must hold values by name, got {value!r:.80}")
        return value

    extras, data = Extras(), b""
    names: dict[str, Names] = {}
    shards: dict[str, list[Values]] = {}
    with call.settled("extras"):
        for role in sorted(collected):
            mine = names[role] = names_of(reader.opened.metadata.objects, role)
            key, loader = mine.own.get(str(call.rank), ""), collected[role].loader
            if "extra" in options.parts and key:
                extras.values[role] = by_name(key, reader.read_file(key))
            if "loader" in options.parts and mine.common and loader is not None:
                ranks = [shard.get("dp_rank") for shard in mine.shards]
                saved = 1 + max((rank for rank in ranks if type(rank) is int), default=0)
                needed = sources(saved, loader.dp_rank, loader.dp_size)
                # Read the shards whose buffers this rank needs; the index suffices for the others.
                shards[role] = [
                    decoded(shard["key"], reader.read_file(shard["key"]))
                    if rank in needed
                    else shard
                    for shard, rank in zip(mine.shards, ranks, strict=True)
                ]
        if call.rank == 0:
            # The shared values also include the options of parameter groups.
            wants_shared = not {"model", "optim", "extra"}.isdisjoint(options.parts)
            keys = [mine.shared for mine in names.values() if wants_shared]
            keys += [mine.common for mine in names.values() if "loader" in options.parts]
            data = encode_extra({key: reader.read_file(key) for key in keys if key})
    content = decode_extra(call.broadcast(data, "extras.data"))
    for role, mine in names.items():
        if mine.shared in content:
            shared = by_name(mine.shared, content[mine.shared])
            extras.values[role] = {**shared, **extras.values.get(role, {})}
        if mine.common in content and role in shards:
            common = decoded(mine.common, content[mine.common])
            extras.loader[role] = LoaderState.from_data(common, shards[role])
    return extras
