"""The small objects of a state beside its tensors: who writes which, and how metadata lists them.

`Metadata.objects`, by role, with keys relative to the folder of the attempt::

    {"shared": key,                      of `Collected.shared`, absent if there was none
     "own": {"<rank>": key},             of `Collected.own`, for the ranks that had some
     "loader": {"common": key,           of `LoaderState.common_data()`
                "shards": [{"key": key, ...}, ...]}}  of `LoaderShard.to_data()`, ascending

Every object is what `encode_extra` makes of the value. Beside its key a shard has its
`LoaderShard.index()` in the metadata, so that a rank reads those buffers alone that it needs.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote

from planish.base.errors import LayoutMismatch
from planish.checkpoint.format.extra_codec import encode_extra
from planish.checkpoint.format.items import Collected


@dataclass(frozen=True)
class SmallObject:
    """One small object that a rank could write.

    Example:
        >>> SmallObject("data/main.extra/shared.bin", b"x", "main", "shared").state
        'main.extra'
    """

    key: str
    """Relative to the folder of the attempt."""
    data: bytes
    """Content."""
    role: str
    place: str
    """`shared`, `own`, `common` or `shard`."""
    listed: Mapping[str, Any] | None = None
    """Of a shard: what metadata says of it beside the key."""

    @property
    def state(self) -> str:
        """Role and kind, for timings."""
        return f"{self.role}.{'loader' if self.place in ('common', 'shard') else 'extra'}"

    def claim(self) -> Claim:
        """Return what the coordinator needs to know."""
        digest = hashlib.sha256(self.data).hexdigest()[:32]
        return Claim(self.key, self.place, self.role, len(self.data), digest, self.listed)


class Claim(NamedTuple):
    """That a rank could write an object."""

    key: str
    place: str
    role: str
    size: int
    digest: str
    """Of the content."""
    listed: Mapping[str, Any] | None = None
    """Of a shard: what metadata says of it beside the key."""


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
            found.append(SmallObject(f"data/{name}.extra/shared.bin", data, role, "shared"))
        if collected.own:
            data = _encode(role, collected.own, allow_pickle)
            found.append(SmallObject(f"data/{name}.extra/{rank:05d}.bin", data, role, "own"))
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
        found.append(SmallObject(f"{folder}/common.bin", data, role, "common"))
    several: Counter[tuple[int, int]] = Counter()
    for shard in loader.shards:
        number = several[shard.dp_rank, shard.reader]
        several[shard.dp_rank, shard.reader] += 1
        suffix = f"-{number}" if number else ""
        key = f"{folder}/{shard.dp_rank:05d}-{shard.reader}{suffix}.bin"
        data = shard.encoded or _encode(role, shard.to_data(), allow_pickle)
        found.append(SmallObject(key, data, role, "shard", shard.index()))
    return found


def choose_writers(claims: Sequence[Sequence[Claim]]) -> dict[str, int]:
    """Return key -> rank for every small object that several ranks could write: the lowest.

    Args:
        claims: `SmallObject.claim()` of the objects of each rank, rank r's at position r.

    Raises:
        LayoutMismatch: ranks claim one loader shard with different contents, all are named.
    """
    claimed: dict[str, dict[int, Claim]] = {}
    for rank, mine in enumerate(claims):
        for claim in mine:
            claimed.setdefault(claim.key, {})[rank] = claim
    wrong = []
    for key, by_rank in claimed.items():
        place = next(iter(by_rank.values())).place
        if place == "shard" and len({claim.digest for claim in by_rank.values()}) > 1:
            wrong.append(f"`{key}` by ranks {sorted(by_rank)}")
    if wrong:
        raise LayoutMismatch(
            "a loader shard must belong to one rank, or be equal on all that have it, got "
            + "; ".join(sorted(wrong))
            + "; set `dp_rank` and `is_owner` of the loaders"
        )
    return {key: min(by_rank) for key, by_rank in claimed.items() if len(by_rank) > 1}


def differing(claims: Sequence[Sequence[Claim]]) -> list[str]:
    """Return the keys of replicated values that ranks do not agree about."""
    digests: dict[str, set[str]] = {}
    for mine in claims:
        for claim in mine:
            if claim.place in ("shared", "common"):
                digests.setdefault(claim.key, set()).add(claim.digest)
    return sorted(key for key, found in digests.items() if len(found) > 1)


def list_objects(written: Mapping[int, Sequence[Claim]]) -> dict[str, Any]:
    """Return `Metadata.objects` of what each rank has written."""
    found: dict[str, Any] = {}
    claims = [(claim, rank) for rank, mine in written.items() for claim in mine]
    for claim, rank in sorted(claims, key=lambda pair: (pair[0].key, pair[1])):
        mine = found.setdefault(claim.role, {})
        if claim.place == "shared":
            mine["shared"] = claim.key
        elif claim.place == "own":
            mine.setdefault("own", {})[str(rank)] = claim.key
        elif claim.place == "common":
            mine.setdefault("loader", {"shards": []})["common"] = claim.key
        else:
            mine.setdefault("loader", {"shards": []})["shards"].append(
                {"key": claim.key, **(claim.listed or {})}
            )
    return found
