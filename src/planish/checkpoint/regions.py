"""Which region of which tensor lies in which file: the index of a train state, as JSON.

Deliberately without torch: exports and counters are read by processes that have no use for it.

Source: ByteCheckpoint, arXiv 2407.20143, section 3.2 (tensor shards as boxes of a global tensor).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planish.errors import CheckpointError

INDEX_FILE = "tensors.json"
EXTRA_FILE = "extra.json"

ITEM_BYTES: dict[str, int] = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of one element, by the type names of safetensors."""


@dataclass(frozen=True)
class Region:
    """A box of a tensor and the entry that holds its elements in row-major order."""

    offsets: tuple[int, ...]
    """First index in each dimension."""
    lengths: tuple[int, ...]
    """Extent in each dimension."""
    file: str
    """Name of a safetensors file below the state."""

    def entry(self, tensor: str) -> str:
        """Return the name of the box inside its file."""
        return entry_name(tensor, self.offsets, self.lengths)


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a state.

    Example:
        >>> halves = [Region((0, 0), (1, 3), "a.safetensors"), Region((1, 0), (1, 3), "b")]
        >>> StoredTensor("F32", (2, 3), tuple(halves)).fault()
        ''
    """

    dtype: str
    """Key of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    regions: tuple[Region, ...]
    """Disjoint boxes that cover it."""

    def fault(self) -> str:
        """Say why the regions do not cover the tensor exactly once; empty when they do."""
        volume = 0
        for region in self.regions:
            ends = [a + b for a, b in zip(region.offsets, region.lengths, strict=True)]
            inside = all(e <= s for e, s in zip(ends, self.shape, strict=True))
            if not inside:
                return f"region at {region.offsets} of {region.lengths} lies outside {self.shape}"
            volume += math.prod(region.lengths)
        if volume != math.prod(self.shape):
            return f"regions hold {volume} of {math.prod(self.shape)} elements"
        return self._overlap()

    def _overlap(self) -> str:
        boxes = sorted((r for r in self.regions if math.prod(r.lengths)), key=lambda r: r.offsets)
        for position, first in enumerate(boxes):
            for second in boxes[position + 1 :]:
                if first.lengths and second.offsets[0] >= first.offsets[0] + first.lengths[0]:
                    break
                if _meet(first, second):
                    return f"regions at {first.offsets} and {second.offsets} overlap"
        return ""


def _meet(first: Region, second: Region) -> bool:
    sides = zip(first.offsets, first.lengths, second.offsets, second.lengths, strict=True)
    return all(max(a, c) < min(a + b, c + d) for a, b, c, d in sides)


def entry_name(tensor: str, offsets: Sequence[int], lengths: Sequence[int]) -> str:
    """Return the name of a box inside its file: `<tensor>|<offsets>|<lengths>`."""
    return "|".join([tensor, ",".join(str(v) for v in offsets), ",".join(str(v) for v in lengths)])


def encode_index(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Return the index as canonical JSON."""
    raw = {
        name: {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "regions": [
                {"offsets": list(r.offsets), "lengths": list(r.lengths), "file": r.file}
                for r in sorted(tensor.regions, key=lambda r: (r.offsets, r.file))
            ],
        }
        for name, tensor in tensors.items()
    }
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode("ascii")


def parse_index(data: bytes, *, name: str) -> dict[str, StoredTensor]:
    """Parse an index, trusting nothing in it.

    Args:
        data: the whole file.
        name: what to call it in errors.

    Raises:
        CheckpointError: not an index, or the regions of a tensor do not cover it exactly once.
    """
    try:
        raw: Any = json.loads(data)
        tensors = {str(key): _parse_tensor(value) for key, value in raw.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"`{name}` must be the JSON index of a train state, got {data[:80]!r} ({error}); "
            "save the state again"
        ) from None
    faults = [f"`{key}`: {value.fault()}" for key, value in tensors.items() if value.fault()]
    if faults:
        raise CheckpointError(
            f"`{name}` must cover each tensor exactly once, got {'; '.join(faults[:8])}; "
            "save the state again"
        )
    return tensors


def _parse_tensor(raw: Any) -> StoredTensor:
    shape = _counts(raw["shape"])
    if raw["dtype"] not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {raw['dtype']!r}")
    regions = []
    for region in raw["regions"]:
        offsets, lengths = _counts(region["offsets"]), _counts(region["lengths"])
        if not len(offsets) == len(lengths) == len(shape):
            raise ValueError(f"a region of {len(offsets)} dimensions in a tensor of {len(shape)}")
        if not isinstance(region["file"], str):
            raise TypeError(f"file name {region['file']!r}")
        regions.append(Region(offsets, lengths, region["file"]))
    return StoredTensor(raw["dtype"], shape, tuple(regions))


def _counts(raw: Any) -> tuple[int, ...]:
    if not isinstance(raw, list) or not all(type(v) is int and 0 <= v < 1 << 48 for v in raw):
        raise ValueError(f"{raw!r:.80} is not a list of counts")
    return tuple(raw)
