"""Strict reads of JSON from untrusted files, and the error that every reader of a format raises."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

Values: TypeAlias = Mapping[str, Any]
"""Values by name; only read."""
Fields: TypeAlias = dict[str, Any]
"""Values by name."""
JSON_GROWTH = 48
"""Upper bound of the bytes in memory per byte of parsed JSON."""


class FormatFault(ValueError):
    """Bytes violate a format; readers turn it into `CheckpointCorrupt`."""


def dump_json(value: Any) -> bytes:
    """Return canonical JSON: sorted keys, no spaces, ASCII."""
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"must be plain JSON, got {error}") from error


def are_counts(values: Iterable[object]) -> bool:
    """Return whether all values are whole numbers from 0 to below 2**62."""
    return all(type(value) is int and 0 <= value < 1 << 62 for value in values)


def load_json(data: bytes) -> Any:
    """Parse JSON; refuse a name that appears twice in an object, and NaN and infinities."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a name appears twice in one object")
        return dict(pairs)

    def refuse(name: str) -> Any:
        raise ValueError(f"number {name}")

    try:
        # Decode first: `json` guesses the encoding of bytes and may import a codec for it.
        return json.loads(data.decode(), object_pairs_hook=once, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise FormatFault(f"must be JSON, got {error!r:.200}") from None
