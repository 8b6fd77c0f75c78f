"""Small values of a state (counters, generators, schedules, buffers) as objects beside its tensors.

`encode_extra` encodes a value without pickle, as JSON. A value that JSON lacks is an object with
one key that begins with `!`; bytes, arrays and tensors follow the JSON text in its order::

    magic      8 bytes, `PLNSHEXT`
    version    u32
    text size  u32, bytes
    text       JSON
    blobs      one after the other, without gaps

`Metadata.objects` lists the objects by role, with keys relative to the folder of the attempt::

    {"shared": key, "own": {"<rank>": key},
     "loader": {"common": key, "shards": [{"key": key, **LoaderShard.index()}, ...]}}
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import struct
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np

from planish.base.errors import CheckpointCorrupt, CheckpointError, LayoutMismatch
from planish.checkpoint.format.items import ITEM_BYTES, MAX_DIMS, TORCH_TYPES, Collected
from planish.checkpoint.format.strict_json import Fields, FormatFault, load_json

if TYPE_CHECKING:
    import torch


class Claim(NamedTuple):
    """A rank's offer to write a small object, as the coordinator gets it."""

    key: str
    """Key relative to the folder of the attempt."""
    place: str
    """`shared`, `own`, `common` or `shard`."""
    role: str
    size: int
    digest: str
    listed: Mapping[str, Any] | None = None
    """`LoaderShard.index()` of a shard, which the metadata list beside the key; else None."""

    @property
    def state(self) -> str:
        """Role and kind of the object, for timings."""
        return f"{self.role}.{'loader' if self.place in ('common', 'shard') else 'extra'}"


class SmallObject(NamedTuple):
    """One small object that a rank offers to write, and its bytes."""

    claim: Claim
    data: bytes


def encode_objects(
    rank: int, roles: Mapping[str, Collected], *, allow_pickle: bool = False
) -> list[SmallObject]:
    """Encode the small objects of a rank; later changes of the values do not matter."""
    found = []

    def add(role: str, place: str, key: str, value: Any, listed: Any = None) -> None:
        try:
            data = encode_extra(value, allow_pickle=allow_pickle)
        except TypeError as error:
            raise TypeError(f"role `{role}`, {place} values: {error}") from None
        digest = hashlib.sha256(data).hexdigest()[:32]
        full = f"data/{quote(role, safe='', errors='surrogatepass')}.{key}"
        found.append(SmallObject(Claim(full, place, role, len(data), digest, listed), data))

    for role, collected in roles.items():
        if collected.shared:
            add(role, "shared", "extra/shared.bin", collected.shared)
        if collected.own:
            add(role, "own", f"extra/{rank:05d}.bin", collected.own)
        loader = collected.loader
        if loader is None:
            continue
        if loader.shards or loader.common:
            add(role, "common", "loader/common.bin", loader.common_data())
        several: Counter[tuple[int, int]] = Counter()
        for shard in loader.shards:
            number = several[shard.dp_rank, shard.reader]
            several[shard.dp_rank, shard.reader] += 1
            suffix = f"-{number}" if number else ""
            key = f"loader/{shard.dp_rank:05d}-{shard.reader}{suffix}.bin"
            add(role, "shard", key, shard.to_data(), shard.index())
    return found


def choose_writers(claims: Sequence[Sequence[Claim]]) -> dict[str, int]:
    """Return key -> lowest rank, for every small object that several ranks offer to write.

    `claims[r]` are those of rank r. `LayoutMismatch` names the loader shards that several ranks
    offer with different contents.
    """
    ranks = defaultdict[str, list[int]](list)
    for rank, mine in enumerate(claims):
        for claim in mine:
            ranks[claim.key].append(rank)
    wrong = [f"`{key}` by ranks {ranks[key]}" for key in _different(claims, ("shard",))]
    if wrong:
        raise LayoutMismatch(
            "a loader shard must belong to one rank, or be equal on all that have it, got "
            + "; ".join(wrong)
            + "; set `dp_rank` and `is_owner` of the loaders"
        )
    return {key: some[0] for key, some in ranks.items() if len(some) > 1}


def differing(claims: Sequence[Sequence[Claim]]) -> list[str]:
    """Return the keys of replicated objects whose contents differ between ranks."""
    return _different(claims, ("shared", "common"))


def _different(claims: Sequence[Sequence[Claim]], places: tuple[str, ...]) -> list[str]:
    digests = defaultdict[str, set[str]](set)
    for claim in itertools.chain.from_iterable(claims):
        if claim.place in places:
            digests[claim.key].add(claim.digest)
    return sorted(key for key, found in digests.items() if len(found) > 1)


def list_objects(written: Mapping[int, Sequence[Claim]]) -> Fields:
    """Return `Metadata.objects` for rank -> the small objects that it has written."""
    found: Fields = {}
    claims = [(claim, rank) for rank, mine in written.items() for claim in mine]
    for claim, rank in sorted(claims, key=lambda pair: (pair[0].key, pair[1])):
        mine = found.setdefault(claim.role, {})
        if claim.place == "shared":
            mine["shared"] = claim.key
        elif claim.place == "own":
            mine.setdefault("own", {})[str(rank)] = claim.key
        else:
            loader = mine.setdefault("loader", {"shards": []})
            if claim.place == "common":
                loader["common"] = claim.key
            else:
                loader["shards"].append({"key": claim.key, **(claim.listed or {})})
    return found


MAX_DEPTH = 64
"""Most levels of nesting; a deeper value most likely contains itself."""

_FIXED = struct.Struct("<8sII")
_MAGIC, _VERSION = b"PLNSHEXT", 1
_ARRAY_KINDS = "biufc"
_ARRAY_TYPE = re.compile(r"[<|][biufc][0-9]{1,2}")
_NUMBERS = (np.integer, np.floating, np.complexfloating, np.bool_)


def encode_extra(value: Any, *, allow_pickle: bool = False, place: str = "the value") -> bytes:
    """Return a value as bytes; equal values give equal bytes.

    Args:
        value: None, bool, int, float, complex, str, bytes, numpy scalars and arrays of numbers,
            dense torch tensors, and lists, tuples, dicts (keys: str, int, float, bool, None, tuples
            of these) and OrderedDicts of them. Other kinds of lists, tuples and mappings are
            decoded as list, tuple or dict.
        allow_pickle: write any other object with pickle; else it is refused by its place.
        place: name of the value in errors.
    """
    writer = _Writer(allow_pickle)
    text = json.dumps(writer.plain(value, place, 0), separators=(",", ":")).encode("ascii")
    return b"".join([_FIXED.pack(_MAGIC, _VERSION, len(text)), text, *writer.blobs])


def decode_extra(
    data: bytes,
    *,
    allow_pickle: bool = False,
    file: str = "",
) -> Any:
    """Undo `encode_extra`, for bytes from an untrusted source; `file` is their key, for errors.

    With `allow_pickle` pickled objects are read too, so their author can run code in this process.
    Without it they raise `CheckpointError`. Bytes that `encode_extra` does not write raise
    `CheckpointCorrupt`.
    """
    try:
        magic, version, size = _FIXED.unpack_from(data)
        if magic != _MAGIC or version != _VERSION or size > len(data) - _FIXED.size:
            raise FormatFault(f"begins with {data[: _FIXED.size]!r}")
        start = _FIXED.size + size
        reader = _Reader(data, start, allow_pickle)
        value = reader.value(load_json(bytes(data[_FIXED.size : start])))
        if reader.place != len(data):
            raise FormatFault(f"{len(data) - reader.place} bytes follow the last value")
    except (TypeError, ValueError, LookupError, struct.error, RecursionError) as fault:
        told = fault if isinstance(fault, FormatFault) else repr(fault)
        raise CheckpointCorrupt(
            f"extra state `{file}` is damaged: {told!s:.200}; go back to an older checkpoint",
            file=file,
        ) from None
    return value


class _Writer:
    """Turns values into plain JSON and a list of blobs."""

    def __init__(self, allow_pickle: bool) -> None:
        self.blobs: list[bytes] = []
        self._allow_pickle = allow_pickle

    def plain(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if value is None or kind in (bool, str):
            return value
        if kind is int:
            # Python refuses to read numbers of thousands of digits as text.
            if abs(value).bit_length() <= 4096:
                return value
            raise TypeError(f"`{path}` must have at most 4096 bits; store it as bytes")
        if kind is float:
            return value if math.isfinite(value) else {"!float": repr(value)}
        if depth > MAX_DEPTH:
            raise TypeError(f"`{path}` is nested more than {MAX_DEPTH} deep; does it hold itself?")
        if isinstance(value, (list, tuple)):
            parts = [self.plain(v, f"{path}[{n}]", depth + 1) for n, v in enumerate(value)]
            return parts if isinstance(value, list) else {"!tuple": parts}
        if not isinstance(value, Mapping):
            return self._blob(value, path)
        pairs = [
            (
                self._key(key, path, depth),
                self.plain(v, f"{path}.{key!s:.80}".removeprefix("the value."), depth + 1),
            )
            for key, v in value.items()
        ]
        if kind is OrderedDict:
            return {"!ordered": pairs}
        if all(type(key) is str and not key.startswith("!") for key in value):
            return dict(pairs)
        return {"!map": pairs}

    def _key(self, key: Any, path: str, depth: int) -> Any:
        if type(key) is tuple:
            return {"!tuple": [self._key(part, path, depth + 1) for part in key]}
        if key is None or type(key) in (str, int, float, bool):
            return self.plain(key, f"key {key!r:.80} of {path}", depth)
        raise TypeError(
            f"keys of `{path}` must be texts, numbers or tuples of them, got {key!r:.80}"
        )

    def _blob(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in (bytes, bytearray):
            return {"!bytes" if kind is bytes else "!bytearray": self._keep(bytes(value))}
        if kind is complex:
            return {"!complex": self._keep(struct.pack("<dd", value.real, value.imag))}
        if isinstance(value, _NUMBERS) and value.dtype.kind in _ARRAY_KINDS:
            return {"!scalar": [_little(value.dtype), self._keep(_row_major(np.array(value)))]}
        if kind is np.ndarray and value.dtype.kind in _ARRAY_KINDS:
            sides = list(value.shape)
            return {"!array": [_little(value.dtype), sides, self._keep(_row_major(value))]}
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if self._allow_pickle:
            import pickle

            return {"!pickle": self._keep(pickle.dumps(value, protocol=4))}
        raise TypeError(
            f"`{path}` must be plain data (numbers, text, bytes, arrays, dense "
            f"tensors, lists, dicts), got {kind.__name__}; store its parameters, give it "
            "`state_dict` and `load_state_dict`, or pass `allow_pickle=True` here and where it is "
            "loaded"
        )

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        import torch

        names = {getattr(torch, name, None): dtype for dtype, name in TORCH_TYPES.items()}
        dtype = names.get(value.dtype)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        dense = value.layout is torch.strided and not value.is_meta and not value.is_nested
        if not plain or dtype is None or not dense:
            raise TypeError(
                f"`{path}` must be a plain dense tensor, got {type(value).__name__} "
                f"of {value.dtype}, {value.layout} on {value.device}; convert it"
            )
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
        return {"!tensor": [dtype, list(value.shape), self._keep(data)]}

    def _keep(self, blob: bytes) -> int:
        self.blobs.append(blob)
        return len(blob)


class _Reader:
    """Turns plain JSON and blobs into values; blobs are taken in order.

    Malformed JSON raises any error here; `decode_extra` turns it into `CheckpointCorrupt`.
    """

    def __init__(self, data: bytes, place: int, allow_pickle: bool) -> None:
        self.place = place
        self._data = data
        self._allow_pickle = allow_pickle

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(part) for part in plain]
        if not isinstance(plain, dict):
            return plain
        tag = next(iter(plain), "")
        if not tag.startswith("!"):
            return {key: self.value(part) for key, part in plain.items()}
        (content,) = plain.values()
        return self._tagged(tag, content)

    def _tagged(self, tag: str, content: Any) -> Any:
        match tag:
            case "!tuple":
                return tuple([self.value(part) for part in content])
            case "!map" | "!ordered":
                pairs = [(self.value(key), self.value(part)) for key, part in content]
                found = dict(pairs) if tag == "!map" else OrderedDict(pairs)
                if len(found) != len(pairs):
                    raise FormatFault("a key appears twice")
                return found
            case "!float" if content in ("nan", "inf", "-inf"):
                return float(content)
            case "!bytes":
                return self._take(content)
            case "!bytearray":
                return bytearray(self._take(content))
            case "!complex":
                return complex(*struct.unpack("<dd", self._take(content)))
            case "!scalar":
                name, size = content
                return self._array(name, [], size)[()]
            case "!array":
                return self._array(*content)
            case "!tensor":
                return self._tensor(*content)
            case "!pickle":
                return self._pickle(content)
        raise FormatFault(f"unknown kind of value {tag!r:.80}: {content!r:.80}")

    def _take(self, size: Any) -> bytes:
        if type(size) is not int or not 0 <= size <= len(self._data) - self.place:
            raise FormatFault(f"a blob of {size!r:.80} bytes goes over the end")
        self.place += size
        return bytes(self._data[self.place - size : self.place])

    def _array(self, name: str, shape: list[int], size: int) -> Any:
        dtype = np.dtype(name if _ARRAY_TYPE.fullmatch(name) else "none")
        return np.frombuffer(bytearray(self._fitting(shape, size, dtype.itemsize)), dtype).reshape(
            shape
        )

    def _tensor(self, dtype: str, shape: list[int], size: int) -> Any:
        data = self._fitting(shape, size, ITEM_BYTES[dtype])
        import torch

        kind = getattr(torch, TORCH_TYPES[dtype], None)
        if kind is None:
            raise FormatFault(f"this torch has no type {dtype}")
        if not data:
            return torch.empty(shape, dtype=kind)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)

    def _fitting(self, shape: list[int], size: int, item_bytes: int) -> bytes:
        """Take the blob of an array, which must fit its shape."""
        if not all(type(side) is int and side >= 0 for side in shape):
            raise FormatFault(f"a shape must hold counts, got {shape!r:.80}")
        # Leave out zeros: libraries refuse an empty array whose other extents are too large.
        full = math.prod(side for side in shape if side) * item_bytes
        if size != math.prod(shape) * item_bytes or full >= 1 << 62 or len(shape) > MAX_DIMS:
            raise FormatFault(f"shape {shape!r:.80} in {size!r:.80} bytes")
        return self._take(size)

    def _pickle(self, size: Any) -> Any:
        if not self._allow_pickle:
            raise CheckpointError(
                "this extra state holds a pickled object; if you trust whoever wrote it, load it "
                "with `allow_pickle=True`"
            )
        import pickle

        return pickle.loads(self._take(size))


def _little(dtype: np.dtype[Any]) -> str:
    return dtype.newbyteorder("<").str


def _row_major(array: np.ndarray[Any, Any]) -> bytes:
    return array.astype(array.dtype.newbyteorder("<")).tobytes()
