"""The small objects of a state beside its tensors: who writes which, and how metadata lists them.

`Metadata.objects`, by role, with keys relative to the folder of the attempt::

    {"shared": key,                      of `Collected.shared`, absent if there was none
     "own": {"<rank>": key},             of `Collected.own`, for the ranks that had some
     "loader": {"common": key,           of `LoaderState.common_data()`
                "shards": [{"key": key, **LoaderShard.index()}]}}   content: `to_data()`

Every object is what `encode_extra` makes of the value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from planish.checkpoint.extra_codec import encode_extra
from planish.checkpoint.model import Collected
from planish.errors import LayoutMismatch


@dataclass(frozen=True)
class SmallObject:
    """One small object that a rank could write.

    Example:
        >>> SmallObject("data/main.extra/shared.bin", b"x", "main", "shared", {}).state
        'main.extra'
    """

    key: str
    """Relative to the folder of the attempt."""
    data: bytes
    """Content."""
    role: str
    place: str
    """`shared`, `own`, `common` or `shard`."""
    entry: Mapping[str, Any]
    """What metadata says of it besides its key."""

    @property
    def state(self) -> str:
        """Role and kind, for timings."""
        return f"{self.role}.{'loader' if self.place in ('common', 'shard') else 'extra'}"

    def claim(self) -> list[Any]:
        """Return what the coordinator needs to know: key, place, role, entry, size, digest."""
        digest = hashlib.sha256(self.data).hexdigest()[:32]
        return [self.key, self.place, self.role, dict(self.entry), len(self.data), digest]


def encode_objects(
    rank: int, roles: Mapping[str, Collected], *, allow_pickle: bool = False
) -> list[SmallObject]:
    """Return the small objects of a rank; what they hold may change afterwards.

    Raises:
        TypeError: a value that must not be stored, by its place.
    """
    found = []
    for role, collected in roles.items():
        name = quote(role, safe="", errors="surrogatepass")
        if collected.shared:
            data = _encode(role, collected.shared, allow_pickle)
            found.append(SmallObject(f"data/{name}.extra/shared.bin", data, role, "shared", {}))
        if collected.own:
            data = _encode(role, collected.own, allow_pickle)
            entry = {"rank": rank}
            found.append(SmallObject(f"data/{name}.extra/{rank:05d}.bin", data, role, "own", entry))
        if collected.loader is not None:
            found += _loader_objects(role, name, collected.loader, allow_pickle)
    return found


def _encode(role: str, value: Any, allow_pickle: bool) -> bytes:
    try:
        return encode_extra(value, allow_pickle=allow_pickle)
    except TypeError as error:
        raise TypeError(f"role `{role}`: {error}") from None


def _loader_objects(role: str, name: str, loader: Any, allow_pickle: bool) -> list[SmallObject]:
    folder = f"data/{name}.loader"
    found = []
    if loader.shards or loader.common:
        data = _encode(role, loader.common_data(), allow_pickle)
        found.append(SmallObject(f"{folder}/common.bin", data, role, "common", {}))
    for shard in loader.shards:
        key = f"{folder}/{shard.dp_rank:05d}-{shard.reader}.bin"
        entry = _plain(shard.index())
        found.append(
            SmallObject(key, _encode(role, shard.to_data(), allow_pickle), role, "shard", entry)
        )
    return found


def _plain(value: Any) -> Any:
    """Return a value with lists for tuples, as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def choose_writers(claims: Sequence[Sequence[Sequence[Any]]]) -> dict[str, int]:
    """Return key -> rank for every small object that several ranks could write: the lowest.

    Args:
        claims: `SmallObject.claim()` of the objects of each rank, rank r's at position r.

    Raises:
        LayoutMismatch: ranks claim one loader shard with different contents, all are named.
    """
    claimed: dict[str, dict[int, Sequence[Any]]] = {}
    for rank, mine in enumerate(claims):
        for claim in mine:
            claimed.setdefault(claim[0], {})[rank] = claim
    wrong = []
    for key, by_rank in claimed.items():
        place = next(iter(by_rank.values()))[1]
        if place == "shard" and len({claim[5] for claim in by_rank.values()}) > 1:
            wrong.append(f"`{key}` by ranks {sorted(by_rank)}")
    if wrong:
        raise LayoutMismatch(
            "a loader shard must belong to one rank, or be equal on all that have it, got "
            + "; ".join(sorted(wrong))
            + "; set `dp_rank` and `is_owner` of the loaders"
        )
    return {key: min(by_rank) for key, by_rank in claimed.items() if len(by_rank) > 1}


def differing(claims: Sequence[Sequence[Sequence[Any]]]) -> list[str]:
    """Return the keys of replicated values that ranks do not agree about."""
    digests: dict[str, set[str]] = {}
    for mine in claims:
        for key, place, _, _, _, digest in mine:
            if place in ("shared", "common"):
                digests.setdefault(key, set()).add(digest)
    return sorted(key for key, found in digests.items() if len(found) > 1)


def list_objects(claims: Iterable[Sequence[Any]]) -> dict[str, Any]:
    """Return `Metadata.objects` of the objects that were written."""
    found: dict[str, Any] = {}
    for key, place, role, entry, _, _ in sorted(claims, key=lambda claim: claim[0]):
        mine = found.setdefault(role, {})
        if place == "shared":
            mine["shared"] = key
        elif place == "own":
            mine.setdefault("own", {})[str(entry["rank"])] = key
        elif place == "common":
            mine.setdefault("loader", {"shards": []})["common"] = key
        else:
            loader = mine.setdefault("loader", {"shards": []})
            loader["shards"].append({"key": key, **entry})
    return found
